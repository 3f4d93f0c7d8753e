"""Log-probabilities are those of a plain forward pass over each whole text."""

import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.decoding import program_cache
from magicjax.verification import verify
from tests.magicjax import keywords, mesh_cases, oracle, tiny
from tests.quick import quick

ATOL = 1e-4  # of natural logarithms in float32
SAMPLED = dict(temperature=0.6, top_k=12, top_p=0.9)
# Name: (drafter, tree, options of generate).
CASES = {
    "plain": (None, None, {}),
    "plain sampled": (None, None, SAMPLED),
    "chain": ("self", "chain4", {}),
    "chain sampled": ("self", "chain4", SAMPLED),
    "tree": ("near", "irregular", {}),
    "tree sampled": ("near", "irregular", SAMPLED),
    "tree by naive": ("near", "irregular", SAMPLED | dict(verifier="naive")),
    "dynamic": ("near", "dynamic", {}),
    "dynamic sampled": ("near", "dynamic", SAMPLED),
    "ensemble": ("ensemble", "2,2,1", {}),
    "ensemble sampled": ("ensemble", "2,2,1", SAMPLED),
}


def check(target, prompt, tokens, logprobs: magicjax.LogProbs, count: int) -> None:
    """Asserts that log-probabilities are those of one pass of the oracle over the whole text."""
    logits = oracle.logits(target, [*prompt, *tokens])[len(prompt) - 1 : -1]
    logs = logits - logits.max(-1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(-1, keepdims=True))
    assert logprobs.chosen.dtype == logprobs.top.dtype == np.float32
    assert logprobs.top.shape == logprobs.top_tokens.shape == (len(tokens), count)
    options = dict(atol=ATOL * (oracle.STEP if target.kv_bits else 1), rtol=0)
    expected = logs[np.arange(len(tokens)), tokens]
    np.testing.assert_allclose(logprobs.chosen, expected, **options)
    best = np.sort(logs, -1)[:, ::-1][:, :count]
    np.testing.assert_allclose(logprobs.top, best, **options)
    at_top = np.take_along_axis(logs, logprobs.top_tokens, -1)
    np.testing.assert_allclose(at_top, best, **options)


def check_rows(target, prompts, output: magicjax.Output, count: int) -> None:
    rows = zip(prompts, tiny.rows_of(output), output.logprobs, strict=True)
    for prompt, tokens, logprobs in rows:
        check(target, prompt, tokens, logprobs, count)


def output_of(name: str, logprobs: int | None, **options) -> magicjax.Output:
    kind, tree, own = CASES[name]
    return tiny.generate(3, 0, kind, tree, logprobs=logprobs, **own | options)


@pytest.mark.parametrize("name", quick(CASES, "chain"))
def test_log_probabilities_are_those_of_a_plain_pass(name, tally):
    output = output_of(name, 3)
    check_rows(tiny.model(), tiny.prompts(3), output, 3)
    if CASES[name][0] is not None:
        assert output.stats.accepted
    if CASES[name][2]:
        np.testing.assert_array_equal(output.tokens, output_of(name, None).tokens)
    else:
        tally.compare(tiny.model(), tiny.prompts(3), tiny.expected(3), tiny.rows_of(output))


def test_rows_that_end_have_as_many_log_probabilities_as_tokens():
    eos = int(tiny.expected(3)[0][6])
    options = dict(eos_token_id=eos, max_tokens=[tiny.NEW, 5, 1])
    output = output_of("chain", 3, **options)
    assert set(output.lengths) > {1}
    assert [len(one.chosen) for one in output.logprobs] == output.lengths.tolist()
    check_rows(tiny.model(), tiny.prompts(3), output, 3)


@pytest.mark.slow
def test_a_stream_returns_those_of_generate():
    kind, tree, own = CASES["chain"]
    drafted = dict(drafter=tiny.drafter(kind), tree=tiny.TREES[tree])
    options = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER, logprobs=3) | drafted | own
    rounds = keywords.stream(tiny.model(), tiny.prompts(3), **options)
    while True:
        try:
            next(rounds)
        except StopIteration as end:
            return check_rows(tiny.model(), tiny.prompts(3), end.value, 3)


@pytest.mark.slow
def test_logits_of_the_emitted_node_itself_fail(monkeypatch):
    """Control: a token is scored by the node before it."""

    def shifted(result, logits):
        path = jnp.concatenate([result.path[:, 1:], result.path[:, -1:]], 1)
        return jnp.take_along_axis(logits, path[:, :, None], 1)

    monkeypatch.setattr(program_cache, "_compiled", {})
    monkeypatch.setattr(verify.VerifyResult, "along_path", shifted)
    output = output_of("chain", 3)
    assert output.stats.accepted
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_rows(tiny.model(), tiny.prompts(3), output, 3)


def divided(case: str, mesh: list[int]) -> bool:
    """Asserts the log-probabilities of a case on a mesh; runs in a process of eight devices."""
    output = mesh_cases.generate(case, mesh, logprobs=3)
    target = mesh_cases.target(mesh_cases.CASES[case][3])
    check_rows(target, mesh_cases.prompts(), output, 3)
    return True


@pytest.mark.parametrize(
    ("case", "mesh"), quick([("self", (1, 8)), ("several sampled", (2, 4)), ("dynamic", (2, 2, 2))])
)
def test_a_divided_vocabulary_gives_the_same(eight, case, mesh):
    assert eight(divided, case=case, mesh=list(mesh))


def check_prompt(target, prompt, logprobs: magicjax.LogProbs, count: int) -> None:
    """Asserts that the log-probabilities of a prompt are those of its tokens after the first."""
    check(target, prompt[:1], prompt[1:], logprobs, count)


@pytest.mark.parametrize("drafter", quick((None, "near"), None))
def test_log_probabilities_of_prompts_are_those_of_a_plain_pass(drafter):
    prompts, tree = tiny.prompts(3), drafter and "chain4"
    counts = [2, None, 0]
    output = tiny.generate(3, 0, drafter, tree, max_tokens=4, prompt_logprobs=counts)
    assert output.prompt_logprobs[1] is None and output.logprobs is None
    for row in (0, 2):
        check_prompt(tiny.model(), prompts[row], output.prompt_logprobs[row], counts[row])
