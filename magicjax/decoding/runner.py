"""Runs the programs of a request, from prompts to output."""

import dataclasses
import logging
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from magicjax.decoding import memory, program_cache
from magicjax.decoding.controller import PROBE_ROUNDS, Arm, Controller
from magicjax.decoding.loop import ALL_ROUNDS, DecodeState, Prefilled
from magicjax.decoding.request import Request
from magicjax.decoding.stats import Stats, acceptance
from magicjax.decoding.text_stream import TextStream
from magicjax.drafters.base import Previous
from magicjax.grammars.matcher import Matcher, forced_tokens, tree_masks
from magicjax.kv_cache.full_cache import KVCache
from magicjax.settings import PrefillSettings, Settings, StatsSpec
from magicjax.verification.logprobs import LogProbs
from sharding import global_arrays

logger = logging.getLogger("magicjax")

Rounds = Generator[list[Int[np.ndarray, "T"]], bool | None, Any]
Call = tuple[int, Int[np.ndarray, "B A"]]
ROUNDS_PER_CALL = 8  # of the loop between two searches for stop strings


@dataclasses.dataclass(frozen=True)
class Output:
    """The result of `generate`.

    Attributes:
      sequences: per row, prompt and new tokens, int32.
      texts: per row, the new text, which continues that of the prompt: without special tokens and
        the token that ended it, before the stop string. None without a tokenizer.
      reasoning: per row, the text before the answer that the model marks as reasoning. None
        without a tokenizer.
      tokens: int32 [B, M], the new tokens of each row, padded with the pad token to the largest
        limit; after a stop string, up to the one that completed it.
      lengths: int32 [B], the number of new tokens of each row.
      finish_reasons: per row, why it ended: "eos", "length", "stop", or "cancelled" in a stream
        that was ended by `send(True)`.
      logprobs: per row, of its new tokens, None for a row that did not request them; None if no
        row did.
      prompt_logprobs: the same of each prompt's tokens, except for the first one.
      stats: acceptance, counts, times and bytes.
      choice: with `drafter="auto"`, the selected `magicjax.Choice`, which can be reused.
    """

    sequences: list[Int[np.ndarray, "T"]]
    texts: list[str] | None
    reasoning: list[str] | None
    tokens: Int[np.ndarray, "B M"]
    lengths: Int[np.ndarray, "B"]
    finish_reasons: list[str]
    logprobs: list[LogProbs | None] | None
    prompt_logprobs: list[LogProbs | None] | None
    stats: Stats
    choice: Any = None


def prefill_and_init(request: Request) -> tuple[DecodeState, float]:
    """Runs the programs `prefill` and `init`; returns the state and their seconds.

    Raises:
      OutOfMemoryError: the request does not fit the free memory, before anything is compiled.
    """
    memory.check(request)
    prefilled, prefill_s = prefill(request, request.prefill_settings)
    state, init_s = init_state(request, *prefilled)
    return state, prefill_s + init_s


def prefill(
    request: Request,
    settings: PrefillSettings,
    cache: KVCache | None = None,
    layer_inputs: dict[int, Any] | None = None,
) -> tuple[tuple[KVCache, Prefilled], float]:
    """Returns the results of prefill, and its seconds; donates `cache` and `layer_inputs`.

    Args:
      request: of the prompts.
      settings: the request's, or those of other attention statistics.
      cache: of the first tokens of each row; None: an empty one is made.
      layer_inputs: of earlier calls for the same prompts, as in `ModelStats`; None: of none.
    """
    arguments = request.target, request.rows, cache, layer_inputs
    return _run(request, "prefill", settings, arguments)


def prompt_logprobs(request: Request, cache: KVCache | None = None) -> list[LogProbs]:
    """Returns the log-probabilities of each prompt's tokens after the first, as numpy arrays.

    Args:
      request: of the prompts; with as many alternatives as any row's new tokens or prompt have.
      cache: without tokens; None: one is made.
    """
    count = request.settings.logprobs or 0
    count = max(count, *(each.prompt_logprobs or 0 for each in request.params))
    outputs = StatsSpec(layer_inputs=(request.target.config.num_layers,))
    settings = dataclasses.replace(request.prefill_settings, logprobs=count, stats_spec=outputs)
    arguments = request.target, request.rows, cache
    found, _ = _run(request, "prompt_logprobs", settings, arguments)
    found = global_arrays.fetch(found)
    rows = zip(request.params, request.prompts, strict=True)
    return [
        found[i, : len(prompt) - 1].most_likely(params.prompt_logprobs or 0)
        for i, (params, prompt) in enumerate(rows)
    ]


