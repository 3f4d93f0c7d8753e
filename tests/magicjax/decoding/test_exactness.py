"""Greedy decoding, plain and speculative, gives the oracle's text: over drafters, trees, batches,
ragged prompts, and wherever a row ends.
"""

import dataclasses
import itertools

import numpy as np
import pytest

import magicjax
from magicjax.kv_cache import attend
from tests.forget import forget_programs
from tests.magicjax import keywords, oracle, tiny
from tests.quick import quick

# Every kind of tree and most drafters; engines run an ensemble and suffix lookup, and "quest"
# drafts for a target with a quantized cache below. All pairs of drafter and tree for every batch
# size are the slow test below.
CASES = [
    ("self", "chain4", 8),
    ("near", "irregular", 8),
    ("near", "dynamic", 8),
    ("prompt-lookup", "branches", 3),
    ("eagle", "2,2,1", 8),
    ("cascade", "chain4", 8),
]
BATCHES = (1, 3, 8)
ALL = [
    *itertools.product(
        [*tiny.DRAFTERS, "quest", "layers", "few near", "eagle", "eagle ring"],
        [*tiny.TREES, "dynamic"],
        BATCHES,
    ),
    *itertools.product(["prompt-lookup"], ["chain1", "chain4", "chain8", "branches"], BATCHES),
    *itertools.product(["suffix"], ["chain1", "chain4", "chain8", "dynamic"], BATCHES),
    *itertools.product(["cascade", "cascade of several"], ["chain2", "chain4", "chain8"], BATCHES),
    *itertools.product(
        ["cascade of one tree"], ["chain1", "2,2,1", "irregular", "dynamic"], BATCHES
    ),
]
ALL = [case for case in ALL if case not in CASES]
SEEDS = range(2)


def check(tally, batch, seed, limits=None, eos=tiny.NEVER, **options) -> None:
    """Asserts that `generate` gives the oracle's text up to each row's own end."""
    wanted = [
        oracle.cut(row, eos, limit)
        for row, limit in zip(tiny.expected(batch, seed), limits or [tiny.NEW] * batch)
    ]
    if limits is not None:
        options["max_tokens"] = limits
    output = tiny.generate(batch, seed, eos_token_id=eos, **options)
    tally.compare(tiny.model(), tiny.prompts(batch, seed), wanted, tiny.rows_of(output))
    return output


def check_every_end(tally, batch, **options) -> None:
    """Checks whole texts, texts that end by each row's own limit, and by an EOS at each offset."""
    for seed in SEEDS:
        check(tally, batch, seed, **options)
    # Limits one apart end their rows in every place of a step. One row keeps the longest, so that
    # the program is the same.
    for shift in range(0, 8, 3):
        limits = [tiny.NEW - (row + shift) % 9 for row in range(batch)]
        limits[shift % batch] = tiny.NEW
        check(tally, batch, 0, limits, **options)
    # The EOS is what one row says at that offset; the others say it earlier, later, or never.
    for offset in range(0, tiny.NEW, 3):
        eos = int(tiny.expected(batch, 0)[offset % batch][offset])
        check(tally, batch, 0, eos=eos, **options)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_plain_decoding_gives_the_oracles_text_wherever_rows_end(batch, tally):
    check_every_end(tally, batch)


@pytest.mark.parametrize(("kind", "tree", "batch"), CASES)
def test_speculative_decoding_gives_the_oracles_text_wherever_rows_end(kind, tree, batch, tally):
    check_every_end(tally, batch, kind=kind, tree=tree)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tree", "batch"), ALL)
def test_every_drafter_with_every_tree_and_batch_is_exact(kind, tree, batch, tally):
    check_every_end(tally, batch, kind=kind, tree=tree)


@pytest.mark.parametrize(
    ("target", "draft"),
    quick([("int4:8", "self"), (None, "int8"), (None, "copy")], ("int4:8", "self")),
)
def test_quantized_targets_and_drafts_are_exact(target, draft, tally):
    whole = tiny.model()
    model = tiny.quantized(whole, target) if target else whole
    drafter = tiny.drafter("self")
    if draft == "int8":
        drafter = magicjax.SmallModel(tiny.quantized(tiny.model("near"), "int8"), weights="int8")
    elif draft == "copy":
        drafter = dataclasses.replace(drafter, weights="int4:8")
    options = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER, tree=tiny.TREES["2,2,1"])
    found = keywords.generate(model, tiny.prompts(3), drafter=drafter, **options)
    plain = tiny.dequantized(model)
    wanted = [oracle.greedy(plain, prompt, tiny.NEW) for prompt in tiny.prompts(3)]
    tally.compare(plain, tiny.prompts(3), wanted, tiny.rows_of(found))
    assert 1 < found.stats.tau
    if draft == "int8":
        other = magicjax.SmallModel(tiny.model("near"), weights="int8")
        with pytest.raises(ValueError, match="weights='int8' differs from the draft model's, None"):
            keywords.generate(model, tiny.prompts(3), drafter=other, **options)
    unquantized = np.array_equal(wanted, tiny.expected(3))
    assert unquantized == (target is None)  # the text of a quantized target is its own


