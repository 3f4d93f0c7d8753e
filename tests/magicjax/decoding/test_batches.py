"""Rows are independent, streaming equals the compiled loop, and programs are shared."""

import dataclasses

import numpy as np
import pytest

from magicjax.decoding import program_cache
from tests.magicjax import keywords, oracle, tiny

COUNTED = (
    "tau",
    "acceptance_rate",
    "acceptance_by_depth",
    "target_passes",
    "rounds",
    "emitted",
    "drafted",
    "accepted",
    "kv_bytes_target",
    "kv_bytes_draft",
    "attention_backend",
)
LENGTHS = (17, 30, 23, 20, 18, 29, 31, 32)  # all padded to 32 tokens


def rows_alike_in_width() -> list[np.ndarray]:
    rng = np.random.default_rng(11)
    return [rng.integers(0, tiny.VOCAB, n).astype(np.int32) for n in LENGTHS]


def generate(prompts, kind, tree, **options):
    drafted = dict(drafter=tiny.drafter(kind), tree=tiny.TREES[tree]) if kind else {}
    defaults = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER)
    return keywords.generate(tiny.model(), prompts, **defaults | drafted | options)


def test_a_batch_equals_its_rows_one_by_one():
    prompts = rows_alike_in_width()
    batched = generate(prompts, "self", "chain4")
    alone = [generate([prompt], "self", "chain4") for prompt in prompts]
    for row, single in zip(tiny.rows_of(batched), alone, strict=True):
        np.testing.assert_array_equal(row, tiny.rows_of(single)[0])
    for count in ("target_passes", "emitted", "accepted", "drafted"):
        assert getattr(batched.stats, count) == sum(getattr(o.stats, count) for o in alone)


def test_streaming_has_the_statistics_of_the_compiled_loop():
    drafted = dict(drafter=tiny.drafter("self"), tree=tiny.TREES["chain4"])
    options = dict(max_tokens=tiny.NEW, eos_token_id=int(tiny.expected(8)[2][7])) | drafted
    output = keywords.generate(tiny.model(), tiny.prompts(8), **options)
    rounds = keywords.stream(tiny.model(), tiny.prompts(8), **options)
    assert [len(part) for part in next(rounds)] == [1] * 8  # of prefill, before any round
    with pytest.raises(StopIteration) as end:
        while True:
            next(rounds)
    for field in COUNTED:
        assert getattr(end.value.value.stats, field) == getattr(output.stats, field)


def test_a_second_call_of_the_same_shapes_compiles_nothing():
    generate(tiny.prompts(8), "self", "chain4")
    again = generate(tiny.prompts(8, seed=2), "self", "chain4", eos_token_id=3)
    assert (again.stats.compilations, again.stats.compile_s) == (0, 0.0)
    limits = list(range(tiny.NEW - 7, tiny.NEW + 1))
    assert generate(tiny.prompts(8), "self", "chain4", max_tokens=limits).stats.compile_s == 0
    # Weights are no part of a program.
    other = tiny.model("near")
    before = program_cache.totals()
    keywords.generate(
        other,
        tiny.prompts(8),
        drafter=tiny.drafter("self"),
        tree=tiny.TREES["chain4"],
        max_tokens=tiny.NEW,
        eos_token_id=tiny.NEVER,
    )
    assert program_cache.totals() == before


def test_another_tree_is_counted_as_compiled_but_not_the_targets_prefill():
    generate(tiny.prompts(8), "self", "chain4")
    output = generate(tiny.prompts(8), "self", "chain4", max_tokens=tiny.NEW - 1)
    assert output.stats.compilations == 2 and output.stats.compile_s > 0


def test_the_output_has_prompts_new_tokens_and_padding():
    eos, prompts = int(tiny.expected(8)[0][4]), tiny.prompts(8)
    output = generate(prompts, "self", "chain4", eos_token_id=eos, pad_token_id=9)
    for i, prompt in enumerate(prompts):
        new = oracle.cut(tiny.expected(8)[i], eos)
        assert output.lengths[i] == len(new)
        np.testing.assert_array_equal(output.sequences[i], np.concatenate([prompt, new]))
        np.testing.assert_array_equal(output.tokens[i, len(new) :], 9)
    assert output.texts is None  # this target has no tokenizer
    padded = generate(prompts, "self", "chain4", eos_token_id=eos)
    assert padded.tokens[0, output.lengths[0]] == eos  # without a pad token, the EOS pads


def test_eos_and_padding_default_to_those_of_the_target():
    eos = int(tiny.expected(8)[0][4])
    target = dataclasses.replace(tiny.model(), eos_token_ids=(eos,), pad_token_id=7)
    output = keywords.generate(target, tiny.prompts(8), max_tokens=tiny.NEW)
    texts = [oracle.cut(row, eos) for row in tiny.expected(8)]
    for row, expected in zip(output.tokens, texts, strict=True):
        np.testing.assert_array_equal(row[: len(expected)], expected)
        np.testing.assert_array_equal(row[len(expected) :], 7)
