"""Settings, random prompts and comparisons for the tests of the policies.

Only numpy: nothing here comes from the packages under test.
"""

import dataclasses
import functools
import math

import numpy as np

from tests.magicjax import policy_reference as reference

KV_HEADS, SIZE, SLOTS = 2, 8, 80
THETA = 50.0
TIE = 1e-5  # relative: differences below it are ties in float32


@dataclasses.dataclass(frozen=True)
class Setting:
    """The query heads of a KV head, with a budget and a window."""

    group: int
    window: int
    budget: int
    recent: int | None = None  # None: the policy's default, half the budget

    @property
    def ring(self) -> int:
        return math.ceil(self.budget / 2) if self.recent is None else self.recent

    @property
    def lengths(self) -> tuple[int, ...]:
        """Returns eight prompt lengths: around the window, around the budget, and longer ones."""
        window, budget = self.window, self.budget
        return (window - 1, window, budget - 1, budget, budget + 1, window + budget, 53, SLOTS)


# The window is longer than the budget, between ring and budget, shorter than the ring; odd budgets.
SETTINGS = (
    Setting(group=1, window=16, budget=12),
    Setting(group=2, window=5, budget=21),
    Setting(group=4, window=5, budget=12, recent=3),
    Setting(group=5, window=16, budget=12),
    Setting(group=7, window=5, budget=21),
    Setting(group=8, window=5, budget=12, recent=3),
)
# Name of the class, and what it is made with besides the window and the ring of the setting.
POLICIES = {
    "streaming": ("StreamingLLM", dict(sinks=5)),
    "snapkv": ("SnapKV", dict()),
    "snapkv-avg": ("SnapKV", dict(pooling="avg", kernel=5)),
    "snapkv-unpooled": ("SnapKV", dict(kernel=1)),
    "snapkv-unscaled": ("SnapKV", dict(scaled=False, kernel=3)),
    "h2o": ("H2O", dict()),
    "tova": ("TOVA", dict()),
    "keydiff": ("KeyDiff", dict()),
    "knorm": ("KNorm", dict()),
    "expected": ("ExpectedAttention", dict(future=24)),
    "expected-mean": ("ExpectedAttention", dict(future=24, covariance=False)),
    "expected-epsilon": ("ExpectedAttention", dict(future=3, epsilon=0.05)),
}
WINDOWED = ("SnapKV", "PyramidKV", "ExpectedAttention")
REFERENCES = {
    "StreamingLLM": lambda row, sinks: reference.streaming(row),
    "SnapKV": reference.snapkv,
    "H2O": reference.h2o,
    "TOVA": reference.tova,
    "KeyDiff": reference.keydiff,
    "KNorm": reference.knorm,
}


def wanted(name: str, setting: Setting, row: reference.Row, inverse=None) -> np.ndarray:
    """Returns the reference's scores [K, candidates] for the policy of that name."""
    kind, options = POLICIES[name]
    options = dict(options)
    if kind in WINDOWED:
        options |= dict(window=setting.window)
    if kind == "ExpectedAttention":
        return reference.expected_attention(row, inverse, **options)
    return REFERENCES[kind](row, **options)


def frequencies(theta: float = THETA) -> np.ndarray:
    return theta ** (-2 * np.arange(SIZE // 2) / SIZE)


@functools.cache
def prompts(setting: Setting, rotated: bool = True, seed: int = 0) -> tuple[reference.Row, ...]:
    """Returns a row for each length, with a mean of its own for each head.

    The numbers are exact in float32, so that both sides have the same inputs.
    """
    rng = np.random.default_rng([seed, setting.group])
    heads = KV_HEADS * setting.group
    query_mean, key_mean = rng.normal(size=(heads, SIZE)), rng.normal(size=(KV_HEADS, SIZE))
    rows = []
    for n in setting.lengths:
        q = query_mean + rng.normal(size=(n, heads, SIZE))
        keys = (key_mean + rng.normal(size=(n, KV_HEADS, SIZE))) * rng.uniform(
            0.5, 1.5, (n, KV_HEADS, 1)
        )
        values = rng.normal(size=(n, KV_HEADS, SIZE)) * rng.uniform(0.2, 2, (n, KV_HEADS, 1))
        if rotated:
            turns = np.stack([reference.rotation(p, frequencies()) for p in range(n)])
            q, keys = (np.einsum("nij,nhj->nhi", turns, x) for x in (q, keys))
        q, keys, values = (x.astype(np.float32).astype(np.float64) for x in (q, keys, values))
        rows.append(reference.Row(q, keys, values, setting.ring))
    return tuple(rows)


def check_pins(found: np.ndarray, scores: np.ndarray) -> None:
    """Asserts that the pinned positions [K, P] have the reference's highest scores.

    Positions whose scores are ties in float32 can replace each other. Among equal scores, such as
    neighbours below one maximum, the earlier position is pinned.
    """
    count = found.shape[1]
    for pins, of_head, best in zip(found, scores, reference.pinned(scores, count), strict=True):
        pins = pins.tolist()
        assert pins == sorted(set(pins)), f"{pins} are not in order, or not distinct"
        assert 0 <= pins[0] and pins[-1] < len(of_head), f"{pins}: {len(of_head)} candidates"
        for wrong in set(pins) - set(best):
            for missed in set(best) - set(pins):
                a, b = of_head[wrong], of_head[missed]
                tie = 0 < abs(a - b) < TIE * max(abs(a), abs(b))
                assert tie, f"{pins} instead of {best}: {wrong} has {a}, {missed} has {b}"


def check_scores(found: np.ndarray, scores: np.ndarray) -> None:
    """Asserts that scores [K, candidates] agree, up to one positive factor."""
    found = np.asarray(found, np.float64)
    found, scores = found / np.abs(found).max(), scores / np.abs(scores).max()
    np.testing.assert_allclose(found, scores, rtol=1e-4, atol=2e-6)
