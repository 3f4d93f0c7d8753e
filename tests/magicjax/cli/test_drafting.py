"""The drafter of an engine if none is given."""

import argparse

import pytest

from magicjax import downloads
from magicjax.cli import drafting
from magicjax.downloads import DOWNLOADS
from magicjax.drafters.spec import parse, parse_trees
from pallas_kernels.cpu import build


@pytest.fixture
def fetched(tmp_path, monkeypatch):
    """Makes the directories of some models."""
    directory = property(lambda self: tmp_path / self.name)
    monkeypatch.setattr(downloads.Download, "directory", directory)

    def make(*names):
        for name in names:
            (tmp_path / name).mkdir()

    return make


def default(target: str, **options) -> str:
    return drafting.default_drafter(
        argparse.Namespace(
            **dict(target=target, activations="int8", mesh=None, tokenizer=None) | options
        )
    )


def test_a_draft_model_that_is_downloaded_drafts(fetched):
    assert default("qwen2.5-coder-1.5b") == drafting.SERVED
    fetched("qwen2.5-coder-0.5b")
    packed = ":weights=Q4_0" * build.is_default()
    assert default("qwen2.5-coder-1.5b") == f"small:qwen2.5-coder-0.5b{packed}:draft_vocab=32000"
    options = dict(drafter=[], tree=[], no_adaptive=False, verifier=None)
    options |= dict(target="qwen2.5-coder-1.5b", activations="int8", mesh=None, tokenizer=None)
    own = parse_trees("chain:2")
    for asked, tree in (([], parse_trees(drafting.DRAFT_TREE)), ([own], own)):
        arguments = argparse.Namespace(**options | dict(tree=asked))
        drafter, found = drafting.engine_speculation(arguments, False, "without --temperature")
        assert drafter.text == default("qwen2.5-coder-1.5b") and found == tree
    plain = default("qwen2.5-coder-1.5b", activations="float")
    assert plain == "small:qwen2.5-coder-0.5b:draft_vocab=32000"
    for options in (dict(mesh="data=2"), dict(tokenizer="a"), dict(target="smollm2")):
        assert default(**dict(target="qwen2.5-coder-1.5b") | options) == drafting.SERVED


def test_an_adaptive_engine_refuses_trees_that_end_early():
    drafter, tree = [parse("prompt-lookup")], [parse_trees("dynamic:6,5,2,0.6")]
    options = dict(drafter=drafter, tree=tree, no_adaptive=False)
    message = "--tree dynamic:6,5,2,0.6 has min_prob, .* add --no-adaptive"
    with pytest.raises(ValueError, match=message):
        drafting.engine_speculation(argparse.Namespace(**options), False, "without --temperature")


def test_draft_models_are_downloads():
    drafts = {each.draft for each in DOWNLOADS.values() if each.draft}
    assert drafts and drafts <= DOWNLOADS.keys()
