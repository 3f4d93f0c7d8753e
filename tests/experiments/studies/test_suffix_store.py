"""The study of suffix lookup: its requests, and what it measures of a repeated one."""

import numpy as np
import pytest

from experiments.studies import suffix_store
from tests.magicjax import tiny


def test_requests_resemble_each_other_and_are_different():
    made = suffix_store.resembling(100)
    texts = [user["content"] for _, user in made]
    assert len({system["content"] for system, _ in made}) == 1 and len({*texts}) == 100
    assert not any("{" in text for text in texts)
    different = [message["content"] for (message,) in suffix_store.different()]
    assert len({*different}) == len(different) > 20


@pytest.mark.slow
def test_a_repeated_request_is_drafted_from_the_store(monkeypatch):
    monkeypatch.setattr(suffix_store, "CONTEXT", 64)
    monkeypatch.setattr(suffix_store, "METHODS", ((None, None), ("suffix", "chain:4")))
    prompt = np.arange(1, 20)
    once, again = (suffix_store.measure(tiny.model(), [prompt] * n, 24) for n in (1, 3))
    for plain, suffix in (once, again):
        assert plain["τ"] == plain["equal"] == suffix["equal"] == 1
    assert again[1]["τ"] > 1.5 * once[1]["τ"] and again[1]["hit rate"] > once[1]["hit rate"]
