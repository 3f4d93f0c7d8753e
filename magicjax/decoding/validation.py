"""Checks of the arguments of `magicjax.generate`: an error names the value, the limit, the remedy.

All checks run on the host, before anything is compiled; a drafter adds its own (`Drafter.check`).
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from magicjax import placement
from magicjax.drafters import DRAW_METHODS, Drafter, Ensemble
from magicjax.grammars.grammar import Grammar
from magicjax.model import Model
from magicjax.trees.token_tree import (
    MAX_NODES,
    ROOT_ONLY,
    DynamicTree,
    Shape,
    TokenTree,
    Tree,
    chain,
)
from magicjax.verification.logprobs import MAX_ALTERNATIVES
from magicjax.verification.sampling import Sampling, row_keys
from magicjax.verification.verify import VERIFIERS
from pallas_kernels import choose_backend
from sharding import AnyMesh

DEFAULT_TREE = chain(4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The keyword arguments of `magicjax.generate`, which documents them; no texts."""

    drafter: Drafter | None = None
    tree: Tree | None = None
    max_new_tokens: int | Sequence[int] = 128
    do_sample: bool = False
    temperature: float | Sequence[float] | None = None
    top_k: int | Sequence[int] | None = None
    top_p: float | Sequence[float] | None = None
    seed: int | None = None
    verifier: str | None = None
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    stop: str | Sequence[str] = ()
    grammar: Grammar | Sequence[Grammar | None] | None = None
    logprobs: int | None = None
    backend: str | None = None
    mesh: AnyMesh | None = None
    micro_batches: int | None = None


def checked_tree(options: RequestOptions) -> Tree:
    """Returns the tree to draft in every round; only a root without a drafter."""
    drafter, tree = options.drafter, options.tree
    if drafter is None:
        if tree is not None:
            raise ValueError("tree has no effect without a drafter: pass drafter=... or omit tree")
        return ROOT_ONLY
    for member in drafter.drafters if isinstance(drafter, Ensemble) else (drafter,):
        _check_is_drafter(member)
    if isinstance(drafter, Ensemble) and drafter.trees is not None:
        if tree is not None:
            raise ValueError("the ensemble already has a tree for each drafter: omit tree")
        return ROOT_ONLY  # not used: each member drafts its own tree
    if tree is None:
        return DEFAULT_TREE
    if not isinstance(tree, TokenTree | DynamicTree):
        raise TypeError(
            f"tree={tree!r} is not a tree: pass a text such as 'chain:4' or 'expansion:2,2,1', or "
            "build one with magicjax.chain, magicjax.expansion, magicjax.TokenTree.from_parents, "
            "magicjax.optimal or magicjax.DynamicTree"
        )
    if tree.num_nodes < 2:
        raise ValueError("tree has only a root: add a child, or omit drafter and tree")
    return tree


def _check_is_drafter(drafter: Any) -> None:
    if isinstance(drafter, type):
        raise TypeError(
            f"drafter is the class {drafter.__name__}: pass an instance, {drafter.__name__}()"
        )
    name = type(drafter).__name__
    if not isinstance(drafter, Drafter):
        raise TypeError(
            f"drafter has type {name}: pass a text such as 'self:streaming:256', an object such as "
            "magicjax.SmallModel(model), or one of your own class derived from magicjax.Drafter; "
            "several as magicjax.Ensemble"
        )
    if jax.tree_util.all_leaves([drafter]):
        raise TypeError(f"drafter {name} is not a pytree: decorate it with @flax.struct.dataclass")


def checked_shape(drafter: Drafter | None, tree: Tree) -> Shape:
    """Returns the bounds of what the drafter proposes for a tree."""
    shape = tree.shape if drafter is None else drafter.shape(tree)
    if shape.num_nodes > MAX_NODES:
        raise ValueError(
            f"the drafters propose {shape.num_nodes} nodes in total, and at most {MAX_NODES} are "
            "supported: use smaller trees or fewer drafters"
        )
    return shape


def checked_verifier(options: RequestOptions, tree: Tree) -> str:
    """Returns the verifier; it is exact for the way the drafter draws children."""
    verifier = options.verifier
    if verifier is not None and verifier not in VERIFIERS:
        raise ValueError(f"verifier={verifier!r} is unknown: use one of {', '.join(VERIFIERS)}")
    if not options.do_sample:
        if verifier not in (None, "greedy"):
            raise ValueError(
                f"verifier={verifier!r} requires sampling: pass do_sample=True or omit verifier"
            )
        return "greedy"
    if verifier == "greedy":
        raise ValueError(
            "verifier='greedy' with do_sample=True accepts only the most likely token, which does "
            "not follow the target's distribution: omit verifier, or use mss or naive"
        )
    if options.drafter is None:
        if verifier not in (None, "naive"):
            raise ValueError(
                f"verifier={verifier!r} has no effect without a drafter: pass one or omit verifier"
            )
        return "naive"
    drawn = options.drafter.draw_methods(tree)
    if not isinstance(drawn, set | frozenset) or not drawn <= {*DRAW_METHODS}:
        raise ValueError(
            f"{type(options.drafter).__name__}.draw_methods returned {drawn!r}: return a set of "
            f"{', '.join(DRAW_METHODS)}"
        )
    if verifier != "naive" and {"with_replacement", "without_replacement"} <= drawn:
        raise ValueError(
            "the ensemble mixes draws with and without replacement, and no verification rule is "
            "exact for both: use the same draw for all drafters, or verifier='naive'"
        )
    return verifier or "mss"


