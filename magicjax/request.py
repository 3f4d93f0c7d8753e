"""From what a user asks to what a program takes: prompts become arrays, and bad input an error.

Every check is here, or in the drafter's `check`, and runs before anything is compiled.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from magicjax.decode import Settings
from magicjax.drafters import Drafter
from magicjax.model import Model
from magicjax.tree import ROOT_ONLY, TokenTree, chain
from pallas_kernels import choose_backend

PREFILL_CHUNK = 512
CAPACITY_MULTIPLE = 64  # so that contexts of nearly the same length share a program
DEFAULT_TREE = chain(4)


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
      settings: what the programs are specialised on.
      target, drafter: as given.
      prompts: token ids of each row.
      tokens: int32 [B, T], the prompts, right-padded.
      lengths, limits: int32 [B], of the prompts and of the outputs.
      eos: int32 [E].
      pad_token_id: what fills rows that ended.
    """

    settings: Settings
    target: Model
    drafter: Drafter | None
    prompts: list[np.ndarray]
    tokens: jax.Array
    lengths: jax.Array
    limits: jax.Array
    eos: jax.Array
    pad_token_id: int

    @property
    def start_arguments(self) -> tuple:
        return self.target, self.drafter, self.tokens, self.lengths, self.limits, self.eos


def prepare(
    target: Model,
    prompts: str | Sequence[Any],
    *,
    drafter: Drafter | None,
    tree: TokenTree | None,
    max_new_tokens: int | Sequence[int],
    do_sample: bool,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int | None,
    backend: str | None,
) -> Request:
    """Returns the checked request; see `magicjax.generate` for the arguments and errors."""
    if not isinstance(target, Model):
        raise TypeError(f"target is a {type(target).__name__}: pass what magicjax.load returns")
    if do_sample:
        raise ValueError(
            "do_sample=True is not supported: only greedy decoding is, so leave it out"
        )
    tree = _tree(target, drafter, tree)
    rows = _token_ids(target, prompts)
    limits = _limits(max_new_tokens, len(rows))
    _check_context(target, drafter, tree, rows, limits)
    lengths = np.array([len(row) for row in rows], np.int32)
    chunk = min(PREFILL_CHUNK, _round_up(int(lengths.max()), 16))
    width = _round_up(int(lengths.max()), chunk)
    tokens = np.zeros((len(rows), width), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    longest = int((lengths + limits).max()) + tree.depth + 1
    settings = Settings(
        tree=tree,
        capacity=_round_up(max(longest, width), CAPACITY_MULTIPLE),
        chunk=chunk,
        max_new_tokens=int(limits.max()),
        backend=choose_backend(backend),
    )
    eos = _eos(target, eos_token_id)
    return Request(
        settings=settings,
        target=target,
        drafter=drafter,
        prompts=rows,
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray(lengths),
        limits=jnp.asarray(limits),
        eos=jnp.asarray(eos, jnp.int32),
        pad_token_id=_pad(target, pad_token_id, eos),
    )


def _tree(target: Model, drafter: Drafter | None, tree: TokenTree | None) -> TokenTree:
    """Returns the tree that every round proposes, checked to be one that can be drafted."""
    if drafter is None:
        if tree is not None:
            raise ValueError("a tree needs a drafter: pass drafter=..., or leave the tree out")
        return ROOT_ONLY
    if not hasattr(drafter, "propose"):
        raise TypeError(
            f"drafter is a {type(drafter).__name__}: pass magicjax.SelfSpeculation(...), or wrap "
            "a model, magicjax.SmallModel(model)"
        )
    if tree is None:
        return DEFAULT_TREE
    if not isinstance(tree, TokenTree):
        raise TypeError(
            f"tree is a {type(tree).__name__}: make one with magicjax.chain, magicjax.expansion "
            "or magicjax.TokenTree.from_parents"
        )
    if tree.num_nodes < 2:
        raise ValueError("the tree speculates nothing: give it a child, or leave the drafter out")
    if tree.width > target.config.vocab_size:
        raise ValueError(
            f"a node has {tree.width} children and the vocabulary {target.config.vocab_size} "
            f"tokens: give each node at most {target.config.vocab_size}"
        )
    return tree


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _token_ids(target: Model, prompts: str | Sequence[Any]) -> list[np.ndarray]:
    """Returns the rows' token ids, checked against the vocabulary."""
    if isinstance(prompts, str):
        raise TypeError("prompts is a single text: pass a list, [text], for a batch of one row")
    if len(prompts) == 0:
        raise ValueError("prompts is empty: give at least one")
    rows = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if target.tokenizer is None:
                raise ValueError(
                    f"prompt {i} is text and the target {target.name!r} has no tokenizer: "
                    "pass token ids"
                )
            prompt = target.tokenizer(prompt)["input_ids"]
        ids = np.asarray(prompt)
        if ids.size == 0:
            raise ValueError(f"prompt {i} is empty: it needs at least 1 token")
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"prompt {i} has shape {ids.shape} and dtype {ids.dtype}: "
                "it must be text or a list of token ids"
            )
        outside = ids[(ids < 0) | (ids >= target.config.vocab_size)]
        if outside.size:
            raise ValueError(
                f"prompt {i} has token {outside[0]}, outside the target's vocabulary: "
                f"ids must lie between 0 and {target.config.vocab_size - 1}"
            )
        rows.append(ids.astype(np.int32))
    return rows


