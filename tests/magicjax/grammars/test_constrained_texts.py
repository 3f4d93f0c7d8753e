"""Greedy texts under a grammar are those of plain decoding with masked logits."""

import functools

import jax
import numpy as np
import pytest

import magicjax
from magicjax.decoding import program_cache
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.preparation import place
from magicjax.grammars import matcher
from tests.magicjax import keywords, mesh_cases, oracle, scripted, tiny
from tests.magicjax.decoding import test_compiled
from tests.magicjax.drafters import test_scripted
from tests.magicjax.grammars import spelled
from tests.quick import quick

# Tokens span the parts of a repetition, and texts of the second one can end.
PATTERN = "([a-e]{1,3}[f-mab][xyz]?)+"
ENDING = "(ab|[c-h]x?){3,7}z"
FORCING = "((ab|c)nopqrs)+"
LIMIT = 16


@functools.cache
def expected(pattern: str | None, limit: int = LIMIT) -> tuple[np.ndarray, ...]:
    prompts = tiny.prompts(8)
    if pattern is None:
        return tiny.expected(8, 0, limit)
    return tuple(spelled.greedy(pattern, prompt, limit) for prompt in prompts)


def generate(drafter=None, tree=None, pattern=PATTERN, **options) -> magicjax.Output:
    grammar = magicjax.Grammar.regex(pattern) if isinstance(pattern, str) else pattern
    options = dict(max_tokens=LIMIT) | options
    return keywords.generate(
        spelled.target(), tiny.prompts(8), drafter=drafter, tree=tree, grammar=grammar, **options
    )


CASES = {
    "plain": (None, None),
    "self": ("self", "chain4"),
    "near": ("near", "irregular"),
    "same": ("same", "2,2,1"),
    "dynamic": ("near", "dynamic"),
    "prompt lookup": ("prompt-lookup", "branches"),
    "ensemble": ("ensemble", "2,2,1"),
}


@pytest.mark.parametrize("case", quick(CASES, "dynamic"))
def test_the_text_is_that_of_masked_plain_decoding(case, tally):
    kind, tree = CASES[case]
    drafter = None if kind is None else tiny.drafter(kind)
    output = generate(drafter, (tiny.TREES | tiny.SPECIAL).get(tree))
    found = tiny.rows_of(output)
    assert sum(len(row) for row in found) > LIMIT
    for wanted, row in zip(expected(PATTERN), found, strict=True):
        np.testing.assert_array_equal(row, wanted)
    if kind is not None:
        assert output.stats.accepted


@pytest.mark.parametrize("other", [None, "near"])
def test_tokens_that_the_grammar_forces_are_drafts(other):
    drafter = magicjax.ForcedTokens()
    if other is not None:
        drafter = magicjax.Ensemble([drafter, tiny.drafter(other)])
    output = generate(drafter, tiny.TREES["chain4"], FORCING)
    for wanted, row in zip(expected(FORCING), tiny.rows_of(output), strict=True):
        np.testing.assert_array_equal(row, wanted)
    assert output.stats.accepted
    without = generate(drafter, tiny.TREES["chain4"], "[a-z]*") if other is None else None
    assert without is None or not without.stats.accepted


def test_rows_have_grammars_of_their_own_and_end_where_only_eos_is_allowed():
    patterns = [PATTERN, None, ENDING, ENDING, None, PATTERN, ENDING, "a{3}"]
    grammars = [pattern and magicjax.Grammar.regex(pattern) for pattern in patterns]
    output = generate(tiny.drafter("near"), tiny.TREES["2,2,1"], grammars)
    for row, pattern in enumerate(patterns):
        np.testing.assert_array_equal(tiny.rows_of(output)[row], expected(pattern)[row])
    assert output.finish_reasons[7] == "eos"
    assert output.texts[7] == "aaa"
    assert {output.finish_reasons[row] for row in (2, 3, 6)} == {"eos"}


