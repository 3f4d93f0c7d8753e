"""Rounds of a batch whose texts the host follows: to the end, one by one, or adaptive."""

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from magicjax.decoding.controller import PROBE_ROUNDS, Controller, Mode
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.loop import ALL_ROUNDS, DecodeState
from magicjax.decoding.text import NewTokens, Text, TextError
from sharding import global_arrays

Rounds = Generator[list[NewTokens], bool | None, Any]
Show = Callable[[list[NewTokens]], Any]  # called with what each row has generated
Call = tuple[int, Int[np.ndarray, "B A"]]  # depth of the tree, and histogram of each row
ROUNDS_PER_CALL = 8  # of the loop between two searches for stop strings


class Started(NamedTuple):
    """A request before its first round.

    Attributes:
      decoder: of the request.
      state: after prefill; None: nothing has run.
      choice: of drafter and tree, `magicjax.Choice`; None if there was none.
      search_s: seconds of the choice, without compilation.
    """

    decoder: Decoder
    state: DecodeState | None = None
    choice: Any = None
    search_s: float = 0.0


def run_to_end(
    decoder: Decoder, state: DecodeState, texts: Sequence[Text], show: Show | None = None
) -> DecodeState:
    """Returns the state when all texts have ended; donates `state`.

    The loop compares tokens, not strings. With stop strings it therefore runs a few rounds at a
    time, and the host searches the text. With `show`, which is called with the new tokens of all
    rows, it runs one round at a time.
    """
    rounds = ROUNDS_PER_CALL if any(text.params.stop for text in texts) else ALL_ROUNDS
    rounds = 1 if show else rounds
    running = run_rounds(state, texts, lambda state: decode_texts(decoder, state, texts, rounds))
    return exhausted(running, show)


def run_adaptive(
    decoders: Mapping[Mode, Decoder],
    controller: Controller,
    state: DecodeState,
    texts: Sequence[Text],
    rounds: int,
) -> tuple[DecodeState, list[Call]]:
    """Returns (the state when all texts have ended, calls); donates `state`.

    Args:
      decoders: by mode, for one request with a drafter; all loops are compiled before the first
        call.
      controller: chooses the mode of each call after the first one.
      state: after prefill, as deep as the deepest tree.
      texts: one per row.
      rounds: per call that is not a probe.
    """
    for decoder in decoders.values():
        decoder.loop(state)
    drafter = next(iter(decoders.values())).request.drafter
    assert drafter is not None
    name = max(decoders, key=lambda mode: mode.depth).drafter
    calls: list[Call] = []
    ran: set[Mode] = set()
    total = np.zeros(state.histogram.shape, np.int32)

    def run(state: DecodeState) -> DecodeState:
        nonlocal controller, total
        if calls:
            controller = controller.chosen(
                {i: t.lengths for i, t in enumerate(texts) if not t.ended}
            )
        mode = controller.mode
        decoder = decoders[mode]
        loaded = mode in ran
        ran.add(mode)
        max_rounds = PROBE_ROUNDS if controller.is_probe else rounds
        state = decode_texts(decoder, state, texts, max_rounds)
        histogram = np.array(state.histogram) - total
        total = total + histogram
        calls.append((mode.depth, histogram))
        simulated = drafter.simulated(state.drafter)
        controller = controller.counted(
            total,
            int(histogram.sum(1).max()),
            decoder.clock.newest_s if loaded else None,
            {} if simulated is None else {name: np.array(simulated)},
        )
        return state

    return exhausted(run_rounds(state, texts, run)), calls


def exhausted[T](rounds: Generator[list[NewTokens], Any, T], show: Show | None = None) -> T:
    """Returns what the rounds return, such as the last state; calls `show` with each yield."""
    while True:
        try:
            pieces = next(rounds)
        except StopIteration as end:
            return end.value
        if show:
            show(pieces)


def decode_texts(
    decoder: Decoder,
    state: DecodeState,
    texts: Sequence[Text | None],
    rounds: int,
    until: Literal["all", "any"] = "all",
) -> DecodeState:
    """Returns the state after some rounds under the grammars of the texts; with one, after a round.

    Args:
      decoder, state, rounds, until: as for `Decoder.decode`.
      texts: one per row, at the state's tokens; None for a row that has ended.
    """
    matchers = [None if text is None or text.ended else text.matcher for text in texts]
    if any(matchers):
        return decoder.decode_round(state, matchers)
    return decoder.decode(state, rounds, until=until)


def run_rounds(
    state: DecodeState, texts: Sequence[Text], decode: Callable[[DecodeState], DecodeState]
) -> Generator[list[NewTokens], bool | None, DecodeState]:
    """Yields what each row has generated, after prefill and after every call of the loop.

    Returns the last state. It ends when all texts have ended, or when True is sent to it.

    Args:
      state: after prefill; donated.
      texts: one per row, empty; the new tokens are pushed. Rows end with them.
      decode: runs some rounds.

    Raises:
      TextError: a grammar exceeds its limits in the middle of a text, or logits are NaN.
    """
    while True:
        state, pieces = push_tokens(state, texts)
        stop = yield pieces
        if stop or all(text.ended for text in texts):
            return state
        state = decode(state)


def push_tokens(state: DecodeState, texts: Sequence[Text]) -> tuple[DecodeState, list[NewTokens]]:
    """Returns the state, in which rows have ended whose texts have, and the new tokens.

    Raises:
      TextError: see `run_rounds`.
    """
    emitted, output, ended, logprobs = global_arrays.fetch(
        (state.emitted, state.output, state.ended, state.logprobs)
    )
    pieces = []
    for row, text in enumerate(texts):
        if text.ended:
            pieces.append(text.nothing)
            continue
        new = slice(0, emitted[row])
        pieces.append(text.push(output[row, new], logprobs and logprobs[row, new], ended[row]))
        if text.finish_reason == "error":
            raise TextError(f"row {row}: {text.error}")
    finished = np.array([text.ended for text in texts])
    if (finished != ended).any():
        state = dataclasses.replace(state, ended=global_arrays.put(finished, state.ended.sharding))
    return state, pieces
