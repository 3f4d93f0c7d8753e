"""Runs a request's programs, from the prompts to the output."""

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from magicjax.decoding import program_cache
from magicjax.decoding.loop import ALL_ROUNDS, DecodeState, Prefilled, PrefillSettings, Settings
from magicjax.decoding.request import Request
from magicjax.decoding.stats import Stats, acceptance
from magicjax.kv_cache.full_cache import KVCache
from sharding import processes

logger = logging.getLogger("magicjax")

Call = tuple[int, Int[np.ndarray, "B A"]]


@dataclasses.dataclass(frozen=True)
class Output:
    """What `generate` returns.

    Attributes:
      sequences: for each row, prompt and new tokens, int32.
      texts: for each row, the new text without special tokens; None without a tokenizer.
      tokens: int32 [B, max_new_tokens], the new tokens, padded with the pad token.
      lengths: int32 [B], how many new tokens each row has.
      stats: acceptance, counts, times, bytes.
      choice: of `drafter="auto"`: what was chosen (`magicjax.Choice`), to be used again.
    """

    sequences: list[Int[np.ndarray, "T"]]
    texts: list[str] | None
    tokens: Int[np.ndarray, "B M"]
    lengths: Int[np.ndarray, "B"]
    stats: Stats
    choice: Any = None


def start(request: Request) -> tuple[DecodeState, float, float]:
    """Returns (the state behind the prompts, seconds that took, seconds of compiling)."""
    prefilled, prefill_s, compiling_prefill = prefill(request, request.prefill_settings)
    state, start_s, compiling_start = begin(request, *prefilled)
    return state, prefill_s + start_s, compiling_prefill + compiling_start


def prefill(
    request: Request, settings: PrefillSettings
) -> tuple[tuple[KVCache, Prefilled], float, float]:
    """Returns (the cache of the prompts and what else came of them, seconds, of compiling)."""
    arguments = request.prefill_arguments
    program, compiling = program_cache.program("prefill", settings, *arguments)
    return *timed(program, *arguments), compiling


def begin(
    request: Request, cache: KVCache, prefilled: Prefilled
) -> tuple[DecodeState, float, float]:
    """Returns what `start` does, of a cache that is there, whose memory it takes over."""
    arguments = request.start_arguments(cache, prefilled)
    program, compiling = program_cache.program("start", request.settings, *arguments)
    return *timed(program, *arguments), compiling


def run(
    request: Request, settings: Settings, state: DecodeState, rounds: int = ALL_ROUNDS
) -> tuple[DecodeState, float, float]:
    """Returns (the state after so many rounds or when all rows have ended, seconds, of compiling).

    Args:
      request: of the state.
      settings: the request's, or those of a shallower tree (`Settings.with_tree`).
      state: whose memory is taken over.
      rounds: at most.
    """
    state = with_rounds(state, rounds)
    arguments = request.target, request.drafter, state
    program, compiling = program_cache.program("decode", settings, *arguments)
    return *timed(program, *arguments), compiling


def compile_loop(request: Request, settings: Settings, state: DecodeState) -> float:
    """Returns the seconds spent compiling what `run` will run; 0 if it was there already."""
    arguments = request.target, request.drafter, state
    return program_cache.program("decode", settings, *arguments)[1]


def with_rounds(state: DecodeState, rounds: int) -> DecodeState:
    """Returns the state with so many rounds left for `decode`."""
    left = processes.put(np.int32(rounds), state.rounds_left.sharding)
    return dataclasses.replace(state, rounds_left=left)


def state_shapes(request: Request) -> DecodeState:
    """Returns the shapes of the state behind the prompts; nothing runs, nothing is allocated."""
    settings, arguments = request.prefill_settings, request.prefill_arguments
    prefilled = program_cache.result_shapes("prefill", settings, arguments)
    arguments = request.start_arguments(*prefilled)
    return program_cache.result_shapes("start", request.settings, arguments)


def tell(request: Request) -> None:
    """Logs, before anything is allocated, what the caches will take and who reads them."""
    of_target, of_draft = request.kv_bytes
    logger.info("KV cache: target %.1f MB, draft %.1f MB", of_target / 1e6, of_draft / 1e6)
    logger.info("attention: %s", request.settings.backend)


def timed(program, *arguments) -> tuple[Any, float]:
    """Returns (what the program gives back, once it is there, the seconds that took)."""
    before = time.perf_counter()
    results = jax.block_until_ready(program(*arguments))
    return results, time.perf_counter() - before


def output_of(
    request: Request, state: DecodeState, calls: Sequence[Call] = (), **measured: Any
) -> Output:
    """Returns the output of a state whose rows have ended.

    Args:
      request, state: what ran.
      calls: depth and histogram of the calls of the loop, where their trees differed.
      measured: the fields of `Stats` that are no matter of counting.
    """
    output, emitted, histogram, ranks, nodes = processes.fetch(
        (state.output, state.emitted, state.histogram, state.ranks, state.nodes)
    )
    output = output[:, : request.settings.max_new_tokens]
    inside = np.arange(output.shape[1]) < emitted[:, None]
    new = [row[:n] for row, n in zip(output, emitted, strict=True)]
    of_target, of_draft = request.kv_bytes
    counted = acceptance(emitted, histogram, ranks, nodes, calls)
    decode_s = measured["decode_s"]
    stats = Stats(
        **counted,
        **measured,
        tokens_per_s=counted["emitted"] / decode_s if decode_s else 0.0,
        kv_bytes_target=of_target,
        kv_bytes_draft=of_draft,
        attention_backend=str(request.settings.backend),
    )
    tokenizer, texts = request.target.tokenizer, None
    if tokenizer is not None:
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in new]
    return Output(
        sequences=[np.concatenate(pair) for pair in zip(request.prompts, new, strict=True)],
        texts=texts,
        tokens=np.where(inside, output, request.pad_token_id).astype(np.int32),
        lengths=emitted,
        stats=stats,
    )