def _limits(max_new_tokens: int | Sequence[int], rows: int) -> np.ndarray:
    each = np.asarray(max_new_tokens)
    if not np.issubdtype(each.dtype, np.integer):
        raise TypeError(f"max_new_tokens={max_new_tokens!r} must be an int, or one for each row")
    if each.ndim > 1 or (each.ndim == 1 and len(each) != rows):
        raise ValueError(
            f"max_new_tokens has shape {each.shape} for {rows} prompts: give one int, or one a row"
        )
    if each.min() < 1:
        raise ValueError(f"max_new_tokens={each.min()}: it must be at least 1")
    return np.broadcast_to(each, rows).astype(np.int32)


def _check_context(target, drafter, tree, rows, limits) -> None:
    # A tree may reach beyond the last position, with nodes that the row's end cuts off.
    needed = [len(row) + int(limit) for row, limit in zip(rows, limits, strict=True)]
    worst = int(np.argmax(needed))
    if needed[worst] > target.config.max_positions:
        raise ValueError(
            f"prompt {worst} has {len(rows[worst])} tokens; with {limits[worst]} new ones it needs "
            f"{needed[worst]} positions, and the target has {target.config.max_positions}: "
            "shorten the prompt or max_new_tokens"
        )
    if drafter is not None:
        drafter.check(target, tree, needed[worst])


def _eos(target: Model, eos_token_id: Any) -> tuple[int, ...]:
    if eos_token_id is None:
        return target.eos_token_ids
    given = (eos_token_id,) if np.ndim(eos_token_id) == 0 else eos_token_id
    ids = tuple(operator.index(i) for i in given)
    for i in ids:
        if not 0 <= i < target.config.vocab_size:
            raise ValueError(
                f"eos_token_id={i} lies outside the target's vocabulary: it must lie between 0 "
                f"and {target.config.vocab_size - 1}; pass [] to never stop early"
            )
    return ids


def _pad(target: Model, pad_token_id: int | None, eos: tuple[int, ...]) -> int:
    if pad_token_id is not None:
        pad_token_id = operator.index(pad_token_id)
        if not 0 <= pad_token_id < target.config.vocab_size:
            raise ValueError(
                f"pad_token_id={pad_token_id} must lie between 0 and {target.config.vocab_size - 1}"
            )
        return pad_token_id
    if target.pad_token_id is not None and 0 <= target.pad_token_id < target.config.vocab_size:
        return target.pad_token_id  # LLaMA-1's config says -1, for none
    return eos[0] if eos else 0