def checked_sampling(options: RequestOptions, rows: int) -> Sampling | None:
    """Returns the parameters and the key of each row; None for greedy decoding."""
    if not options.do_sample:
        for name in ("temperature", "top_k", "top_p", "seed"):
            if (value := getattr(options, name)) is not None:
                raise ValueError(
                    f"{name}={value!r} has no effect in greedy decoding: pass do_sample=True or "
                    f"omit {name}"
                )
        return None
    temperature, top_k, top_p = (
        _per_row(name, getattr(options, name), default, rows)
        for name, default in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0))
    )
    tiny = float(np.finfo(np.float32).tiny)
    _check_rows(
        "temperature",
        temperature,
        (np.float32(temperature) >= tiny) & np.isfinite(np.float32(temperature)),
        "must be above 0 and finite in float32; for greedy decoding, omit do_sample",
    )
    whole = (top_k >= 0) & (top_k == np.round(top_k))
    _check_rows("top_k", top_k, whole, "must be a whole number, 0 (all tokens) or more")
    positive = (np.float32(top_p) >= tiny) & (top_p <= 1)
    _check_rows("top_p", top_p, positive, "must be above 0 and at most 1")
    arrays: dict[str, Any] = {
        "temperature": temperature.astype(np.float32),
        "top_k": np.minimum(top_k, 2**31 - 1).astype(np.int32),
        "top_p": top_p.astype(np.float32),
    }
    return Sampling(
        **arrays,
        keys=row_keys(np.uint32(_checked_seed(options.seed)), np.arange(rows, dtype=np.int32)),
        top_k_used=bool((top_k > 0).any()),
        top_p_used=bool((top_p < 1).any()),
    )


def _checked_seed(seed: Any) -> int:
    if seed is None:
        return 0
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r} must be a whole number between 0 and {2**32 - 1}")
    return int(seed)


def _per_row(name: str, value: Any, default: float, rows: int) -> np.ndarray:
    values = np.asarray(default if value is None else value, np.float64)
    if values.ndim > 1 or (values.ndim == 1 and len(values) != rows):
        raise ValueError(
            f"{name} has shape {values.shape} for {rows} prompts: pass one number, or one per row"
        )
    return np.broadcast_to(values, rows)


def _check_rows(name: str, values: np.ndarray, valid: np.ndarray, requirement: str) -> None:
    if not valid.all():
        raise ValueError(f"{name}={values[~valid][0]:g} {requirement}")


def token_ids(target: Model, prompts: str | Sequence[Any]) -> list[np.ndarray]:
    """Returns the token ids of each prompt; all lie in the target's vocabulary."""
    if isinstance(prompts, str):
        raise TypeError("prompts is a single text: pass a list, [text], for a batch of one row")
    if len(prompts) == 0:
        raise ValueError("prompts is empty: pass at least one prompt")
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
            many = ids.ndim == 0 and len(prompts) > 1
            wrap = "; for a batch of one row, wrap it: [[5, 6, 7]]" if many else ""
            raise ValueError(
                f"prompt {i} has shape {ids.shape} and dtype {ids.dtype}: "
                f"it must be text or a list of token ids{wrap}"
            )
        outside = ids[(ids < 0) | (ids >= target.config.vocab_size)]
        if outside.size:
            raise ValueError(
                f"prompt {i} has token {outside[0]}, outside the target's vocabulary: "
                f"ids must lie between 0 and {target.config.vocab_size - 1}"
            )
        rows.append(ids.astype(np.int32))
    return rows


def check_target(target: Any) -> None:
    """Raises TypeError unless the target is a model."""
    if not isinstance(target, Model):
        raise TypeError(
            f"target has type {type(target).__name__}: pass the model that magicjax.load returns"
        )


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raises TypeError unless the value is a whole number, ValueError if it is below `least`."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: it must be a whole number")
    if value < least:
        raise ValueError(f"{name}={value}: it must be at least {least}")


def checked_limits(options: RequestOptions, rows: int) -> np.ndarray:
    """Returns the limit of each row's new tokens; int64, because it may exceed the context."""
    limits = np.asarray(options.max_new_tokens)
    if not np.issubdtype(limits.dtype, np.integer):
        raise TypeError(f"max_new_tokens={options.max_new_tokens!r} must be an int, or one per row")
    if limits.ndim > 1 or (limits.ndim == 1 and len(limits) != rows):
        raise ValueError(
            f"max_new_tokens has shape {limits.shape} for {rows} prompts: pass one int, or one per "
            "row"
        )
    if limits.min() < 1:
        raise ValueError(f"max_new_tokens={limits.min()} must be at least 1")
    return np.broadcast_to(limits, rows).astype(np.int64)


