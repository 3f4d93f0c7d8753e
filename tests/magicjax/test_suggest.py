"""Hints name a known name for a misspelling, and nothing for an unrelated name."""

import pytest

from magicjax.suggest import did_you_mean

OPTIONS = ("--target", "--tree", "--top-k", "--top-p", "--seed", "--drafter", "--max-tokens")
POLICIES = ("streaming", "snapkv", "h2o", "keydiff", "full")


@pytest.mark.parametrize(
    ("name", "known", "nearest"),
    [
        ("--taget", OPTIONS, "--target"),
        ("--max_new_tokens", OPTIONS, "--max-tokens"),
        ("sanpkv", POLICIES, "snapkv"),
    ],
)
def test_a_misspelling_names_the_nearest(name, known, nearest):
    assert did_you_mean(name, known) == f"; did you mean {nearest!r}?"


@pytest.mark.parametrize(
    ("name", "known"), [("--timeout", OPTIONS), ("tova", POLICIES), ("gptj", ("opt", "qwen"))]
)
def test_an_unrelated_name_has_no_hint(name, known):
    assert did_you_mean(name, known) == ""
