"""What each row of a batch has: its prompt, its parameters, and where it ends."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import struct
from jaxtyping import Bool, Int, UInt32

from magicjax.decoding.reasoning import thinking_budget
from magicjax.decoding.validation import bad_sequences
from magicjax.model import Model
from magicjax.sampling_params import SamplingParams
from magicjax.verification import logits_processor
from magicjax.verification.logits_processor import LogitsProcessor
from magicjax.verification.sampling import Sampling, row_keys

INT32_MAX = 2**31 - 1


@struct.dataclass
class Rows:
    """The rows of a request, of a program's arguments, and of a decoding state.

    All arrays have the batch as their first axis, so rows are placed, repeated and inserted by
    `jax.tree.map`. A request that is not placed has numpy arrays, and JAX arrays of row keys.

    Attributes:
      tokens: int32 [B, T], the prompts, right-padded; None in a decoding state.
      lengths: int32 [B], of the prompts; None in a decoding state.
      allowed: uint32 [B, W], the first tokens that the rows' grammars allow
        (`magicjax.grammars.masking`); None without grammars, and in a decoding state.
      limits: int32 [B], the most new tokens of each row.
      eos: int32 [B, E], tokens that end each row; -1 is none.
      sampling: parameters and key of each row; None: all rows are greedy.
      processor: processes the rows' logits, after the newest tokens; None without.
      wants_logprobs: bool [B]; without such a row, a round computes none.
      speculative: bool [B]; other rows accept no drafted token.
    """

    tokens: Int[Any, "B T"]
    lengths: Int[Any, "B"]
    allowed: UInt32[Any, "B W"] | None
    limits: Int[Any, "B"]
    eos: Int[Any, "B E"]
    sampling: Sampling | None
    processor: LogitsProcessor | None
    wants_logprobs: Bool[Any, "B"]
    speculative: Bool[Any, "B"]

    def without_prompts(self) -> "Rows":
        """Returns what rounds read."""
        return dataclasses.replace(self, tokens=None, lengths=None, allowed=None)


class Features(NamedTuple):
    """What the arrays of rows are for, whether or not a row uses it.

    Attributes:
      sampling: sampling parameters.
      warping: top_k and top_p.
      sequences: (W, L), the most excluded sequences of a row and their most tokens, with all that
        changes logits; None: without.
      ends: the least number of tokens that can end a row.
    """

    sampling: bool
    warping: bool
    sequences: tuple[int, int] | None
    ends: int = 1


def rows_of(
    target: Model,
    prompts: Sequence[Int[np.ndarray, "T"]],
    params: Sequence[SamplingParams],
    limits: Sequence[int] | Int[np.ndarray, "B"],
    eos: Sequence[int],
    width: int,
    allowed: UInt32[np.ndarray, "B W"] | None = None,
    features: Features | None = None,
) -> Rows:
    """Returns the rows of prompts as numpy arrays.

    Args:
      target: the model.
      prompts, params: one per row.
      limits: the most new tokens of each row.
      eos: the target's end tokens.
      width: T, to which prompts are padded.
      allowed: the first tokens that the rows' grammars allow; None without grammars.
      features: None: those that the rows use.
    """
    sequences = [bad_sequences(target, row) for row in params]
    if features is None:
        most = max(map(len, sequences), default=0)
        longest = max((len(tokens) for row in sequences for tokens in row), default=0)
        shape = (max(1, most), max(2, longest))
        features = Features(
            sampling=not all(row.greedy for row in params),
            warping=False,
            sequences=shape if any(row.changes_logits for row in params) else None,
        )
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids
    processor = None
    if features.sequences is not None:
        pairs = zip(prompts, params, strict=True)
        budgets = [thinking_budget(target, prompt.tolist(), row) for prompt, row in pairs]
        processor = logits_processor.rows_of(
            params, prompts, sequences, budgets, target.config.vocab_size, features.sequences
        )
    return Rows(
        tokens=tokens,
        lengths=np.array([len(ids) for ids in prompts], np.int32),
        allowed=allowed,
        limits=np.array(limits, np.int32),
        eos=_end_tokens(params, eos, features.ends),
        sampling=sampling_of(params, features.warping) if features.sampling else None,
        processor=processor,
        wants_logprobs=np.array([row.logprobs is not None for row in params]),
        speculative=np.array([row.speculative for row in params]),
    )


def sampling_of(params: Sequence[SamplingParams], warping: bool = False) -> Sampling:
    """Returns the parameters and the key of each row. A greedy row keeps the most likely token.

    With `warping`, the arrays are for rows that may use top_k and top_p, whether or not they do.
    """
    temperature: Any = np.array([row.temperature or 1.0 for row in params], np.float32)
    top_k: Any = np.array([1 if row.greedy else min(row.top_k, INT32_MAX) for row in params])
    top_p: Any = np.array([row.top_p for row in params], np.float32)
    min_p: Any = np.array([row.min_p for row in params], np.float32)
    top_n_sigma: Any = np.array([row.top_n_sigma for row in params], np.float32)
    seeds = np.array([row.seed for row in params], np.uint32)
    return Sampling(
        temperature=temperature,
        top_k=top_k.astype(np.int32),
        top_p=top_p,
        min_p=min_p,
        top_n_sigma=top_n_sigma,
        keys=row_keys(seeds, np.arange(len(params), dtype=np.int32)),
        top_k_used=warping or bool((top_k > 0).any()),
        top_p_used=warping or any(row.top_p < 1 for row in params),
    )


def _end_tokens(
    params: Sequence[SamplingParams], eos: Sequence[int], width: int
) -> Int[np.ndarray, "B E"]:
    """Returns the tokens that end each row, padded with -1 to at least `width`."""
    rows = [row.end_tokens(eos) for row in params]
    width = max(width, *map(len, rows))
    return np.array([(*row, *[-1] * (width - len(row))) for row in rows], np.int32)
