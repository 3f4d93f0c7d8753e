"""Rounds of a batch whose texts the host follows, and the output."""

import dataclasses
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from magicjax.decoding import program_cache
from magicjax.decoding.controller import PROBE_ROUNDS, Arm, Controller
from magicjax.decoding.counts import by_row
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.loop import ALL_ROUNDS, DecodeState
from magicjax.decoding.request import Request
from magicjax.decoding.stats import Stats, counted
from magicjax.decoding.text import NewTokens, Result, Text, matcher_of
from sharding import global_arrays

logger = logging.getLogger("magicjax")

ROUNDS_PER_CALL = 8  # of the loop between two searches for stop strings

Rounds = Generator[list[NewTokens], bool | None, Any]
Call = tuple[int, Int[np.ndarray, "B A"]]


@dataclasses.dataclass(frozen=True)
class Output:
    """The result of `generate`.

    Attributes:
      results: one per row.
      tokens: int32 [B, M], the new tokens of each row, padded with the pad token to the largest
        limit.
      stats: acceptance, counts, times and bytes.
      choice: with `drafter="auto"`, the selected `magicjax.Choice`, which can be reused.
    """

    results: list[Result]
    tokens: Int[np.ndarray, "B M"]
    stats: Stats
    choice: Any = None

    @property
    def sequences(self) -> list[Int[np.ndarray, "T"]]:
        """Per row, prompt and new tokens, int32."""
        return [np.concatenate([each.prompt, each.tokens]) for each in self.results]

    @property
    def texts(self) -> Any:
        """Per row, the new text; None without a tokenizer."""
        return self._of_rows("text")

    @property
    def reasoning(self) -> list[str]:
        """Per row, the text before the answer that the model marks as reasoning."""
        return [each.reasoning for each in self.results]

    @property
    def lengths(self) -> Int[np.ndarray, "B"]:
        """The number of new tokens of each row, int32."""
        return np.array([len(each.tokens) for each in self.results], np.int32)

    @property
    def finish_reasons(self) -> list[str]:
        """Per row, why it ended: "eos", "length", "stop", or "cancelled" by `send(True)`."""
        return [each.finish_reason for each in self.results]

    @property
    def logprobs(self) -> Any:
        """Per row, of its new tokens, None where not requested; None if no row requested them."""
        return self._of_rows("logprobs")

    @property
    def prompt_logprobs(self) -> Any:
        """The same of each prompt's tokens, except for the first one."""
        return self._of_rows("prompt_logprobs")

    def _of_rows(self, name: str) -> list | None:
        values = [getattr(each, name) for each in self.results]
        return None if all(value is None for value in values) else values


def texts_of(request: Request) -> list[Text]:
    """Returns the empty texts of the rows."""
    target, limits = request.target, global_arrays.fetch(request.rows.limits).tolist()
    texts = []
    for prompt, params, limit in zip(request.prompts, request.params, limits, strict=True):
        matcher = matcher_of(target, prompt, params, request.eos)
        texts.append(Text(target.tokenizer, prompt, params, limit, request.eos, matcher))
    return texts


def run_to_end(decoder: Decoder, state: DecodeState, texts: Sequence[Text]) -> DecodeState:
    """Returns the state when all texts have ended; donates `state`.

    The loop compares tokens, not strings. With stop strings it therefore runs a few rounds at a
    time, and the host searches the text. With grammars, the host masks every round.
    """
    rounds = ROUNDS_PER_CALL if any(text.params.stop for text in texts) else ALL_ROUNDS
    return exhausted(run_rounds(state, texts, lambda state: decode(decoder, state, texts, rounds)))