def init_state(
    request: Request, cache: KVCache, prefilled: Prefilled, previous: Previous | None = None
) -> tuple[DecodeState, float]:
    """Returns the initial state, and the seconds of init; donates `cache` and `previous`.

    Args:
      request: of the prompts.
      cache, prefilled: the results of `prefill`.
      previous: the drafter's state after an earlier text; None without one.
    """
    arguments = request.target, request.drafter, cache, prefilled, request.rows, previous
    return _run(request, "init", request.settings, arguments)


def run(
    request: Request, settings: Settings, state: DecodeState, rounds: int = ALL_ROUNDS
) -> tuple[DecodeState, float]:
    """Returns the state after some rounds, and their seconds.

    Args:
      request: the request of the state.
      settings: the request's, or those of a shallower tree (`Settings.with_tree`).
      state: is donated.
      rounds: the maximum; fewer run if all rows end.
    """
    arguments = request.loop_arguments(with_rounds(state, rounds))
    return _run(request, "decode", settings, arguments)


def run_rounds(
    request: Request,
    settings: Settings,
    state: DecodeState,
    rounds: int,
    matchers: Sequence[Matcher | None] = (),
) -> tuple[DecodeState, float, int]:
    """Returns (the state after some rounds, their seconds, their number), as `run` does.

    Args:
      request, settings, state, rounds: as for `run`.
      matchers: of the rows, None for rows without a grammar; they follow the text. Then the rounds
        also end when a row does. (): no row has a grammar.
    """
    if not any(matchers):
        state, seconds = run(request, settings, state, rounds)
        return state, seconds, int(state.rounds)
    state, seconds, ran = run_grammar_rounds(request, settings, state, rounds, matchers)
    for i, matcher in enumerate(matchers):
        if matcher is not None and matcher.error:
            raise RuntimeError(f"row {i}: the grammar cannot be followed: {matcher.error}")
    return state, seconds, ran


def run_grammar_rounds(
    request: Request,
    settings: Settings,
    state: DecodeState,
    rounds: int,
    matchers: Sequence[Matcher | None],
) -> tuple[DecodeState, float, int]:
    """Returns (the state, seconds, rounds) after `rounds`, or after a row has ended.

    The arguments are those of `run_rounds`; the state is donated. A row whose matcher has an error
    ends with EOS.
    """
    begin, ran, vocab_size = time.perf_counter(), 0, request.target.config.vocab_size
    programs: dict[str, jax.stages.Compiled] = {}  # to find one takes a millisecond

    def call(name: str, *arguments: Any) -> Any:
        if name not in programs:
            programs[name] = program_cache.program(name, settings, *arguments)
        return programs[name](*arguments)

    with memory.explained(request):
        live, ended = _push(matchers, state)
        while ran < rounds:
            before, rows = ended, state.ended.sharding

            def forced(count: int, live=live, rows=rows) -> jax.Array:
                return global_arrays.put(forced_tokens(live, count), rows)

            if request.drafter is not None:
                drafter = request.drafter.with_forced(state.drafter, forced)
                state = dataclasses.replace(state, drafter=drafter)
            arguments = request.loop_arguments(state)
            nodes, proposed = call("propose", *arguments)
            scored = call("score", *arguments, proposed)
            tokens, parents = global_arrays.fetch(nodes)
            masks = tree_masks(live[: len(tokens)], tokens, parents, vocab_size)
            allowed = global_arrays.put(masks, rows)
            state = call("verify", *arguments, proposed, scored, allowed)
            live, ended = _push(matchers, state)
            ran += 1
            if (ended != before).any():
                break
    return state, time.perf_counter() - begin, ran


