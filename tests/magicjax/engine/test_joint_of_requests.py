"""Sampled requests that share a batch are independent, and each has the target's distribution."""

import collections
import itertools

import numpy as np
import pytest

import magicjax
from tests.magicjax.decoding import test_joint as alone
from tests.quick import quick

NEW = 2  # tokens of a request
DRAFTERS = ["plain", "small, 2,2", "small, dynamic", "self, dynamic", "ensemble, dynamic"]
DRAFTERS += ["prompt-lookup, chain", "suffix, chain", "eagle, 2,2", alone.CASCADE]


def wanted_pairs() -> dict[tuple, float]:
    """Returns the probability of each pair of texts of two independent requests."""
    texts: dict[tuple[int, ...], float] = collections.defaultdict(float)
    for text, p in alone.joint(tuple(alone.WARPED.items())).items():
        texts[text[:NEW]] += p
    return {(a, b): texts[a] * texts[b] for a, b in itertools.product(texts, repeat=2)}


def sampled_pairs(name: str, pairs: int, seeds_per_pair: int = 2) -> dict[tuple, int]:
    """Returns how often an engine emitted each pair of texts.

    The two requests of a pair are neighbours in the queue. Longer requests and cancelled ones share
    the batch with them. With one seed per pair, both requests have the same random numbers.
    """
    drafter, tree, _ = alone.ALL[name]
    config = magicjax.EngineConfig(
        slots=7, capacity=24, max_tokens=8, sampling=True, eos_token_id=alone.EOS, prefix_bytes=0
    )
    engine = magicjax.Engine(alone.model(0), drafter, tree, config)
    rng, handles = np.random.default_rng(0), []
    for pair in range(pairs):
        for which in range(2):
            seed = 2 * pair + which % seeds_per_pair
            params = magicjax.SamplingParams(max_tokens=NEW, seed=seed, **alone.WARPED)
            handles.append(engine.submit(alone.PROMPT, params))
        if rng.random() < 0.2:
            params = magicjax.SamplingParams(temperature=1, seed=10**6 + pair, max_tokens=None)
            other = engine.submit(alone.PROMPT[: rng.integers(1, 9)], params)
            if rng.random() < 0.5:
                other.cancel()
        if engine.stats.waiting > 100:  # a short queue is fast
            engine.step()
    engine.run()
    texts = [tuple(handle.result().tokens.tolist()) for handle in handles]
    return collections.Counter(zip(texts[::2], texts[1::2], strict=True))


@pytest.mark.parametrize("name", quick(DRAFTERS))
def test_pairs_of_requests_have_the_product_of_their_distributions(name):
    assert alone.p_value(sampled_pairs(name, 1500), wanted_pairs()) > 1e-3


@pytest.mark.slow
def test_pairs_with_the_same_random_numbers_are_found():
    assert alone.p_value(sampled_pairs("plain", 300, seeds_per_pair=1), wanted_pairs()) < 1e-9