@pytest.mark.parametrize(
    ("kind", "tree"),
    quick(
        [
            *[(None, None), ("self", "2,2,1"), ("quest", "2,2,1"), ("layers", "2,2,1")],
            *[
                ("near", "dynamic"),
                ("ensemble", "2,2,1"),
                ("eagle", "2,2,1"),
                ("cascade", "chain4"),
            ],
        ],
        ("quest", "2,2,1"),
    ),
)
def test_a_target_with_its_cache_in_8_bits_is_exact(kind, tree, tally):
    target, prompts = tiny.model("int8 cache"), tiny.prompts(8)
    options: dict = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER)
    if kind:
        options |= dict(drafter=tiny.drafter(kind), tree=(tiny.TREES | tiny.SPECIAL)[tree])
    found = keywords.generate(target, prompts, **options)
    wanted = [oracle.greedy(target, prompt, tiny.NEW) for prompt in prompts]
    tally.compare(target, prompts, wanted, tiny.rows_of(found))
    assert not np.array_equal(wanted, tiny.expected(8))  # rounding changes the text
    assert sum(map(np.array_equal, wanted, tiny.rows_of(found))) >= 7  # ties are rare


@pytest.mark.parametrize("rounds", [True, False])
def test_a_pass_attends_to_its_own_tokens_as_they_are_stored(rounds, monkeypatch):
    if not rounds:  # the control
        monkeypatch.setattr(attend, "rounded", lambda k, v, slots: (k, v))
        forget_programs()
    target, prompts = tiny.model("int8 cache"), tiny.prompts(3)
    options: dict = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER, logprobs=0)
    found = keywords.generate(target, prompts, **options)
    errors = []
    for prompt, row, logprobs in zip(prompts, tiny.rows_of(found), found.logprobs, strict=True):
        logits = oracle.logits(target, [*prompt, *row])[len(prompt) - 1 : -1]
        chosen = np.take_along_axis(logits, row[:, None], 1)[:, 0]
        wanted = chosen - np.log(np.exp(logits).sum(-1))
        errors.append(np.abs(logprobs.chosen - wanted))
    assert (np.median(errors) < 1e-5) == rounds
    if not rounds:
        forget_programs()


def test_the_drafters_reach_every_branch():
    """Partial acceptance: the tests above would be easy if all or nothing were accepted."""
    accepted = {
        kind: tiny.generate(8, 0, kind, tree).stats.acceptance_by_depth
        for kind, tree in [("self", "chain4"), ("near", "irregular")]
    }
    for kind, shares in accepted.items():
        assert all(0.05 < share < 0.95 for share in shares), kind


@pytest.mark.parametrize("new_tokens", quick([1, 2, 7], 2))
def test_outputs_shorter_than_a_round_are_exact(new_tokens, tally):
    found = tiny.generate(8, 0, "self", "chain4", max_tokens=new_tokens)
    assert found.tokens.shape == (8, new_tokens)
    wanted = [row[:new_tokens] for row in tiny.expected(8)]
    tally.compare(tiny.model(), tiny.prompts(8), wanted, tiny.rows_of(found))


def test_any_of_several_eos_ends_a_row(tally):
    texts = tiny.expected(8)
    eos = [int(texts[0][3]), int(texts[1][6])]
    found = tiny.generate(8, 0, "self", "chain4", eos_token_id=eos)
    wanted = [oracle.cut(row, eos) for row in texts]
    tally.compare(tiny.model(), tiny.prompts(8), wanted, tiny.rows_of(found))
    assert len({len(row) for row in wanted}) > 2  # rows ended separately


# Negative controls of the comparison itself.


def test_the_comparison_catches_a_wrong_token_a_short_row_and_a_tie_that_is_none():
    prompts, wanted = tiny.prompts(3), tiny.expected(3)
    wrong = [row.copy() for row in wanted]
    wrong[1][5] = (wrong[1][5] + 1) % tiny.VOCAB
    for found in (wrong, [wanted[0], wanted[1][:-1], wanted[2]]):
        with pytest.raises(AssertionError, match="instead of"):
            oracle.Tally().compare(tiny.model(), prompts, wanted, found)


def test_the_comparison_counts_a_tie_but_not_where_none_is_allowed():
    target = tiny.model()
    params = {**target.params["params"]}
    # Two tokens with the same logits: which one is said is a matter of rounding.
    params["unembedding"] = np.array(params["unembedding"])
    prompt, (said, *_) = tiny.prompts(1)[0], tiny.expected(1)[0]
    twin = (int(said) + 1) % tiny.NEVER
    params["unembedding"][twin] = params["unembedding"][said]
    tied = type(target)(target.module, {"params": params})
    rows = np.array([[said, 0]]), np.array([[twin, 5]])
    tally = oracle.Tally()
    tally.compare(tied, [prompt], *rows)
    assert (tally.rows, tally.ties) == (1, 1)
    with pytest.raises(AssertionError, match="margin 0.0e"):
        tally.compare(tied, [prompt], *rows, ties_allowed=False)


def test_the_texts_are_varied_enough_to_tell_a_mistake():
    texts = [row for seed in SEEDS for row in tiny.expected(8, seed)]
    assert np.mean([len(set(row.tolist())) for row in texts]) > tiny.NEW / 3
    assert len({row.tobytes() for row in texts}) == len(texts)
    assert all(tiny.NEVER not in row for row in texts)
