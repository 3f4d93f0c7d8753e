"""Every policy pins what its reference pins in ragged rows, with the same scores.

Cache slots after the end of a row, and queries before its first, hold large numbers. A policy that
reads them pins other entries.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from magicjax import policies
from magicjax.policies.base import Evidence, Policy, RecentQueries, choose
from models.positions import frequencies as of_model
from tests.magicjax import policy_reference as reference
from tests.magicjax.policy_cases import (
    KV_HEADS,
    POLICIES,
    SETTINGS,
    SIZE,
    SLOTS,
    THETA,
    WINDOWED,
    Setting,
    check_pins,
    check_scores,
    frequencies,
    prompts,
    wanted,
)
from tests.quick import quick

LAYERS = 4
ROPE = models.Rope(theta=THETA)


def made(name: str, setting: Setting) -> Policy:
    """Returns the policy of that name in `POLICIES`."""
    kind, options = POLICIES[name]
    options = dict(options)
    if kind in WINDOWED:
        options |= dict(window=setting.window)
    if kind != "StreamingLLM":
        options |= dict(recent=setting.recent)
    return getattr(policies, kind)(**options)


def garbage(rng, *shape) -> np.ndarray:
    return (rng.choice([-1, 1], shape) * rng.uniform(1e3, 1e4, shape)).astype(np.float32)


def llama(group: int, rope: models.Rope = ROPE) -> models.DecoderConfig:
    heads = KV_HEADS * group
    return models.DecoderConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=40,
        num_layers=LAYERS,
        num_heads=heads,
        num_kv_heads=KV_HEADS,
        head_dim=SIZE,
        max_positions=4096,
        positions=rope,
    )


def evidence(rows, policy: Policy, config, ring: int, layer: int = 0, rng=None) -> Evidence:
    """Returns the evidence of the rows, with garbage in undefined entries."""
    rng = rng or np.random.default_rng(9)
    batch, heads = len(rows), rows[0].heads
    keys, values = (garbage(rng, batch, KV_HEADS, SLOTS, SIZE) for _ in range(2))
    for b, row in enumerate(rows):
        keys[b, :, : row.length] = row.keys.swapaxes(0, 1)
        values[b, :, : row.length] = row.values.swapaxes(0, 1)
    queries = total = None
    if policy.window:
        q = garbage(rng, batch, policy.window, heads, SIZE)
        lse = garbage(rng, batch, policy.window, heads)
        seen = np.zeros((batch, policy.window), np.int32)
        for b, row in enumerate(rows):
            shown = min(policy.window, row.length)
            q[b, policy.window - shown :] = row.q[row.length - shown :]
            given = reference.logits(row)[row.length - shown :]
            lse[b, policy.window - shown :] = np.log(np.exp(given).sum(-1))
            seen[b, policy.window - shown :] = np.arange(row.length - shown, row.length) + 1
        queries = RecentQueries(q=jnp.asarray(q), lse=jnp.asarray(lse), seen=jnp.asarray(seen))
    if policy.accumulates:
        total = garbage(rng, batch, KV_HEADS, SLOTS)
        for b, row in enumerate(rows):
            total[b, :, : row.length] = reference.mass(row, row.length)
        total = jnp.asarray(total)
    candidates = np.array([max(row.length - ring, 0) for row in rows], np.int32)
    return Evidence(
        keys=jnp.asarray(keys),
        values=jnp.asarray(values),
        candidates=jnp.asarray(candidates),
        queries=queries,
        accumulated=total,
        layer=layer,
        config=config,
    )


@functools.partial(jax.jit, static_argnums=(0, 2))
def pins_and_scores(policy: Policy, given: Evidence, count: int):
    return choose(policy, given, count), policy.score(given)


def compare(name, setting, config, rows, inverse) -> int:
    """Compares a policy with its reference in all rows longer than the budget; counts them."""
    policy = made(name, setting)
    count = setting.budget - setting.ring
    if name == "streaming":
        count = POLICIES[name][1]["sinks"]
    assert policy.pinned(setting.budget, LAYERS) == (count,) * LAYERS
    ring = policy.ring(setting.budget)
    rows = [dataclasses.replace(row, recent=ring) for row in rows]
    pins, scores = pins_and_scores(policy, evidence(rows, policy, config, ring), count)
    assert pins.dtype == jnp.int32 and pins.shape == (len(rows), KV_HEADS, count)
    compared = 0
    for b, row in enumerate(rows):
        if row.length > setting.budget:
            expected = wanted(name, setting, row, inverse)
            check_pins(np.asarray(pins)[b], expected)
            if name != "streaming":
                check_scores(np.asarray(scores)[b, :, : row.candidates], expected)
            compared += 1
    return compared


@pytest.mark.parametrize(
    ("name", "setting"),
    quick(
        itertools.product(POLICIES, SETTINGS),
        *((name, s) for i, name in enumerate(POLICIES) for s in SETTINGS[i % 4 :: 4]),
    ),
    ids=lambda x: x if isinstance(x, str) else f"G{x.group}",
)
def test_a_policy_pins_what_its_reference_pins(name, setting):
    rows = prompts(setting)
    assert compare(name, setting, llama(setting.group), rows, frequencies()) >= 4


@pytest.mark.parametrize("name", [name for name in POLICIES if name.startswith("expected")])
def test_expected_attention_of_a_model_without_rotary_positions(name):
    setting = SETTINGS[0]
    config = models.family_config(
        "opt",
        vocab_size=48,
        hidden_size=KV_HEADS * SIZE,
        intermediate_size=40,
        num_layers=LAYERS,
        num_heads=KV_HEADS,
        max_positions=4096,
    )
    rows = prompts(setting, rotated=False)
    assert compare(name, setting, config, rows, None) >= 4


@pytest.mark.parametrize(
    "rope",
    [
        models.Rope(theta=THETA, kind="linear", factor=3.0),
        models.Rope(theta=THETA, kind="llama3", factor=4.0, original_max_positions=64),
        models.Rope(theta=THETA, kind="yarn", factor=4.0, original_max_positions=32),
    ],
    ids=lambda rope: rope.kind,
)
def test_expected_attention_rotates_as_the_model_does(rope):
    # The queries already contain Yarn's factor on cosine and sine; it must not be applied twice.
    setting = SETTINGS[1]
    inverse = of_model(rope, SIZE)[0].astype(np.float64)
    assert np.abs(inverse - frequencies()).max() > 0.01
    rows = prompts(setting)
    assert compare("expected", setting, llama(setting.group, rope), rows, inverse) >= 4


@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_pyramidkv_pins_the_entries_of_snapkv_with_the_count_of_its_layer(pooling):
    setting = Setting(group=2, window=5, budget=40)
    options = dict(window=setting.window, kernel=5, pooling=pooling)
    policy = policies.PyramidKV(**options, beta=4)
    ring = policy.ring(setting.budget)
    rows = prompts(setting)
    pins = policy.pinned(setting.budget, LAYERS)
    assert pins == (35, 25, 15, 5)
    compared = 0
    for layer in (0, 2, 3):
        given = evidence(rows, policy, llama(setting.group), ring, layer)
        found = np.asarray(pins_and_scores(policy, given, pins[layer])[0])
        for b, row in enumerate(rows):
            if row.length > pins[layer] + ring:
                check_pins(found[b], reference.snapkv(row, **options))
                compared += 1
    assert compared >= 9


@pytest.mark.parametrize("layers", [1, 2, 3, 12, 32])
@pytest.mark.parametrize("budget", [12, 13, 64, 512])
@pytest.mark.parametrize("beta", [1.0, 2.0, 20.0])
def test_the_pyramid_is_a_rounded_line_that_uses_every_slot(layers, budget, beta):
    policy = policies.PyramidKV(beta=beta)
    pins = policy.pinned(budget, layers)
    mean = budget - policy.ring(budget)
    exact = reference.pyramid(mean, layers, beta)
    assert sum(pins) == layers * mean and len(pins) == layers
    assert sorted(pins, reverse=True) == list(pins)
    assert np.abs(np.array(pins) - exact).max() < 1
    assert all(isinstance(p, int) for p in pins)


def test_defaults_are_the_documented_ones_and_half_the_budget_is_the_ring():
    for kind in ("SnapKV", "H2O", "TOVA", "KeyDiff", "KNorm", "ExpectedAttention", "Random"):
        policy = getattr(policies, kind)()
        assert (policy.ring(64), policy.ring(13)) == (32, 7), kind
        assert policy.pinned(13, 3) == (6, 6, 6), kind
        assert getattr(policies, kind)(recent=4).ring(64) == 4, kind
    assert policies.StreamingLLM().pinned(64, 2) == (16, 16)
    assert policies.StreamingLLM(sinks=4).ring(64) == 60
    assert policies.SnapKV() == policies.SnapKV(window=32, kernel=7, pooling="max", scaled=True)
    assert policies.PyramidKV() == policies.PyramidKV(window=32, kernel=7, pooling="max", beta=20)
    assert policies.ExpectedAttention() == policies.ExpectedAttention(
        window=128, future=512, epsilon=0.0, covariance=True
    )
    windows = {kind: getattr(policies, kind)().window for kind in ("TOVA", "KNorm", "KeyDiff")}
    assert windows == {"TOVA": 1, "KNorm": 0, "KeyDiff": 0}
    assert policies.H2O().accumulates and not policies.SnapKV().accumulates


def random_pins(seed: int) -> np.ndarray:
    setting = SETTINGS[1]
    policy, rows = policies.Random(seed=seed), prompts(setting)
    given = evidence(rows, policy, llama(setting.group), setting.ring)
    return np.asarray(pins_and_scores(policy, given, setting.budget - setting.ring)[0])


def test_random_pins_are_candidates_and_depend_only_on_the_seed():
    setting = SETTINGS[1]
    found = random_pins(3)
    for row, pins in zip(prompts(setting), found, strict=True):
        for of_head in pins if row.length > setting.budget else ():
            assert of_head.tolist() == sorted(set(of_head.tolist()))
            assert 0 <= of_head[0] and of_head[-1] < row.candidates
    np.testing.assert_array_equal(random_pins(3), found)
    assert not np.array_equal(random_pins(4), found)
    # Rows of the same length have the same pins.
    policy, same = policies.Random(seed=3), [prompts(setting, seed=s)[-1] for s in (0, 1)]
    given = evidence(same, policy, llama(setting.group), setting.ring)
    first, second = pins_and_scores(policy, given, setting.budget - setting.ring)[0]
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, found[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given(Policy):
    """Scores by position, the same in all rows and heads."""

    by_position: tuple[float, ...]

    def score(self, evidence):
        return jnp.broadcast_to(jnp.array(self.by_position), evidence.keys.shape[:3])


def test_the_highest_scores_are_chosen_earlier_first_among_equals_and_nan_last():
    setting = SETTINGS[1]
    rows = prompts(setting)[-1:]
    scores = np.full(SLOTS, 5.0)
    scores[7], scores[3], scores[SLOTS - setting.ring :] = 6.0, np.nan, 9.0
    policy = Given(by_position=tuple(scores))
    given = evidence(rows, policy, llama(setting.group), setting.ring)
    assert np.asarray(choose(policy, given, 5)).tolist() == [[[0, 1, 2, 4, 7]] * KV_HEADS]


# Negative control with wrong evidence.


def test_a_policy_with_wrong_evidence_fails_the_comparison():
    setting = SETTINGS[1]
    policy, rows = made("snapkv", setting), prompts(setting)
    older = [
        dataclasses.replace(row, q=np.roll(row.q, 1, axis=0), recent=setting.ring) for row in rows
    ]
    given = evidence(older, policy, llama(setting.group), setting.ring)
    pins, scores = pins_and_scores(policy, given, setting.budget - setting.ring)
    right = wanted("snapkv", setting, rows[-1])
    with pytest.raises(AssertionError):
        check_pins(np.asarray(pins)[-1], right)
    with pytest.raises(AssertionError):
        check_scores(np.asarray(scores)[-1, :, : rows[-1].candidates], right)
