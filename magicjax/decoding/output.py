"""The output of `magicjax.generate`: a result per row, and statistics."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from magicjax.decoding import program_cache
from magicjax.decoding.counts import by_row
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.loop import DecodeState
from magicjax.decoding.request import Request
from magicjax.decoding.rounds import Call
from magicjax.decoding.stats import Stats, summed
from magicjax.decoding.text import Result, Text, matcher_of
from sharding import global_arrays

logger = logging.getLogger("magicjax")


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
        return [np.concatenate([result.prompt, result.tokens]) for result in self.results]

    @property
    def texts(self) -> Any:
        """Per row, the new text; None without a tokenizer."""
        return self._of_rows("text")

    @property
    def reasoning(self) -> list[str]:
        """Per row, the text before the answer that the model marks as reasoning."""
        return [result.reasoning for result in self.results]

    @property
    def lengths(self) -> Int[np.ndarray, "B"]:
        """The number of new tokens of each row, int32."""
        return np.array([len(result.tokens) for result in self.results], np.int32)

    @property
    def finish_reasons(self) -> list[str]:
        """Per row, why it ended: "eos", "length", "stop", or "cancelled" by `send(True)`."""
        return [result.finish_reason for result in self.results]

    @property
    def logprobs(self) -> Any:
        """Per row, of its new tokens, None where not requested; None if no row requested them."""
        return self._of_rows("logprobs")

    @property
    def prompt_logprobs(self) -> Any:
        """The same of each prompt's tokens, except for the first one."""
        return self._of_rows("prompt_logprobs")

    def _of_rows(self, name: str) -> list | None:
        values = [getattr(result, name) for result in self.results]
        return None if all(value is None for value in values) else values


def texts_of(request: Request) -> list[Text]:
    """Returns the empty texts of the rows."""
    target, limits = request.target, global_arrays.fetch(request.rows.limits).tolist()
    texts = []
    for prompt, params, limit in zip(request.prompts, request.params, limits, strict=True):
        matcher = matcher_of(target, prompt, params, request.eos)
        texts.append(Text(target.tokenizer, prompt, params, limit, request.eos, matcher))
    return texts


def output_of(
    decoder: Decoder,
    state: DecodeState,
    texts: Sequence[Text],
    compiled: tuple[int, float],
    calls: Sequence[Call] = (),
    choice: Any = None,
    search_s: float = 0.0,
) -> Output:
    """Returns the output of texts that have ended; others are cancelled.

    Args:
      decoder: has run the request.
      state: the final one.
      texts: one per row.
      compiled: `program_cache.totals` before the request.
      calls: depth and histogram of each call of the loop; (): all ran the decoder's tree.
      choice: of drafter and tree; None if there was none.
      search_s: seconds of the choice.
    """
    request, clock = decoder.request, decoder.clock
    for text in texts:
        if not text.ended:
            text.finish("cancelled")
    wants_logprobs = any(params.prompt_logprobs is not None for params in request.params)
    prompt_logprobs = decoder.prompt_logprobs() if wants_logprobs else [None] * len(texts)
    counters = state.emitted, state.histogram, state.ranks, state.nodes
    emitted, histogram, ranks, nodes = global_arrays.fetch(counters)
    calls = calls or [(decoder.loop_settings.shape.depth, histogram)]
    speculative = [params.speculative for params in request.params]
    by_request = by_row(emitted, histogram, ranks, nodes, calls, speculative)
    ended = zip(texts, prompt_logprobs, by_request, strict=True)
    results = [text.result(logprobs, counts) for text, logprobs, counts in ended]
    target_bytes, draft_bytes = request.kv_bytes
    compilations, compile_s = program_cache.totals()
    shape = len(results), request.settings.max_tokens
    tokens = np.full(shape, request.pad_token_id, np.int32)
    for row, result in zip(tokens, results, strict=True):
        row[: len(result.tokens)] = result.tokens
    stats = Stats(
        **summed(by_request),
        rounds=max(row.target_passes for row in by_request),
        prefill_s=clock.prefill_s,
        decode_s=clock.decode_s,
        compilations=compilations - compiled[0],
        compile_s=compile_s - compiled[1],
        kv_bytes_target=target_bytes,
        kv_bytes_draft=draft_bytes,
        attention_backend=str(request.settings.backend),
        plan_s=search_s,
        depths=() if choice is None else tuple(depth for depth, _ in calls),
    )
    return Output(results, tokens, stats, choice)


def log_request(request: Request) -> None:
    """Logs the size of the caches and the attention backend."""
    target_bytes, draft_bytes = request.kv_bytes
    logger.info("KV cache: target %.1f MB, draft %.1f MB", target_bytes / 1e6, draft_bytes / 1e6)
    logger.info("attention: %s", request.settings.backend)
