"""`thinking_token_budget`: each node of a tree counts the reasoning on its own path."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
from magicjax.decoding import program_cache
from magicjax.grammars.grammar import Grammar
from magicjax.sampling_params import SamplingParams
from magicjax.trees import token_tree
from magicjax.verification import logits_processor
from magicjax.verification.logits_processor import NO_LIMIT, NO_TOKEN, ThinkingBudget
from tests.magicjax import oracle, tiny
from tests.magicjax.grammars import spelled, test_after_reasoning
from tests.magicjax.grammars.test_after_reasoning import ENDS, THINK, prompts
from tests.magicjax.processing import ended, processed
from tests.quick import quick

VOCAB = 6
PARENTS = np.array([-1, 0, 0, 1, 1, 3, 2, 5], np.int32)
PATHS = token_tree.ancestor_mask(PARENTS)
BEGIN, END, CALL, EOS = 1, 2, 3, 5
BUDGETS = [
    ThinkingBudget(inside, limit + (not inside), (BEGIN, END, other))
    for inside in (True, False)
    for limit in range(6)
    for other in (CALL, NO_TOKEN)
]


def check_nodes(seed: int) -> int:
    """Compares the logits of all nodes of random trees with the definition; counts the ended."""
    rng, count = np.random.default_rng(seed), len(BUDGETS)
    texts = [rng.choice([0, 0, 4, 4, END, CALL], n) for n in rng.integers(1, 5, count)]
    for text in texts[count // 2 :]:
        text[0] = rng.choice([BEGIN, 0], p=[0.8, 0.2])
    none = [SamplingParams()] * count, [np.zeros(1, int)] * count, [()] * count
    rows = jax.tree.map(jnp.asarray, logits_processor.rows_of(*none, BUDGETS, VOCAB))
    for t in range(max(map(len, texts))):
        tokens = np.array([[text[t] if t < len(text) else 0] for text in texts], np.int32)
        rows = logits_processor.with_tokens(rows, tokens, np.array([t < len(x) for x in texts]) * 1)
    nodes = rng.choice([0, 4, 4, END, CALL], (count, len(PARENTS))).astype(np.int32)
    nodes[:, 0] = [text[-1] for text in texts]
    logits = rng.normal(0, 2, (*nodes.shape, VOCAB)).astype(np.float32)
    logits[:, :, END] = np.where(rng.random(nodes.shape) < 0.1, -np.inf, logits[:, :, END])
    emitted, total = np.array([len(x) for x in texts]), 0
    given = rows, logits, nodes, PARENTS, emitted
    found = jax.jit(lambda *given: logits_processor.end_reasoning(*given))(*given)  # not cached
    for i, budget in enumerate(BUDGETS):
        for n in range(len(PARENTS)):
            path = [int(nodes[i, a]) for a in range(1, len(PARENTS)) if PATHS[n, a]]
            prompt = [BEGIN if budget.inside else 0]
            tokens = budget.limit - (not budget.inside)
            given = prompt, [*map(int, texts[i]), *path], tokens, budget.markers
            expected = ended(logits[i, n], *given)
            np.testing.assert_array_equal(found[i, n], expected)
            total += np.isinf(expected).sum() > 1
    return total


@pytest.mark.parametrize("seed", range(4))
def test_each_node_counts_the_reasoning_of_its_own_path(seed):
    assert check_nodes(seed) > 20


@pytest.mark.parametrize("name", ["depths", "ancestor_mask"])
def test_a_count_of_the_root_only_is_detected(monkeypatch, name):
    def of_root(parents):
        if name == "depths":
            return jnp.zeros(parents.shape, jnp.int32)
        return jnp.broadcast_to(jnp.eye(8, dtype=bool), (*parents.shape, 8))

    monkeypatch.setattr(logits_processor.token_tree, name, of_root)
    with pytest.raises(AssertionError):
        check_nodes(0)


def test_rows_without_budgets_keep_their_logits():
    budgets = [ThinkingBudget(), ThinkingBudget(True, NO_LIMIT, (BEGIN, END, CALL))]
    none = [SamplingParams()] * 2, [np.zeros(1, int)] * 2, [()] * 2
    rows = logits_processor.rows_of(*none, budgets, VOCAB)
    logits = np.random.default_rng(0).normal(size=(2, 8, VOCAB)).astype(np.float32)
    given = rows, logits, np.zeros((2, 8), np.int32), PARENTS, np.full(2, 9)
    np.testing.assert_array_equal(jax.jit(logits_processor.end_reasoning)(*given), logits)


LIMIT = 16
DRAFTERS = {
    "plain": dict(),
    "chain": dict(drafter=tiny.drafter("near"), tree=tiny.TREES["chain4"]),
    "tree": dict(drafter=tiny.drafter("near"), tree=tiny.TREES["2,2,1"]),
    "dynamic": dict(drafter=tiny.drafter("near"), tree=tiny.SPECIAL["dynamic"]),
}
TARGET = functools.partial(spelled.thinking_target, "added")
TEXTS = spelled.thinking_texts("added")
MARKERS = TEXTS.index("<think>"), TEXTS.index("</think>")


def params_of(row: int, constrained: bool) -> SamplingParams:
    """Returns a budget of 0 to 7 tokens, and none for one row."""
    given = test_after_reasoning.params_of("added", row)
    grammar = given.grammar if constrained else None
    budget = None if row == 1 else row + 2 if row < 4 else row - 4
    fields = dict(grammar=grammar, max_tokens=LIMIT, thinking_token_budget=budget)
    return dataclasses.replace(given, **fields)


@functools.cache
def expected(row: int, constrained: bool) -> np.ndarray:
    """Returns the text of plain greedy decoding by definition."""
    params, prompt, text = params_of(row, constrained), prompts("added")[row], list[int]()
    given = dict(logit_bias=params.logit_bias, presence_penalty=params.presence_penalty)
    while len(text) < LIMIT and tiny.NEVER not in text:
        logits = processed(oracle.logits(TARGET(), [*prompt, *text])[-1], prompt, text, **given)
        if constrained:
            may_follow = test_after_reasoning.allowed("added", ENDS[row], tuple(text))
            logits = np.where(may_follow, logits, -np.inf)
        if (budget := params.thinking_token_budget) is not None:
            logits = ended(logits, prompt, text, budget, MARKERS)
        text.append(int(logits.argmax()))
    return np.array(text)


@pytest.mark.parametrize("constrained", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("drafter", quick(DRAFTERS, "tree"))
def test_texts_are_those_of_plain_decoding_with_the_budget(drafter, constrained):
    params = [params_of(row, constrained) for row in range(len(ENDS))]
    output = magicjax.generate(TARGET(), prompts("added"), params, **DRAFTERS[drafter])
    for row, found in enumerate(tiny.rows_of(output)):
        np.testing.assert_array_equal(found, expected(row, constrained))
    for row in (0, 2, 3, 4):  # the fifth begins with <think>
        reasoning = tiny.rows_of(output)[row].tolist().index(MARKERS[1]) - (row == 4)
        assert reasoning <= params[row].thinking_token_budget
    if drafter != "plain":
        assert output.stats.accepted


def on_a_mesh() -> list[list[int]]:
    params = [params_of(row, constrained=True) for row in range(len(ENDS))]
    options = dict(DRAFTERS["tree"], mesh=magicjax.make_mesh(2, 2))
    output = magicjax.generate(TARGET(), prompts("added"), params, **options)
    return [row.tolist() for row in tiny.rows_of(output)]


@pytest.mark.slow
def test_a_divided_vocabulary_gives_the_same_texts(eight):
    for row, found in enumerate(eight(on_a_mesh)):
        np.testing.assert_array_equal(found, expected(row, True))


@pytest.mark.slow
def test_requests_of_an_engine_have_budgets_of_their_own():
    config = magicjax.EngineConfig(slots=3, capacity=64, grammars=True, logits_processors=True)
    engine = magicjax.Engine(TARGET(), *DRAFTERS["tree"].values(), config)
    engine.warm_up()
    compiled = program_cache.totals()[0]
    cases = [(row, constrained) for row in range(len(ENDS)) for constrained in (False, True)]
    handles = [engine.submit(prompts("added")[row], params_of(row, x)) for row, x in cases]
    engine.run()
    assert program_cache.totals()[0] == compiled
    for handle, case in zip(handles, cases, strict=True):
        np.testing.assert_array_equal(handle.result().tokens, expected(*case))


@pytest.mark.slow
def test_the_marker_of_a_call_ends_the_budget():
    """In a call, </think> would be text of an argument."""
    start = 'start: head /[a-f]*/\nhead[lazy]: /(?s:.*)/ "<think>"'
    grammar = dataclasses.replace(Grammar.lark(start), free_until="<think>")
    params = SamplingParams(
        grammar=grammar, max_tokens=8, thinking_token_budget=2, logit_bias={MARKERS[0]: 50.0}
    )
    prompt = prompts("added")[0]
    assert TEXTS[prompt[-1]] == THINK
    output = magicjax.generate(TARGET(), [prompt], params, **DRAFTERS["tree"])
    tokens = output.tokens[0, : output.lengths[0]].tolist()
    assert tokens[0] == MARKERS[0] and len(tokens) == 8 and MARKERS[1] not in tokens


def test_what_has_no_budget_is_refused():
    wanted = SamplingParams(thinking_token_budget=3, max_tokens=8)
    message = "thinking_token_budget=3 requires a tokenizer with the tokens <think> and </think>"
    for target in (tiny.model(), spelled.target(), spelled.thinking_target("text")):
        with pytest.raises(ValueError, match=message):
            magicjax.generate(target, [[1, 2]], wanted)
    config = magicjax.EngineConfig(slots=1, capacity=64, logits_processors=True)
    with pytest.raises(ValueError, match=message):
        magicjax.Engine(spelled.target(), config=config).submit([1, 2], wanted)
    config = dataclasses.replace(config, logits_processors=False)
    with pytest.raises(
        ValueError, match="thinking_token_budget is not supported: omit it, or create"
    ):
        magicjax.Engine(TARGET(), config=config).submit([1, 2], wanted)
    with pytest.raises(
        ValueError, match="thinking_token_budget=-1: it must be an integer of at least 0"
    ):
        SamplingParams(thinking_token_budget=-1)