@pytest.mark.parametrize("kind", ["own"])
def test_scripted_trees_of_rows_and_rounds(kind):
    """Nodes that continue the text and nodes that the grammar forbids, on any branch."""
    rng = np.random.default_rng(3)
    tree = {"tree": tiny.TREES["irregular"], "own": test_scripted.OUTLINE}[kind]
    text = np.stack(expected(PATTERN, LIMIT + tree.depth))
    if kind == "own":
        trees = [[test_scripted.random_tree(rng, tree) for _ in range(LIMIT)] for _ in range(8)]
    else:
        trees = np.broadcast_to(tree.array, (8, LIMIT, tree.num_nodes))
    script = scripted.write(rng, text, np.array(trees), follow_the_tree=kind != "own")
    output = generate(script.drafter, tree)
    for wanted, row in zip(expected(PATTERN), tiny.rows_of(output), strict=True):
        np.testing.assert_array_equal(row, wanted)
    flat = [scripted.play(script.accepts[row], LIMIT) for row in range(8)]
    assert output.stats.target_passes == sum(map(len, flat))


@pytest.mark.slow
def test_a_stream_and_log_probabilities():
    options = dict(logprobs=2)
    whole = generate(tiny.drafter("near"), tiny.TREES["2,2,1"], **options)
    rounds = keywords.stream(
        spelled.target(),
        tiny.prompts(8),
        drafter=tiny.drafter("near"),
        tree=tiny.TREES["2,2,1"],
        max_tokens=LIMIT,
        grammar=magicjax.Grammar.regex(PATTERN),
        **options,
    )
    pieces = list(rounds)
    for row, wanted in enumerate(expected(PATTERN)):
        np.testing.assert_array_equal(np.concatenate([piece[row] for piece in pieces]), wanted)
    for row in range(2):
        prompt, text = tiny.prompts(8)[row], expected(PATTERN)[row]
        logits = oracle.logits(spelled.target(), [*prompt, *text[:-1]])[len(prompt) - 1 :]
        for n, token in enumerate(text):
            may_follow = spelled.allowed(PATTERN, spelled.tiny_texts(), tuple(text[:n].tolist()))
            masked = np.where(may_follow, logits[n], -np.inf)
            wanted = masked[token] - np.log(np.exp(masked).sum())
            assert whole.logprobs[row].chosen[n] == pytest.approx(wanted, abs=1e-3)


def test_another_grammar_compiles_nothing():
    generate(tiny.drafter("near"), tiny.TREES["2,2,1"])
    before = program_cache.totals()[0]
    generate(tiny.drafter("near"), tiny.TREES["2,2,1"], ENDING)
    assert program_cache.totals()[0] == before


def on_a_mesh(mesh: list[int], drafter: bool, **options) -> list[list[int]]:
    """Returns texts with a divided vocabulary."""
    target = mesh_cases.target(4)
    texts = (*(chr(0x21 + i) for i in range(63)), spelled.END)
    target = magicjax.Model(
        target.module, target.params, spelled.tokenizer(texts), eos_token_ids=(63,)
    )
    grammar = magicjax.Grammar.regex("([A-Z]{1,3}[0-9!]+)+")
    if drafter:
        options |= dict(
            drafter=magicjax.SelfSpeculation(budget=24), tree=magicjax.expansion((2, 2))
        )
    output = keywords.generate(
        target,
        mesh_cases.prompts(),
        max_tokens=12,
        grammar=grammar,
        mesh=magicjax.make_mesh(*mesh) if mesh else None,
        **options,
    )
    assert all(set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!") for text in output.texts)
    return output.tokens.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True])
def test_a_mesh_gives_the_texts_of_one_device(eight, sampled):
    options = dict(temperature=1.0, seed=1, verifier="naive") if sampled else {}
    wanted = on_a_mesh([], drafter=False, **(dict(options, verifier=None) if sampled else {}))
    assert eight(on_a_mesh, mesh=[2, 4], drafter=True, **options) == wanted


@test_compiled.pytestmark
def test_the_programs_of_a_round_copy_no_caches():
    request = place(test_compiled.request_of("self_tree"))
    state = Decoder(request).state_shapes()
    arguments = request.target, request.drafter, state
    sizes = test_compiled.sizes_of(request, state)
    settings, shapes = request.settings, program_cache.result_shapes
    (tokens, _), proposed = shapes("propose", settings, arguments)
    scored = shapes("score", settings, (*arguments, proposed))
    words = jax.ShapeDtypeStruct((*tokens.shape, matcher.words(tiny.VOCAB)), np.uint32)
    for name, more in (
        ("propose", ()),
        ("score", (proposed,)),
        ("verify", (proposed, scored, words)),
    ):
        program = program_cache.program(name, settings, *arguments, *more)
        assert test_compiled.moved_caches(program, sizes) == {}, name