def _push(
    matchers: Sequence[Matcher | None], state: DecodeState
) -> tuple[list[Matcher | None], Bool[np.ndarray, "B"]]:
    """Adds the new tokens of each row to its matcher.

    Returns (the matchers of rows that have not ended, which rows have).
    """
    emitted, output, ended = global_arrays.fetch((state.emitted, state.output, state.ended))
    for i, matcher in enumerate(matchers):
        if matcher is not None:
            matcher.push(output[i, matcher.length : emitted[i]].tolist())
    return [None if end else one for end, one in zip(ended, matchers, strict=True)], ended


def matchers_of(request: Request) -> list[Matcher | None]:
    """Returns the matchers of the rows' empty texts; [] if no row has a grammar."""
    if request.rows.allowed is None:
        return []
    found: list[Matcher | None] = []
    ends_of_rows = global_arrays.fetch(request.rows.eos).tolist()
    for params, ends in zip(request.params, ends_of_rows, strict=True):
        stop = params.stop_token_ids
        eos = [token for token in ends if token not in stop]
        made = params.grammar and Matcher(request.target, params.grammar, eos, stop)
        found.append(made or None)
    return found


def run_to_end(request: Request, state: DecodeState) -> tuple[DecodeState, float]:
    """Returns the state when all rows have ended, and the seconds of the loop; donates `state`.

    The loop compares tokens, not strings. With stop strings it therefore runs a few rounds at a
    time, and the host searches the text. With grammars, the host masks every round.
    """
    texts, matchers, total = searched_texts(request), matchers_of(request), 0.0
    if not texts and not matchers:
        return run(request, request.settings, state)
    while True:
        state, _, _, ended = end_stopped(state, texts)
        if ended.all():
            return state, total
        state, seconds, _ = run_rounds(request, request.settings, state, ROUNDS_PER_CALL, matchers)
        total += seconds


def run_adaptive(
    request: Request,
    settings: Mapping[Arm, Settings],
    controller: Controller,
    state: DecodeState,
    rounds: int,
) -> tuple[DecodeState, list[Call], float]:
    """Returns (the state when all rows have ended, calls, seconds); donates `state`.

    Args:
      request: with a drafter.
      settings: of the loop by arm, of one drafter. All loops are compiled before the first call.
      controller: chooses the arm of each call after the first one.
      state: after prefill, as deep as the deepest tree.
      rounds: per call that is no probe.
    """
    for one in settings.values():
        compile_loop(request, one, state)
    drafter, name = request.drafter, max(settings, key=lambda arm: arm.depth).drafter
    assert drafter is not None
    calls: list[Call] = []
    ran: set[Arm] = set()
    total, decode_s = np.zeros(state.histogram.shape, np.int32), 0.0
    limits, texts = np.asarray(request.rows.limits), searched_texts(request)
    matchers = matchers_of(request)
    prompt_lengths = np.array([len(prompt) for prompt in request.prompts])
    state, emitted, _, ended = end_stopped(state, texts)
    while not ended.all():
        if calls:
            left = limits - emitted
            lengths = prompt_lengths + emitted
            live = {int(row): (int(lengths[row]), int(left[row])) for row in np.flatnonzero(~ended)}
            controller = controller.chosen(live)
        arm, most = controller.arm, PROBE_ROUNDS if controller.is_probe else rounds
        loaded = arm in ran
        ran.add(arm)
        state, seconds, _ = run_rounds(request, settings[arm], state, most, matchers)
        state, emitted, _, ended = end_stopped(state, texts)
        histogram = np.array(state.histogram) - total
        total, decode_s = total + histogram, decode_s + seconds
        calls.append((arm.depth, histogram))
        ran_rounds = int(histogram.sum(1).max())
        simulated = drafter.simulated(state.drafter)
        by_name = {} if simulated is None else {name: np.array(simulated)}
        controller = controller.counted(total, ran_rounds, seconds if loaded else None, by_name)
    return state, calls, decode_s


def searched_texts(request: Request) -> list[TextStream]:
    """Returns the empty texts of the rows, in which stop strings are searched for; [] without."""
    return _texts(request) if any(params.stop for params in request.params) else []


def _texts(request: Request) -> list[TextStream]:
    """Returns the empty texts of the rows."""
    ends = global_arrays.fetch(request.rows.eos).tolist()
    return [
        TextStream(request.target.tokenizer, params.stop, prompt.tolist(), of_row, params.grammar)
        for params, prompt, of_row in zip(request.params, request.prompts, ends, strict=True)
    ]


