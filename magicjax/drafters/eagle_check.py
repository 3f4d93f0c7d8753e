"""Finds heads that are wired wrongly to their target: they draft, but almost nothing is accepted.

On a short text, the tokens that the head and the target choose after every position are compared. A
head that agrees far less than it did in training, or at chance, is an error. So is one that agrees
little, and would agree far more after a change of the wiring, which the error names.
"""

import dataclasses
import types
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import models
from magicjax.drafters.draft_pass import embed_for
from magicjax.kv_cache import full_cache
from magicjax.kv_cache.attend import AttendTo
from magicjax.kv_cache.prefill import prefill_cache
from magicjax.model import Model, tokens_of_rows
from magicjax.parallel.layouts import Resident
from magicjax.settings import StatsSpec

TEXT = """\
The house stood at the end of a narrow street. In the morning, the old man opened the window and \
looked at the river, which was still covered with fog. "It will be a good day," he said to his wife.

def mean(values):
    \"\"\"Returns the mean of a list of numbers.\"\"\"
    total = 0
    for value in values:
        total += value
    return total / len(values)

Question: What is the capital of France?
Answer: The capital of France is Paris. It is one of the largest cities in Europe.
"""
TOKENS = 128
CHANCE = 0.05  # below, a head is taken for one that is wired wrongly
MIN_SHARE = 0.5  # of the stored acceptance
LOW_AGREEMENT = 0.3  # below, a head is compared with other wirings if no acceptance is stored

_checked = weakref.WeakKeyDictionary[Model, list[weakref.ref]]()  # targets, with heads' weights


def check_once(head: Model, target: Model) -> None:
    """Raises ValueError if a head agrees with its target far less than it should.

    Models without parameters, without a tokenizer, on a mesh or in host memory are not checked, and
    each pair of a head and a target only once.

    Args:
      head: as `Eagle.for_target` returns it.
      target: the target for which the head was trained.
    """
    if head.params is None or target.params is None or target.tokenizer is None:
        return
    leaves = jax.tree.leaves((head.params, target.params))
    on_one_device = all(
        isinstance(x, jax.Array) and len(x.sharding.device_set) == 1 for x in leaves
    )
    if not isinstance(target.layout, Resident) or not on_one_device:
        return
    weight = head.params["params"]["fc"]["weight"]  # the model is another object in every request
    checked = _checked.setdefault(target, [])
    if all(other() is not weight for other in checked):
        check(head, target)
        checked.append(weakref.ref(weight))


def check(head: Model, target: Model) -> None:
    """Raises ValueError if a head agrees with its target far less than it should."""
    tokens = jnp.asarray(target.tokenizer(TEXT)["input_ids"][:TOKENS], jnp.int32)[None]
    config: Any = head.config
    rate, stored = float(agreement(head, target, tokens)), config.acceptance
    if rate >= (LOW_AGREEMENT if stored is None else max(CHANCE, MIN_SHARE * stored)):
        return
    expected = "" if stored is None else f", and {stored:.0%} in training"
    best, change = max(
        (float(agreement(changed, target, tokens)), description)
        for description, changed in _changed(head, target)
    )
    if best >= max(2 * rate, CHANCE):
        cause = f"with {change} they would at {best:.0%}: correct the head's files"
    elif stored is None and rate >= CHANCE:
        return
    else:
        cause = "it was trained for another target, or its weights are damaged"
    name = head.name or target.name  # of the target's own
    raise ValueError(
        f"the head {name!r} and the target choose the same token at {rate:.1%} of a text's "
        f"positions{expected}: {cause}; check_agreement=False uses it as it is"
    )


@jax.jit
def agreement(head: Model, target: Model, tokens: jax.Array) -> jax.Array:
    """Returns the share of positions at which a head and its target choose the same token.

    Args:
      head: with all its layers and parameters.
      target: the target for which the head was trained.
      tokens: int32 [1, T], a text.
    """
    config: Any = head.config
    length, layers, last = tokens.shape[1], config.layer_inputs, target.config.num_layers
    settings: Any = types.SimpleNamespace(chunk=length, capacity=length, backend=None)
    spec = StatsSpec(layer_inputs=tuple(sorted({*layers, last})))
    _, _, stats = prefill_cache(target, tokens, jnp.array([length]), settings, spec)
    chosen = target.unembed(stats.layer_inputs[last]).argmax(-1)
    inputs = [stats.layer_inputs[layer][:, :-1] for layer in layers]
    feature = head.module.apply(head.params, inputs, method="fuse")
    positions = jnp.arange(1, length)[None]
    x = embed_for(head, target, tokens[:, 1:], positions)
    mask = jnp.tril(jnp.ones((length - 1, length - 1), bool))

    attend = AttendTo(full_cache.empty(head, 1, 64), mask, None, positions=positions)
    hidden, _ = head.module.apply(head.params, x, feature, positions, attend, method="decode")
    return (head.unembed(hidden).argmax(-1) == chosen[:, 1:]).mean()


def _changed(head: Model, target: Model) -> Iterator[tuple[str, Model]]:
    """Yields descriptions of other wirings, and the head with each of them."""
    config: Any = head.config

    def changed(**fields: Any) -> Model:
        module = head.module.clone(config=dataclasses.replace(config, **fields))
        return dataclasses.replace(head, module=module)

    if isinstance(config, models.MtpConfig):
        other = {"rms": "rms_plus_one", "rms_plus_one": "rms"}[config.norm]
        meaning = "the weight" if other == "rms" else "1 + the weight"
        yield f"norms that are scaled by {meaning}", changed(norm=other)
        yield from _with_other_inputs(head)
        return
    for shift in (-1, 1):
        layers = tuple(layer + shift for layer in config.layer_inputs)
        if min(layers) >= 0 and max(layers) <= target.config.num_layers:
            yield f"inputs of the layers {layers}", changed(layer_inputs=layers)
    value = not config.norm_before_residual
    yield f"norm_before_residual={value}", changed(norm_before_residual=value)
    if config.draft_vocab_size is not None:
        yield "d2t as the target's tokens", _with_absolute_tokens(head)


def _with_other_inputs(head: Model) -> Iterator[tuple[str, Model]]:
    """Yields a head for multi-token prediction whose two inputs change places."""
    inner = head.params["params"]

    def changed(**params: Any) -> Model:
        return dataclasses.replace(head, params={"params": inner | params})

    embedding, hidden = jnp.split(inner["fc"]["weight"], 2, 1)
    joined = {"weight": jnp.concatenate([hidden, embedding], 1)}
    yield "the columns of fc for the hidden state first", changed(fc=joined)
    norms = dict(embedding_norm=inner["feature_norm"], feature_norm=inner["embedding_norm"])
    yield "pre_fc_norm_embedding and pre_fc_norm_hidden exchanged", changed(**norms)
    yield "both of these exchanged", changed(fc=joined, **norms)


def _with_absolute_tokens(head: Model) -> Model:
    """Returns the head as if the stored `d2t` had the target's tokens, not differences."""
    config: models.EagleConfig = head.config  # type: ignore[assignment]
    size, inner = config.draft_vocab_size, head.params["params"]
    assert size is not None
    rows = jnp.arange(size, dtype=jnp.int32)
    tokens = tokens_of_rows(inner["vocab_map"], size) - rows
    draft = jnp.full(config.vocab_size, size, jnp.int32).at[tokens].set(rows, mode="drop")
    params = {"params": inner | {"vocab_map": draft}}
    return dataclasses.replace(head, params=params)
