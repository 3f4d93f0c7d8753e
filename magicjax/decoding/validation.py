"""Checks of the arguments of `magicjax.generate`: an error names the value, the limit, the remedy.

All checks run on the host, before anything is compiled; a drafter adds its own (`Drafter.check`).
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

import models
from magicjax import placement
from magicjax.checks import OptionError
from magicjax.drafters import DRAW_METHODS, Drafter, Ensemble
from magicjax.model import Model
from magicjax.sampling_params import SamplingParams
from magicjax.trees.token_tree import (
    MAX_NODES,
    ROOT_ONLY,
    DynamicTree,
    TokenTree,
    Tree,
    TreeShape,
    chain,
)
from magicjax.verification.verify import VERIFIERS
from pallas_kernels import choose_backend
from pallas_kernels.device_check import default_device

DEFAULT_TREE = chain(4)


def params_of_rows(
    params: SamplingParams | Sequence[SamplingParams], rows: int
) -> tuple[SamplingParams, ...]:
    """Returns the parameters of each row."""
    if isinstance(params, SamplingParams):
        return (params,) * rows
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise TypeError(
            f"params has type {type(params).__name__}: pass magicjax.SamplingParams(...), or a "
            "list of one per prompt"
        )
    for row in params:
        check_params(row)
    if len(params) != rows:
        raise ValueError(
            f"{len(params)} SamplingParams for {rows} prompts: pass one, or one per prompt"
        )
    return tuple(params)


def check_params(params: Any) -> None:
    """Raises TypeError unless these are the parameters of a text."""
    if not isinstance(params, SamplingParams):
        raise TypeError(
            f"params has type {type(params).__name__}: pass magicjax.SamplingParams(...)"
        )


def validated_tree(drafter: Drafter | None, tree: Tree | None) -> Tree:
    """Returns the tree to draft in every round; only a root without a drafter."""
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


def validated_shape(drafter: Drafter | None, tree: Tree) -> TreeShape:
    """Returns the bounds of what the drafter proposes for a tree."""
    shape = tree.shape if drafter is None else drafter.shape(tree)
    if shape.num_nodes > MAX_NODES:
        raise ValueError(
            f"the drafters propose {shape.num_nodes} nodes in total, and at most {MAX_NODES} are "
            "supported: use smaller trees or fewer drafters"
        )
    return shape


def validated_verifier(
    verifier: str | None, drafter: Drafter | None, tree: Tree, params: Sequence[SamplingParams]
) -> str:
    """Returns the verifier; it is exact for the way the drafter draws children."""
    if verifier is not None and verifier not in VERIFIERS:
        raise ValueError(f"verifier={verifier!r} is unknown: use one of {', '.join(VERIFIERS)}")
    if all(row.greedy for row in params):
        if verifier not in (None, "greedy"):
            raise ValueError(
                f"verifier={verifier!r} requires sampling: pass a temperature above 0 or omit "
                "verifier"
            )
        return "greedy"
    if verifier == "greedy":
        raise ValueError(
            "verifier='greedy' with a temperature above 0 accepts only the most likely token, "
            "which does not follow the target's distribution: omit verifier, or use mss or naive"
        )
    if drafter is None:
        if verifier not in (None, "naive"):
            raise ValueError(
                f"verifier={verifier!r} has no effect without a drafter: pass one or omit verifier"
            )
        return "naive"
    drawn = drafter.draw_methods(tree)
    if not isinstance(drawn, set | frozenset) or not drawn <= {*DRAW_METHODS}:
        raise ValueError(
            f"{type(drafter).__name__}.draw_methods returned {drawn!r}: return a set of "
            f"{', '.join(DRAW_METHODS)}"
        )
    if verifier != "naive" and {"with_replacement", "without_replacement"} <= drawn:
        raise ValueError(
            "the ensemble mixes draws with and without replacement, and no verification rule is "
            "exact for both: use the same draw for all drafters, or verifier='naive'"
        )
    return verifier or "mss"


def check_target(target: Any) -> None:
    """Raises TypeError unless the target is a model, ValueError if it is a drafter's head."""
    if not isinstance(target, Model):
        raise TypeError(
            f"target has type {type(target).__name__}: pass the model that magicjax.load returns"
        )
    if isinstance(target.config, models.EagleConfig):
        raise ValueError(
            f"the target {target.name!r} is a learned head, which drafts for another model: pass "
            "it as drafter=magicjax.Eagle(head) or magicjax.MTP(head), in a command eagle:PATH or "
            "mtp:PATH"
        )


def validated_limits(
    target: Model, rows: Sequence[np.ndarray], params: Sequence[SamplingParams]
) -> np.ndarray:
    """Returns the limit of each row's new tokens; int64, because it may exceed the context."""
    positions = target.config.max_positions
    limits = np.zeros(len(rows), np.int64)
    for i, (row, sampling_params) in enumerate(zip(rows, params, strict=True)):
        max_tokens = sampling_params.max_tokens
        if max_tokens == 0:
            hint = "only a request of magicjax.Engine can have 0"
            raise OptionError(f"{{}}: it must be at least 1; {hint}", "max_tokens", 0)
        limits[i] = positions - len(row) if max_tokens is None else max_tokens
        if limits[i] < 1:
            raise ValueError(
                f"prompt {i} has {len(row)} tokens, and the {positions} positions of the target "
                f"leave no room for new ones: shorten the prompt to at most {positions - 1} tokens"
            )
    return limits


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
            f"prompt {longest} has {len(rows[longest])} tokens; with max_tokens="
            f"{limits[longest]} it needs {needed[longest]} positions, and the target has "
            f"{target.config.max_positions}: shorten the prompt{fits} or reduce max_tokens"
        )
    if drafter is not None:
        drafter.check(target, tree, depth, needed[longest])