def check_context(
    target: Model,
    drafter: Drafter | None,
    tree: Tree,
    depth: int,
    rows: Sequence[np.ndarray],
    limits: np.ndarray,
) -> None:
    """Raises ValueError if prompts and outputs exceed the positions of the target or drafter.

    A tree may extend beyond the last position: the row ends before those nodes.
    """
    needed = [len(row) + int(limit) for row, limit in zip(rows, limits, strict=True)]
    longest = int(np.argmax(needed))
    if needed[longest] > target.config.max_positions:
        room = target.config.max_positions - int(limits[longest])
        fits = f" (to at most {room} tokens)" if room > 0 else ""
        raise ValueError(
            f"prompt {longest} has {len(rows[longest])} tokens; with max_new_tokens="
            f"{limits[longest]} it needs {needed[longest]} positions, and the target has "
            f"{target.config.max_positions}: shorten the prompt{fits} or reduce max_new_tokens"
        )
    if drafter is not None:
        drafter.check(target, tree, depth, needed[longest])


def checked_eos(target: Model, options: RequestOptions) -> tuple[int, ...]:
    """Returns the ids that end a row."""
    eos: Any = options.eos_token_id
    if eos is None:
        return target.eos_token_ids
    ids = tuple(_token_id("eos_token_id", i) for i in ((eos,) if np.ndim(eos) == 0 else eos))
    for i in ids:
        if not 0 <= i < target.config.vocab_size:
            raise ValueError(
                f"eos_token_id={i} must lie between 0 and {target.config.vocab_size - 1}; to "
                "disable early stopping, pass []"
            )
    return ids


def checked_pad(target: Model, options: RequestOptions, eos: tuple[int, ...]) -> int:
    """Returns the id that pads rows that ended."""
    if options.pad_token_id is not None:
        pad_token_id = _token_id("pad_token_id", options.pad_token_id)
        if not 0 <= pad_token_id < target.config.vocab_size:
            raise ValueError(
                f"pad_token_id={pad_token_id} must lie between 0 and {target.config.vocab_size - 1}"
            )
        return pad_token_id
    if target.pad_token_id is not None and 0 <= target.pad_token_id < target.config.vocab_size:
        return target.pad_token_id  # LLaMA-1's config has -1, which means none
    return eos[0] if eos else 0


def _token_id(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        text = isinstance(value, str)
        remedy = f"target.tokenizer.convert_tokens_to_ids({value!r})" if text else "an integer"
        raise TypeError(f"{name}={value!r} is not a token id: pass {remedy}") from None


def checked_stop(target: Model, stop: Any) -> tuple[str, ...]:
    """Returns the strings that end a text."""
    if not isinstance(stop, str | Sequence):
        raise TypeError(f"stop={stop!r}: it must be a string, or a list of strings")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(f"stop={stop!r}: {string!r} is not a string")
        if not string:
            raise ValueError(f"stop={string!r}: a stop string must have at least 1 character")
    if strings and target.tokenizer is None:
        raise ValueError(
            f"stop={strings[0]!r}: the target {target.name!r} has no tokenizer, and stop strings "
            "are searched for in the text; use eos_token_id"
        )
    if strings:
        check_detokenization(target)
    return strings


def check_detokenization(target: Model) -> None:
    """Raises ValueError if the target's tokenizer cannot decode token by token."""
    tokenizer = target.tokenizer
    if tokenizer is not None and getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(
            f"the tokenizer of {target.name!r} has no tokenizer.json, which incremental "
            "detokenization reads: save it with transformers' save_pretrained as a fast tokenizer"
        )


def checked_logprobs(target: Model, logprobs: Any) -> int | None:
    """Returns for how many of the most likely tokens log-probabilities are returned; None: off."""
    if logprobs is None:
        return None
    limit = min(MAX_ALTERNATIVES, target.config.vocab_size)
    is_int = isinstance(logprobs, int | np.integer) and not isinstance(logprobs, bool)
    if not is_int or not 0 <= logprobs <= limit:
        raise ValueError(
            f"logprobs={logprobs!r} must be a whole number of alternatives between 0 (the chosen "
            f"token only) and {limit}; for no log-probabilities, omit it"
        )
    return int(logprobs)


def checked_backend(target: Model, options: RequestOptions) -> str:
    """Returns the backend; it supports all models of the request."""
    for model in (target, *placement.models_of(options.drafter)):
        dtype = None if model.params is None else model.dtype  # a skeleton has no dtype
        choose_backend(options.backend, dtype, model.config.kv_head_dim, jax.devices()[0])
    return choose_backend(options.backend)
