"""Presets have the published sizes, and run with random weights."""

import dataclasses

import numpy as np
import pytest

import models

# Parameters as their publishers count them; tied output matrices once.
PUBLISHED = {
    "llama-68m": 68_030_208,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-7b-32k": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "smollm3-3b": 3_075_098_624,
    "olmo-2-1b": 1_484_916_736,
    "olmo-3-7b": 7_298_011_136,
    "granite-3.3-2b": 2_533_539_840,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "gpt2": 124_439_808,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "mpt-7b": 6_649_286_656,
    "starcoder": 15_517_456_384,
    "starcoder2-3b": 3_030_371_328,
    "phi-3-mini": 3_821_079_552,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name):
    assert models.count_params(models.preset(name)) == PUBLISHED[name]


@pytest.mark.parametrize(
    "wrong, near",
    [("llama-3-8b", "llama-3.1-8b"), ("opt-120m", "opt-125m"), ("mistral", "mistral-7b-v0.3")],
)
def test_an_unknown_name_is_an_error_that_names_the_nearest(wrong, near):
    with pytest.raises(
        ValueError, match=f"preset '{wrong}' does not exist: the nearest is '{near}"
    ):
        models.preset(wrong)


@pytest.mark.slow
def test_a_preset_runs_with_random_weights(logits_of):
    config = dataclasses.replace(models.preset("llama-68m"), num_layers=1, vocab_size=500)
    module = models.build(config, "bfloat16")
    logits = logits_of(module, models.init_params(module), np.zeros((1, 3), np.int32))
    assert logits.shape == (1, 3, 500)
    assert np.isfinite(np.asarray(logits)).all()