def validated_eos(target: Model, eos_token_id: Any) -> tuple[int, ...]:
    """Returns the ids that end a row."""
    if eos_token_id is None:
        return target.eos_token_ids
    given = (eos_token_id,) if np.ndim(eos_token_id) == 0 else eos_token_id
    ids = tuple(_token_id("eos_token_id", i) for i in given)
    for i in ids:
        if not 0 <= i < target.config.vocab_size:
            raise ValueError(
                f"eos_token_id={i} must lie between 0 and {target.config.vocab_size - 1}; to "
                "disable early stopping, pass []"
            )
    return ids


def validated_pad(target: Model, pad_token_id: Any, eos: tuple[int, ...]) -> int:
    """Returns the id that pads rows that ended."""
    if pad_token_id is not None:
        pad_token_id = _token_id("pad_token_id", pad_token_id)
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
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        text = isinstance(value, str)
        remedy = f"target.tokenizer.convert_tokens_to_ids({value!r})" if text else "an integer"
        raise TypeError(f"{name}={value!r} is not a token id: pass {remedy}") from None


def check_for_target(target: Model, params: SamplingParams) -> None:
    """Raises ValueError if a text of the target cannot have these parameters.

    Its tokens may be outside of the vocabulary, and its stop strings not be found.
    """
    vocab = target.config.vocab_size
    for name, tokens in (
        ("logit_bias", dict(params.logit_bias)),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("stop_token_ids", params.stop_token_ids),
    ):
        if (ids := [*tokens]) and max(ids) >= vocab:
            raise OptionError(
                f"{{}} has the token {max(ids)}, and the vocabulary has {vocab}: use tokens from 0 "
                f"to {vocab - 1}",
                name,
            )
    if params.stop and target.tokenizer is None:
        raise OptionError(
            f"{{}}: the target {target.name!r} has no tokenizer, and stop strings are searched for "
            "in the text; use stop_token_ids",
            "stop",
            params.stop[0],
        )
    if params.stop:
        check_detokenization(target)


def bad_sequences(target: Model, params: SamplingParams) -> list[list[int]]:
    """Returns the tokenizations of `bad_words`: at the beginning of a text and after a space.

    Raises:
      ValueError: the target has no tokenizer.
    """
    if params.bad_words and target.tokenizer is None:
        raise OptionError(
            f"{{}}: the target {target.name!r} has no tokenizer, which bad words need: load one "
            "with a tokenizer",
            "bad_words",
            params.bad_words,
        )
    sequences: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        for text in (word, f" {word.lstrip()}"):
            ids = tuple(target.tokenizer.encode(text, add_special_tokens=False))
            sequences |= {ids: None} if ids else {}
    return [list(ids) for ids in sequences]


def check_detokenization(target: Model) -> None:
    """Raises ValueError if the target's tokenizer cannot decode token by token."""
    tokenizer = target.tokenizer
    if tokenizer is not None and getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(
            f"the tokenizer of {target.name!r} has no tokenizer.json, which incremental "
            "detokenization reads: save it with transformers' save_pretrained as a fast tokenizer"
        )


def validated_logprobs(target: Model, params: Sequence[SamplingParams]) -> int | None:
    """Returns the most alternatives that a row asks for; None if no row has log-probabilities."""

    def largest(name: str) -> int | None:
        counts = (getattr(row, name) for row in params)
        count = max((x for x in counts if x is not None), default=None)
        if count is not None and count > target.config.vocab_size:
            vocab = target.config.vocab_size
            raise OptionError(
                f"{{}}: it must be at most {vocab}, the vocabulary's size", name, count
            )
        return count

    largest("prompt_logprobs")
    return largest("logprobs")


def validated_backend(
    target: Model, drafter: Drafter | None, backend: str | None, mesh: Mesh | AbstractMesh | None
) -> str:
    """Returns the backend of all models of a request; one that all of them support."""
    device = _device(target, mesh)
    chosen = {
        choose_backend(backend, model.dtype, size, device)
        for model in (target, *placement.models_of(drafter))
        for size in model.kv_head_dims
    }
    return chosen.pop() if len(chosen) == 1 else "xla"


def _device(target: Model, mesh: Mesh | AbstractMesh | None) -> jax.Device:
    """Returns a device that runs the programs of a request."""
    if mesh is not None and not isinstance(mesh, AbstractMesh):
        return mesh.devices.flat[0]
    for x in jax.tree.leaves(target.params):
        if isinstance(x, jax.Array) and x.committed:
            return min(x.devices(), key=lambda device: device.id)
    return default_device()
