"""The loop is independent of family and dtype: every family, 16 bits, a drafter of another."""

import itertools

import numpy as np
import pytest

import magicjax
import models
from tests.magicjax import family_cases, keywords, tiny
from tests.magicjax.recomputation import rerun
from tests.quick import quick

OPTIONS = dict(max_tokens=tiny.NEW, eos_token_id=[])


def family(kind: str, noise: float = 0.0) -> magicjax.Model:
    return family_cases.model(kind, tiny.VOCAB, noise)


def draftings(kind: str) -> dict[str, dict]:
    """Returns options of `generate` for each kind of drafter and tree."""
    near = family(kind, 0.05)
    return {
        "plain": {},
        "streaming": dict(drafter=tiny.drafter("self"), tree=tiny.TREES["2,2,1"]),
        "snapkv": dict(drafter=magicjax.SelfSpeculation("snapkv", budget=24, refresh_every=2)),
        "tova": dict(drafter=magicjax.SelfSpeculation("tova", budget=24), tree=tiny.TREES["2,2,1"]),
        "near": dict(drafter=magicjax.SmallModel(near), tree=tiny.TREES["irregular"]),
        "near sparse": dict(drafter=magicjax.SmallModel(near, policy="streaming", budget=32)),
        "prompt-lookup": dict(drafter=tiny.drafter("prompt-lookup"), tree=tiny.TREES["chain4"]),
        "dynamic": dict(drafter=tiny.drafter("self"), tree=tiny.SPECIAL["dynamic"]),
    }


# All layers of Mistral have a window, and only the newest entries of those are drafted with.
ALL = [
    (kind, drafting)
    for kind, drafting in itertools.product(family_cases.KINDS, draftings("opt"))
    if kind != "mistral" or drafting not in ("snapkv", "tova")
]


@pytest.mark.parametrize(
    ("kind", "drafting"), quick(ALL, ("mpt", "near"), ("gpt-oss", "prompt-lookup"))
)
def test_a_family_equals_full_recomputation(kind, drafting):
    options = draftings(kind)[drafting]
    output = keywords.generate(family(kind), tiny.prompts(8), **OPTIONS, **options)
    found = tiny.rows_of(output)
    expected = rerun(family(kind), tiny.prompts(8), tiny.NEW, guess=found)
    assert len({row.tobytes() for row in expected}) == 8
    for row, text in zip(found, expected, strict=True):
        np.testing.assert_array_equal(row, text)
    if drafting not in ("plain", "prompt-lookup"):
        assert 0.02 < output.stats.acceptance_rate <= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", family_cases.KINDS)
def test_an_offloaded_family_has_the_text_of_the_resident_one(kind):
    options = OPTIONS | draftings(kind)["streaming"]
    resident = keywords.generate(family(kind), tiny.prompts(3), **options)
    offloaded = keywords.generate(magicjax.offload(family(kind)), tiny.prompts(3), **options)
    np.testing.assert_array_equal(offloaded.tokens, resident.tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sink_positions": "in_cache"}, "needs a drafter with rotary positions"),
        ({"kv_dtype": "int8"}, "kv_dtype='int8' rounds the positions that cached keys have"),
        ({"policy": "keydiff"}, "policy=KeyDiff.* compares keys, which have positions with ALiBi"),
        ({"policy": "knorm"}, "policy=KNorm.* compares keys"),
        ({"policy": "expected_attention"}, "policy=ExpectedAttention.* compares keys"),
    ],
)
def test_caches_that_cannot_have_positions_in_keys_are_errors(options, message):
    config = models.family_config(**family_cases.KINDS["mpt"] | family_cases.SIZES, vocab_size=48)
    target = magicjax.Model(models.build(config), tiny.model().params)  # its values are not read
    drafter = magicjax.SmallModel(target, **{"policy": "streaming", "budget": 24} | options)
    with pytest.raises(ValueError, match=message):
        keywords.generate(tiny.model(), [[1, 2, 3]], max_tokens=4, drafter=drafter)


@pytest.mark.slow
def test_a_text_up_to_the_last_learned_position_is_exact():
    prompts = [np.arange(40) % tiny.VOCAB, np.arange(3)]
    expected = rerun(family("opt"), prompts, tiny.NEW)
    for drafting in (
        {},
        dict(drafter=magicjax.SmallModel(family("opt", 0.05)), tree=tiny.TREES["irregular"]),
        dict(drafter=tiny.drafter("self"), tree=tiny.TREES["chain8"]),
    ):
        output = keywords.generate(family("opt"), prompts, **OPTIONS, **drafting)
        for row, text in zip(tiny.rows_of(output), expected, strict=True):
            np.testing.assert_array_equal(row, text)
    with pytest.raises(ValueError, match="needs 65 positions, and the target has 64"):
        keywords.generate(family("opt"), [[1] * 41], **OPTIONS)


@pytest.mark.slow
def test_a_drafter_in_16_bits_keeps_a_float32_text_exact():
    drafter = tiny.drafter("near", "bfloat16")
    tree = tiny.TREES["chain3"]
    output = keywords.generate(tiny.model(), tiny.prompts(8), drafter=drafter, tree=tree, **OPTIONS)
    for row, expected in zip(tiny.rows_of(output), tiny.expected(8), strict=True):
        np.testing.assert_array_equal(row, expected)
    assert output.stats.acceptance_rate > 0.05
    assert output.stats.kv_bytes_draft * 2 == output.stats.kv_bytes_target


@pytest.mark.slow
def test_a_target_in_16_bits_has_16_bit_caches_and_ends_its_rows():
    """Programs of different shapes round differently in 16 bits, so texts are not compared."""
    wide = tiny.generate(8, 0, "self", "chain4").stats
    output = tiny.generate(8, 0, "self", "chain4", dtype="bfloat16")
    assert output.lengths.tolist() == [tiny.NEW] * 8
    assert output.stats.kv_bytes_target * 2 == wide.kv_bytes_target
    assert output.stats.kv_bytes_draft * 2 == wide.kv_bytes_draft
    # The first tokens come from prefill, where the dtypes differ only by rounding.
    firsts = [row[0] for row in tiny.expected(8)]
    assert np.mean(output.tokens[:, 0] == firsts) > 0.5
