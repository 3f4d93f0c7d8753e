"""Rows whose logits become NaN, as by overflow in float16, end with an error; others go on."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.benchmarks.synthetic import Synthetic
from tests.magicjax import tiny
from tests.quick import quick

DRAFTERS = {"plain": {}, "tree": dict(drafter=tiny.drafter("near"), tree=tiny.TREES["2,2,1"])}
TEXTS = tiny.expected(8)


def target(token: int) -> magicjax.Model:
    """Returns the tiny target, whose states are NaN after a token; its logits are finite before."""
    whole = tiny.model()
    inner = dict(whole.params["params"])
    inner["embedding"] = jnp.asarray(inner["embedding"]).at[token].set(jnp.nan)
    return dataclasses.replace(whole, params={"params": inner}, eos_token_ids=(tiny.NEVER,))


def token_of_few() -> tuple[int, dict[int, int]]:
    """Returns a token and how many tokens some rows have up to it; other rows have it nowhere."""
    for token in range(tiny.VOCAB):
        in_prompt = [token in prompt for prompt in tiny.prompts(8)]
        begins = {i: row.tolist().index(token) + 1 for i, row in enumerate(TEXTS) if token in row}
        if not any(in_prompt) and begins and len(begins) < 5 and max(begins.values()) > 3:
            return token, begins
    raise AssertionError


TOKEN, BEGINS = token_of_few()


@pytest.mark.parametrize(
    ("name", "sampled"), quick(itertools.product(DRAFTERS, (False, True)), ("tree", True))
)
def test_generate_and_stream_name_the_row(name, sampled):
    row = min(BEGINS)
    params = [
        magicjax.SamplingParams(max_tokens=tiny.NEW, temperature=0.01 if sampled else 0.0)
        for _ in range(8)
    ]
    message = f"row {row}: after {BEGINS[row]} new tokens the target's logits are NaN"
    with pytest.raises(RuntimeError, match=message):
        magicjax.generate(target(TOKEN), tiny.prompts(8), params, **DRAFTERS[name])
    with pytest.raises(RuntimeError, match="the target's logits are NaN"):
        for _ in magicjax.stream(target(TOKEN), tiny.prompts(8), params, **DRAFTERS[name]):
            pass


@pytest.mark.parametrize("backend", quick(["xla", "reference"], "xla"))
def test_a_wrong_draft_with_nan_changes_nothing(backend):
    """A drafted node with NaN must not reach its siblings and the root through masked weights."""
    token = next(t for t in range(tiny.VOCAB) if not any(t in row for row in TEXTS) and t != 0)
    text = np.full((8, 64), token, np.int32)
    drafter = Synthetic(None, jnp.asarray(text), jnp.float32(1.0))
    params = magicjax.SamplingParams(max_tokens=tiny.NEW)
    prompts = [[t for t in prompt if t != token] for prompt in tiny.prompts(8)]
    plain = magicjax.generate(target(token), prompts, params, backend=backend)
    tree = tiny.TREES["chain4"]
    drafted = magicjax.generate(
        target(token), prompts, params, drafter=drafter, tree=tree, backend=backend
    )
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)


def test_a_prompt_with_nan_has_no_token():
    prompt = [1, TOKEN, 2]
    with pytest.raises(RuntimeError, match="row 0: after 0 new tokens the target's logits are NaN"):
        magicjax.generate(target(TOKEN), [prompt], magicjax.SamplingParams(max_tokens=4))


@pytest.mark.parametrize("name", quick(DRAFTERS, "plain"))
def test_requests_of_an_engine_end_alone(name):
    config = magicjax.EngineConfig(slots=3, capacity=128, prefill_chunk=16)
    engine = magicjax.Engine(target(TOKEN), *DRAFTERS[name].values(), config=config)
    params = magicjax.SamplingParams(max_tokens=tiny.NEW)
    bad = engine.submit([1, TOKEN, 2], params)
    rounds = [[engine.submit(prompt, params) for prompt in tiny.prompts(8)] for _ in range(2)]
    engine.run()
    assert (bad.result().finish_reason, bad.result().error_kind) == ("error", "nan")
    assert not len(bad.result().tokens)
    for handles in rounds:
        for i, handle in enumerate(handles):
            result, whole = handle.result(), TEXTS[i]
            assert result.finish_reason == ("error" if i in BEGINS else "length")
            np.testing.assert_array_equal(result.tokens, whole[: BEGINS.get(i, tiny.NEW)])