def end_stopped(
    state: DecodeState, texts: Sequence[TextStream]
) -> tuple[DecodeState, Int[np.ndarray, "B"], Int[np.ndarray, "B M"], Bool[np.ndarray, "B"]]:
    """Returns (the state, tokens of each row, the output, which rows have ended) on the host.

    Rows whose text contains a stop string end, and the tokens after it do not count.

    Args:
      state: between two calls of the loop.
      texts: of `searched_texts`; the new tokens are pushed.
    """
    lengths, output, ended = global_arrays.fetch((state.emitted, state.output, state.ended))
    if not texts:
        return state, lengths, output, ended
    for text, row, length in zip(texts, output, lengths, strict=True):
        if not text.stopped:
            text.push(row[len(text.tokens) : length].tolist())
    stopped = ended | np.array([text.stopped for text in texts])
    if (stopped != ended).any():
        state = dataclasses.replace(state, ended=global_arrays.put(stopped, state.ended.sharding))
    return state, np.array([len(text.tokens) for text in texts], np.int32), output, stopped


def run_until_row_ends(
    request: Request, loop: jax.stages.Compiled, state: DecodeState
) -> tuple[DecodeState, float]:
    """Returns the state after a row has ended or `state.max_rounds` have run, and the seconds.

    Args:
      request: the request of the state.
      loop: `decode_until_row_ends` for the request, from `compile_loop`. A caller that runs it many
        times keeps it: to find it by the shapes of all arguments takes a millisecond.
      state: is donated.
    """
    with memory.explained(request):
        return timed(loop, *request.loop_arguments(state))


def insert(
    request: Request, state: DecodeState, row: DecodeState, slot: int
) -> tuple[DecodeState, float]:
    """Returns the state with a row replaced, and the seconds; donates `state`, but not `row`."""
    index = global_arrays.put(np.int32(slot), state.rounds.sharding)
    return _run(
        request, "insert", request.settings, (request.target, request.drafter, state, row, index)
    )


def extract(request: Request, state: DecodeState, slot: int) -> tuple[tuple[KVCache, Any], float]:
    """Returns the target's cache and the drafter's state of one row, and the seconds."""
    index = global_arrays.put(np.int32(slot), state.rounds.sharding)
    return _run(
        request, "extract", request.settings, (request.target, request.drafter, state, index)
    )


def stream_rounds(
    request: Request, state: DecodeState
) -> Generator[list[Int[np.ndarray, "T"]], bool | None, tuple[DecodeState, float]]:
    """Yields the new tokens of each row after prefill and after every round.

    Returns the last state and the seconds of all rounds. It ends after the round in which all rows
    have ended, or when True is sent to it.
    """
    texts, matchers, decode_s = searched_texts(request), matchers_of(request), 0.0
    yielded = np.zeros(len(request.prompts), np.int32)
    while True:
        state, emitted, output, ended = end_stopped(state, texts)
        stop = yield [row[a:b] for row, a, b in zip(output, yielded, emitted, strict=True)]
        yielded = emitted
        if stop or ended.all():
            return state, decode_s
        if matchers:
            state, seconds, _ = run_rounds(request, request.settings, state, 1, matchers)
        else:
            arguments = request.loop_arguments(state)
            state, seconds = _run(request, "step", request.settings, arguments)
        decode_s += seconds


def _run(request: Request, name: str, settings: Any, arguments: tuple) -> tuple[Any, float]:
    with memory.explained(request):
        return timed(program_cache.program(name, settings, *arguments), *arguments)


def compile_loop(
    request: Request, settings: Settings, state: DecodeState, name: str = "decode"
) -> jax.stages.Compiled:
    """Returns the compiled program that `run` runs, or another loop of that name."""
    with memory.explained(request):
        return program_cache.program(name, settings, *request.loop_arguments(state))


def with_rounds(state: DecodeState, rounds: int) -> DecodeState:
    """Returns the state with `max_rounds` set."""
    most = global_arrays.put(np.int32(rounds), state.max_rounds.sharding)
    return dataclasses.replace(state, max_rounds=most)


