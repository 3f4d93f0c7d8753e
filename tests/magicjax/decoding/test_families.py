"""What depends on the family or the dtype of a model; `test_exactness` compares the texts."""

import numpy as np
import pytest

import magicjax
import models
from tests.magicjax import family_cases, keywords, tiny


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sink_positions": "in_cache"}, "rotates sinks, and some layers of the drafter have no"),
        ({"policy": "expected_attention"}, "rotates queries, and some layers of the model have no"),
    ],
)
def test_what_rotates_queries_or_keys_needs_rotary_positions_in_all_layers(options, message):
    drafter = magicjax.SmallModel(
        family_cases.model("smollm3", tiny.VOCAB),
        **{"policy": "streaming", "budget": 24} | options,
    )
    with pytest.raises(ValueError, match=message):
        keywords.generate(tiny.model(), [[1, 2, 3]], max_tokens=4, drafter=drafter)


def test_a_text_beyond_the_last_learned_position_is_an_error():
    target = family_cases.model("opt", tiny.VOCAB)
    with pytest.raises(ValueError, match="needs 65 positions, and the target has 64"):
        keywords.generate(target, [[1] * 41], max_tokens=tiny.NEW)


def test_a_drafter_in_16_bits_has_a_16_bit_cache():
    options = dict(drafter=tiny.drafter("near", "bfloat16"), tree=tiny.TREES["chain3"])
    of_target, of_draft = keywords.prepare(tiny.model(), tiny.prompts(8), **options).kv_bytes
    assert of_draft * 2 == of_target


@pytest.mark.slow
def test_a_target_in_16_bits_has_16_bit_caches_and_ends_its_rows():
    """Programs of different shapes round differently in 16 bits, so texts are not compared."""
    wide = tiny.generate(8, 0, "self", "chain4").stats
    output = tiny.generate(8, 0, "self", "chain4", dtype="bfloat16")
    assert output.lengths.tolist() == [tiny.NEW] * 8
    assert output.stats.kv_bytes_target * 2 == wide.kv_bytes_target
    config, pinned = tiny.model().config, tiny.drafter("self").sparse.num_pinned
    pins = 8 * config.num_layers * config.num_kv_heads * pinned * 4  # bytes of int32 positions
    assert (output.stats.kv_bytes_draft - pins) * 2 == wide.kv_bytes_draft - pins
    # The first tokens come from prefill, where the dtypes differ only by rounding.
    firsts = [row[0] for row in tiny.expected(8)]
    assert np.mean(output.tokens[:, 0] == firsts) > 0.5
