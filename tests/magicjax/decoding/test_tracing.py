"""Layers with equal shapes are traced and lowered once: another layer adds only calls."""

from collections.abc import Iterator

import pytest
from jax.extend.core import jaxprs_in_params

from magicjax.decoding import program_cache
from magicjax.drafters import self_speculation, sparse
from magicjax.kv_cache import full_cache, sparse_cache
from models import decoder
from tests.magicjax import tiny
from tests.magicjax.decoding import test_compiled
from tests.quick import quick

# Equations that another layer of target and draft may add to a program: calls, and zeros of caches.
MOST, OF_CASCADES = 16, 30


def equations(jaxpr, counted: set[int]) -> int:
    """Returns the equations of a jaxpr and of all jaxprs in it, each jaxpr counted once."""
    if id(jaxpr) in counted:
        return 0
    counted.add(id(jaxpr))
    inner = (each for equation in jaxpr.eqns for each in jaxprs_in_params(equation.params))
    return len(jaxpr.eqns) + sum(equations(each, counted) for each in inner)


def programs(request) -> Iterator[tuple]:
    """Yields (name, settings, shapes of the arguments) of the programs of a request."""
    settings, arguments = request.prefill_settings, (request.target, request.rows)
    yield "prefill", settings, arguments
    prefilled = program_cache.result_shapes("prefill", settings, arguments)
    settings, arguments = (
        request.settings,
        (request.target, request.drafter, *prefilled, request.rows),
    )
    yield "init", settings, arguments
    state = program_cache.result_shapes("init", settings, arguments)
    yield "decode", settings, (request.target, request.drafter, state, state.rounds)


def sizes(monkeypatch, name: str, layers: int) -> dict[str, int]:
    """Returns the equations of each program of a draft of `test_compiled`, by program.

    The target has `layers` layers, and a small draft has one less.
    """
    wide = tiny.config(head_dim=64, max_positions=20_000, num_layers=layers)
    heads = dict(num_heads=3, num_kv_heads=3)
    small = tiny.config(head_dim=64, max_positions=20_000, num_layers=layers - 1, **heads)
    monkeypatch.setattr(test_compiled, "WIDE", wide)
    monkeypatch.setattr(test_compiled, "SMALL", small)
    found = {}
    for program, settings, arguments in programs(test_compiled.request_of(name)):
        traced = program_cache.jitted(program, settings, arguments).trace(*arguments)
        found[program] = equations(traced.jaxpr.jaxpr, set())
    return found


# The layers of pyramidkv have pins of different numbers, so they are traced one by one; self_layers
# names one layer of two.
DRAFTS = [name for name in test_compiled.DRAFTS if name not in ("pyramidkv", "self_layers")]
PARTS = ("small_dynamic", "h2o_refreshed", "cascade")


@pytest.mark.parametrize("name", quick(DRAFTS, *PARTS))
def test_another_layer_adds_calls_only(name, monkeypatch):
    three, five = (sizes(monkeypatch, name, layers) for layers in (3, 5))
    added = {program: (five[program] - three[program]) / 2 for program in five}
    assert max(added.values()) <= (OF_CASCADES if "cascade" in name else MOST), added


@pytest.mark.parametrize(
    ("module", "function", "program"),
    [
        (decoder, "apply_block", "decode"),
        (full_cache, "_append", "decode"),
        (sparse_cache, "_append", "decode"),
        (sparse_cache, "_gather", "init"),
        (sparse, "choose", "init"),
        (self_speculation, "update_from_path", "decode"),
    ],
)
def test_a_function_that_is_traced_for_each_layer_is_detected(
    module, function, program, monkeypatch
):
    monkeypatch.setattr(module, function, getattr(module, function).__wrapped__)
    three, four = (sizes(monkeypatch, "snapkv_refreshed", layers)[program] for layers in (3, 4))
    assert four - three > MOST