def state_shapes(request: Request) -> DecodeState:
    """Returns the shapes of the initial state; runs and allocates nothing."""
    settings, arguments = request.prefill_settings, (request.target, request.rows)
    prefilled = program_cache.result_shapes("prefill", settings, arguments)
    arguments = request.target, request.drafter, *prefilled, request.rows
    return program_cache.result_shapes("init", request.settings, arguments)


def log_request(request: Request) -> None:
    """Logs the size of the caches and the attention backend."""
    target_bytes, draft_bytes = request.kv_bytes
    logger.info("KV cache: target %.1f MB, draft %.1f MB", target_bytes / 1e6, draft_bytes / 1e6)
    logger.info("attention: %s", request.settings.backend)


def timed(program, *arguments) -> tuple[Any, float]:
    """Returns the finished results of a program, and its seconds."""
    before = time.perf_counter()
    results = jax.block_until_ready(program(*arguments))
    return results, time.perf_counter() - before


def output_of(
    request: Request,
    state: DecodeState,
    compiled: tuple[int, float],
    calls: Sequence[Call] = (),
    **measured: Any,
) -> Output:
    """Returns the output of a state whose rows have ended.

    Args:
      request, state: the request and its final state.
      compiled: `program_cache.totals` before the request.
      calls: depth and histogram of each call of the loop, if their trees differed.
      measured: the measured fields of `Stats`.
    """
    counters = state.histogram, state.ranks, state.nodes
    output, emitted, ended, logprobs, (histogram, ranks, nodes) = global_arrays.fetch(
        (state.output, state.emitted, state.ended, state.logprobs, counters)
    )
    new = [row[:n] for row, n in zip(output, emitted, strict=True)]
    tokenizer, streams, texts, reasoning = request.target.tokenizer, [], None, None
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        streams = _texts(request)
        for text, row in zip(streams, new, strict=True):
            text.push(row.tolist())
            text.finish()
        texts = [text.text for text in streams]
        reasoning = [text.reasoning for text in streams]
        new = [row[: len(text.tokens)] for text, row in zip(streams, new, strict=True)]
    elif tokenizer is not None:  # without tokenizer.json
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in new]
        reasoning = [""] * len(new)
    lengths = np.array([len(row) for row in new], np.int32)
    if logprobs is not None:
        logprobs = [
            None if params.logprobs is None else logprobs[row, :n].most_likely(params.logprobs)
            for row, (params, n) in enumerate(zip(request.params, lengths, strict=True))
        ]
    asked = [params.prompt_logprobs is not None for params in request.params]
    of_prompts: Any = prompt_logprobs(request) if any(asked) else None
    if of_prompts is not None:
        of_prompts = [x if is_asked else None for x, is_asked in zip(of_prompts, asked)]
    output = output[:, : request.settings.max_tokens]
    inside = np.arange(output.shape[1]) < lengths[:, None]
    found = [text.stopped for text in streams] or [False] * len(new)
    rows = zip(found, new, request.params, strict=True)
    stopped = [is_found or row[-1] in params.stop_token_ids for is_found, row, params in rows]
    eos = global_arrays.fetch(request.rows.eos).tolist()
    target_bytes, draft_bytes = request.kv_bytes
    counted = acceptance(emitted, histogram, ranks, nodes, calls)
    decode_s = measured["decode_s"]
    compilations, compile_s = program_cache.totals()
    stats = Stats(
        **counted,
        **measured,
        compilations=compilations - compiled[0],
        compile_s=compile_s - compiled[1],
        tokens_per_s=counted["emitted"] / decode_s if decode_s else 0.0,
        kv_bytes_target=target_bytes,
        kv_bytes_draft=draft_bytes,
        attention_backend=str(request.settings.backend),
    )
    return Output(
        sequences=[np.concatenate(pair) for pair in zip(request.prompts, new, strict=True)],
        texts=texts,
        reasoning=reasoning,
        tokens=np.where(inside, output, request.pad_token_id).astype(np.int32),
        lengths=lengths,
        finish_reasons=[
            "stop" if stop else "cancelled" if not end else "eos" if row[-1] in ends else "length"
            for row, end, stop, ends in zip(new, ended, stopped, eos, strict=True)
        ],
        logprobs=logprobs,
        prompt_logprobs=of_prompts,
        stats=stats,
    )