def run_adaptive(
    decoders: Mapping[Arm, Decoder],
    controller: Controller,
    state: DecodeState,
    texts: Sequence[Text],
    rounds: int,
) -> tuple[DecodeState, list[Call]]:
    """Returns (the state when all texts have ended, calls); donates `state`.

    Args:
      decoders: by arm, for one request with a drafter; all loops are compiled before the first
        call.
      controller: chooses the arm of each call after the first one.
      state: after prefill, as deep as the deepest tree.
      texts: one per row.
      rounds: per call that is not a probe.
    """
    for decoder in decoders.values():
        decoder.loop(state)
    drafter = next(iter(decoders.values())).request.drafter
    assert drafter is not None
    name = max(decoders, key=lambda arm: arm.depth).drafter
    calls: list[Call] = []
    ran: set[Arm] = set()
    total = np.zeros(state.histogram.shape, np.int32)

    def run(state: DecodeState) -> DecodeState:
        nonlocal controller, total
        if calls:
            controller = controller.chosen(
                {i: t.lengths for i, t in enumerate(texts) if not t.ended}
            )
        arm, most = controller.arm, PROBE_ROUNDS if controller.is_probe else rounds
        loaded, decoder = arm in ran, decoders[arm]
        ran.add(arm)
        state = decode(decoder, state, texts, most)
        histogram = np.array(state.histogram) - total
        total = total + histogram
        calls.append((arm.depth, histogram))
        simulated = drafter.simulated(state.drafter)
        controller = controller.counted(
            total,
            int(histogram.sum(1).max()),
            decoder.clock.newest_s if loaded else None,
            {} if simulated is None else {name: np.array(simulated)},
        )
        return state

    return exhausted(run_rounds(state, texts, run)), calls


def exhausted(rounds: Generator[Any, Any, DecodeState]) -> DecodeState:
    """Returns the last state of `run_rounds`."""
    while True:
        try:
            next(rounds)
        except StopIteration as end:
            return end.value


def decode(decoder: Decoder, state: DecodeState, texts: Sequence[Text], rounds: int) -> DecodeState:
    """Returns the state after some rounds under the grammars of the texts."""
    return decoder.decode(state, rounds, matchers=[text.matcher for text in texts])


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
      RuntimeError: a grammar exceeds its limits in the middle of a text, or logits are NaN.
    """
    while True:
        state, pieces = _push(state, texts)
        stop = yield pieces
        if stop or all(text.ended for text in texts):
            return state
        state = decode(state)


def _push(state: DecodeState, texts: Sequence[Text]) -> tuple[DecodeState, list[NewTokens]]:
    """Returns the state, in which rows have ended whose texts have, and the new tokens."""
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
            raise RuntimeError(f"row {row}: {text.error}")
    finished = np.array([text.ended for text in texts])
    if (finished != ended).any():
        state = dataclasses.replace(state, ended=global_arrays.put(finished, state.ended.sharding))
    return state, pieces


def output_of(
    decoder: Decoder,
    state: DecodeState,
    texts: Sequence[Text],
    compiled: tuple[int, float],
    calls: Sequence[Call] = (),
    **measured: Any,
) -> Output:
    """Returns the output of texts that have ended; others are cancelled.

    Args:
      decoder: has run the request.
      state: the final one.
      texts: one per row.
      compiled: `program_cache.totals` before the request.
      calls: depth and histogram of each call of the loop, if their trees differed.
      measured: further fields of `Stats`.
    """
    request, clock = decoder.request, decoder.clock
    for text in texts:
        if not text.ended:
            text.finish("cancelled")
    wants_logprobs = any(params.prompt_logprobs is not None for params in request.params)
    of_prompts = decoder.prompt_logprobs() if wants_logprobs else [None] * len(texts)
    counters = state.emitted, state.histogram, state.ranks, state.nodes
    emitted, histogram, ranks, nodes = global_arrays.fetch(counters)
    calls = calls or [(decoder.loop_settings.shape.depth, histogram)]
    by_request = by_row(emitted, histogram, ranks, nodes, calls)
    ended = zip(texts, of_prompts, by_request, strict=True)
    results = [text.result(logprobs, counts) for text, logprobs, counts in ended]
    target_bytes, draft_bytes = request.kv_bytes
    compilations, compile_s = program_cache.totals()
    shape = len(results), request.settings.max_tokens
    tokens = np.full(shape, request.pad_token_id, np.int32)
    for row, result in zip(tokens, results, strict=True):
        row[: len(result.tokens)] = result.tokens
    stats = Stats(
        **counted(by_request),
        **measured,
        rounds=max(row.target_passes for row in by_request),
        prefill_s=clock.prefill_s,
        decode_s=clock.decode_s,
        compilations=compilations - compiled[0],
        compile_s=compile_s - compiled[1],
        kv_bytes_target=target_bytes,
        kv_bytes_draft=draft_bytes,
        attention_backend=str(request.settings.backend),
    )
    return Output(results, tokens, stats)


def log_request(request: Request) -> None:
    """Logs the size of the caches and the attention backend."""
    target_bytes, draft_bytes = request.kv_bytes
    logger.info("KV cache: target %.1f MB, draft %.1f MB", target_bytes / 1e6, draft_bytes / 1e6)
    logger.info("attention: %s", request.settings.backend)
