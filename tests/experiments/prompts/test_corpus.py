"""The corpus: whole modules are held out, and tokenization is lossless."""

import pathlib

import numpy as np
import pytest

from experiments.prompts import corpus
from experiments.prompts.corpus import Module
from experiments.training import eagle, make_zoo

RECIPES = pathlib.Path(make_zoo.__file__).parents[1] / "recipes"


@pytest.fixture(scope="module")
def modules():
    return corpus.library()


def test_no_module_is_both_trained_on_and_held_out(modules):
    trained_on, held_out = corpus.split(modules)
    assert {m.path for m in trained_on}.isdisjoint(m.path for m in held_out)
    assert len(trained_on) + len(held_out) == len(modules)
    assert 0.02 < len(held_out) / len(modules) < 0.12


def test_tokenization_is_lossless_and_modules_are_separated(modules):
    few = [*modules[:20], Module("odd.py", "é\t'''\r\n\x00 漢")]
    tokenizer = corpus.train_tokenizer(few, 512)
    assert tokenizer.get_vocab_size() == 512
    stream = corpus.encode(tokenizer, few)
    end = tokenizer.token_to_id(corpus.END)
    parts = np.split(stream, np.flatnonzero(stream == end) + 1)[:-1]
    assert [tokenizer.decode(p[:-1].tolist()) for p in parts] == [m.text for m in few]


@pytest.mark.parametrize("path", sorted(RECIPES.glob("?pu.yaml")), ids=lambda p: p.name)
def test_recipes_are_valid(path):
    recipe = make_zoo.read_recipe(path)
    assert recipe.target_schedule.phases[-1].context >= 8192
    assert recipe.target.num_heads == recipe.target.num_kv_heads  # G = 1


def test_a_recipe_of_a_target_with_gated_delta_nets_has_no_drafts():
    recipe = make_zoo.read_recipe(RECIPES / "cpu_hybrid.yaml")
    assert recipe.target.linear == (True, True, True, False) and recipe.drafts is None
    assert recipe.target.attention_gate and recipe.target.norm == "rms_plus_one"  # of the family
    head = eagle.read(RECIPES / "cpu_hybrid_mtp.yaml").head
    assert eagle.head_config(head, recipe.target).own_unembedding is False


def test_an_unknown_key_of_a_recipe_is_an_error(tmp_path):
    text = (RECIPES / "cpu.yaml").read_text()
    drafts = "cpu_drafts.yaml"  # referenced by the recipe
    (tmp_path / drafts).write_text((RECIPES / drafts).read_text())
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(text + "no_such_key: 1\n")
    with pytest.raises(TypeError, match="no_such_key"):
        make_zoo.read_recipe(wrong)
