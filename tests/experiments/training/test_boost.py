"""Boost-tuning: later drafts learn what earlier ones miss, and killed runs end the same."""

import json
import pathlib
import shutil
import types

import jax
import numpy as np
import pytest
import transformers

import magicjax
import models
from experiments.prompts import corpus
from experiments.schema import config
from experiments.training import (
    boost,
    boost_config,
    distill,
    draft_vocab,
    export,
    generated_text,
    trainer,
)

ROOT = pathlib.Path(boost.__file__).parents[2]
RECIPES = pathlib.Path(boost.__file__).parents[1] / "recipes"
TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(12))
SHAPE = dict(
    hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8
)
WINDOW = 32


def write_model(path, tokenizer, vocab_size, seed):
    module = models.build(models.DecoderConfig(vocab_size=vocab_size, max_positions=64, **SHAPE))
    models.save_checkpoint(
        path,
        module,
        models.init_params(module, seed),
        eos_token_ids=(tokenizer.eos_token_id,),
        tokenizer=tokenizer,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a corpus, a random target with a tokenizer, and small models."""
    root = tmp_path_factory.mktemp("boost")
    (root / "corpus").mkdir()
    for i in range(40):
        (root / "corpus" / f"m{i}.py").write_text(TEXT.replace("x", f"x{i % 7}"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=corpus.train_tokenizer(corpus.library(root / "corpus")[:5], 290),
        eos_token=corpus.END,
        pad_token=corpus.END,
    )
    write_model(root / "target", tokenizer, 290, 0)
    write_model(root / "small", tokenizer, 290, 1)
    write_model(root / "stranger", tokenizer, 291, 2)
    return root


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(distill, "CONTEXT", WINDOW)
    monkeypatch.setattr(export, "CONTEXTS", (WINDOW,))


def settings(folder, **changes) -> boost_config.Boosting:
    schedule = dict(
        phases=[{"context": 16, "batch": 2, "steps": 6}],
        learning_rate=0.02,
        warmup=2,
        checkpoint_every=2,
    )
    raw = dict(
        target=str(folder / "target"),
        drafts=2,
        shape=SHAPE,
        text=schedule,
        labels=schedule,
        labelled_tokens=640,
        corpus=str(folder / "corpus"),
    )
    raw = {k: v for k, v in (raw | changes).items() if v is not None}
    return config.validated(boost_config.Boosting, raw, "test")


def drafts_in(out: pathlib.Path) -> list[bytes]:
    return [(out / f"draft-{n}" / "model.safetensors").read_bytes() for n in (1, 2)]


@pytest.fixture(scope="module")
def whole(folder):
    """The folder and the figures of an uninterrupted run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill, "CONTEXT", WINDOW)
        patch.setattr(export, "CONTEXTS", (WINDOW,))
        out = folder / "whole"
        figures = boost.run(settings(folder), out / "work", out, "command")
    return out, figures


class Killed(BaseException):
    """Stands for a kill, which no code catches."""


def kill_at(patch, moment: str, step: int = 0) -> None:
    """Ends a run at a batch of the named training, or when it writes the named result."""
    drawn, train, ranked, export_ = (
        *(trainer.batches, trainer.train),
        *(distill.ranked, export.export),
    )
    trained = []

    def batches(*arguments):
        for count, batch in enumerate(drawn(*arguments)):
            if trained[-1] == moment and count == step:
                raise Killed
            yield batch

    def stop_at(name):
        if name == moment:
            raise Killed

    patch.setattr(trainer, "batches", batches)
    patch.setattr(trainer, "train", lambda *a, **o: trained.append(o["label"]) or train(*a, **o))
    patch.setattr(
        distill, "ranked", lambda *a: stop_at(a[4].stem if a[4] else "figures") or ranked(*a)
    )
    patch.setattr(export, "export", lambda *a, **o: stop_at(a[0].parts[-1]) or export_(*a, **o))


# One moment of each kind: trainings after and before their first checkpoint.
KILLS = [("text", 5), ("labels", 0), ("1-choices", 0), ("2", 1), ("figures", 0)]


@pytest.mark.slow
def test_a_run_killed_many_times_ends_with_the_same_drafts(folder, whole, tmp_path):
    configuration = settings(folder)
    for moment, step in KILLS:
        name = moment if moment in ("labels", "figures") else f"draft-{moment}"
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            kill_at(patch, name, step)
            boost.run(configuration, tmp_path / "work", tmp_path / "out", "command")
    assert not (tmp_path / "out").exists()
    boost.run(configuration, tmp_path / "work", tmp_path / "out", "command")
    first, second = drafts_in(tmp_path / "out")
    assert [first, second] == drafts_in(whole[0])
    assert first != second


def test_each_draft_is_tuned_on_what_earlier_drafts_miss(folder, tmp_path, monkeypatch):
    labels = np.array([5, 6, 7, 8])
    chosen = {"draft-1": [5, 0, 0, 8], "draft-2": [5, 6, 0, 0]}
    seen = []
    monkeypatch.setattr(trainer, "train", lambda *a, **o: seen.append(a[1]) or o["label"])
    monkeypatch.setattr(distill, "choices", lambda module, name, *a: np.array(chosen[name]))
    tokens = np.arange(4)
    _, shares = boost.tune(
        settings(folder, drafts=3), [None] * 3, [None] * 3, tokens, labels, tmp_path
    )
    weights = [stream[:, 2].tolist() for stream in seen]
    assert weights == [[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 1, 0]]
    assert shares == [1, 0.5, 0.25]
    for stream in seen:  # every draft reads the whole text
        np.testing.assert_array_equal(stream[:, :2], np.stack([tokens, labels], 1))


def test_samples_of_weight_zero_have_no_gradient():
    module = models.build(models.DecoderConfig(vocab_size=40, max_positions=64, **SHAPE))
    params = models.init_params(module, 0)
    columns = np.random.default_rng(0).integers(0, 40, (1, 9, 3)).astype(np.int32)
    compiled = jax.jit(jax.grad(lambda p, columns: distill.label_loss(module, p, columns)))

    def gradient(weights, labels):
        columns[0, :, 1], columns[0, :, 2] = labels, weights
        return jax.tree.leaves(compiled(params, columns.copy()))

    weights, labels = np.array([1, 0, 1, 1, 0, 1, 0, 1, 1]), np.arange(9)
    expected = gradient(weights, labels)
    for ours, theirs in zip(gradient(weights, np.where(weights, labels, 30)), expected):
        np.testing.assert_array_equal(ours, theirs)
    others = gradient(weights, np.where(weights, 30, labels))
    assert any((a != b).any() for a, b in zip(others, expected))
    assert not any(g.any() for g in gradient(np.zeros(9, int), labels))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafst": 2}, "drafst: no such key; did you mean 'drafts'?"),
        ({"kept_share": 1.5}, "less than or equal to 1"),
        ({"shape": None}, "the drafts need initial models"),
    ],
)
def test_invalid_settings_are_refused(folder, changes, message):
    with pytest.raises(config.ConfigError) as error:
        settings(folder, **changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labelled_tokens": 10**6}, r"labelled_tokens=1000000 is too large: the text has \d+"),
        (
            {"labels": {"phases": [{"context": 65, "batch": 1, "steps": 1}], "learning_rate": 1}},
            "65 tokens is longer than a draft's max_positions=64",
        ),
        (
            {"start": ["stranger"], "shape": None, "text": None},
            "a vocabulary of 291 tokens, but the target's has 290",
        ),
    ],
)
def test_mismatches_are_refused_before_anything_is_compiled(
    folder, tmp_path, monkeypatch, changes, message
):
    monkeypatch.chdir(folder)
    configuration = settings(folder, **changes)
    for stage in ("begin", "tune"):
        monkeypatch.setattr(boost, stage, None)
    with pytest.raises(config.ConfigError, match=message):
        boost.run(configuration, tmp_path / "work", tmp_path / "out", "command")
    assert not (tmp_path / "work").exists()


TEMPLATE = "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
GENERATED = generated_text.Generated(tokens=1500, batch=16, length=40)


@pytest.fixture(scope="module")
def chat_target(folder):
    """The target with a chat template."""
    shutil.copytree(folder / "target", folder / "chat")
    path = folder / "chat" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder / "chat"


@pytest.fixture(scope="module")
def written(folder, chat_target):
    return generated_text.write(str(chat_target), "float32", GENERATED, folder / "generated")


@pytest.mark.slow
def test_generated_text_is_whole_conversations_from_their_beginning(chat_target, written):
    start = magicjax.load(chat_target).tokenizer("<s>user: ")["input_ids"]
    rows = np.concatenate([written.held_out, written.train]).reshape(48, len(start) + 40)
    assert (rows[:, : len(start)] == start).all()
    assert len(np.unique(rows, axis=0)) == 48  # no batch repeats another
    assert written.held_out.size == rows.size // generated_text.HELD_OUT_EVERY


def test_generated_text_begins_with_a_chat_template_or_after_a_document(folder):
    tokenizer = magicjax.load(folder / "target").tokenizer
    assert generated_text.beginning(tokenizer) == [tokenizer.eos_token_id]
    with pytest.raises(config.ConfigError, match="needs a target with a chat template or an end"):
        generated_text.beginning(types.SimpleNamespace())


@pytest.mark.slow
def test_a_draft_with_a_vocabulary_is_trained_on_generated_text(
    folder, chat_target, written, tmp_path
):
    shutil.copytree(folder / "generated", tmp_path / "work" / "generated")
    changes = dict(target=str(chat_target), drafts=1, corpus=None, labelled_tokens=1024)
    changes |= dict(generated=GENERATED.model_dump(), shape=SHAPE | {"draft_vocab_size": 32})
    short = {"phases": [{"context": 16, "batch": 2, "steps": 2}], "learning_rate": 0.02}
    changes |= dict(text=short, labels=short)
    boost.run(settings(folder, **changes), tmp_path / "work", tmp_path / "out", "command")
    assert "Held-out loss" not in (tmp_path / "out" / "draft-1" / "README.md").read_text()
    draft = models.load_checkpoint(tmp_path / "out" / "draft-1", "float32")
    assert (draft.config.vocab_size, draft.config.draft_vocab_size) == (290, 32)
    wanted = draft_vocab.make_map(written.train, 290, 32)
    np.testing.assert_array_equal(draft.params["params"]["vocab_map"], wanted)
    # The expanded model, for other libraries, predicts the same tokens with an own embedding.
    tokens = np.arange(32, dtype=np.int32)[None]
    own = np.flatnonzero(wanted < 31)
    ours = trainer.logits_of(draft.module, draft.params, tokens)[..., own]
    whole = trainer.logits_of(*draft_vocab.expanded(draft.module, draft.params), tokens)
    np.testing.assert_allclose(whole[..., own], ours, rtol=1e-5, atol=1e-5)
    assert not whole[..., np.flatnonzero(wanted == 31)].any()
    with pytest.raises(config.ConfigError, match="has a draft vocabulary"):
        boost.prepare(
            settings(folder, start=str(tmp_path / "out" / "draft-1"), shape=None, text=None),
            tmp_path,
        )


@pytest.mark.slow
def test_a_work_folder_of_other_settings_is_refused(folder, whole):
    with pytest.raises(config.ConfigError, match="holds stages of other settings"):
        boost.run(settings(folder, labelled_tokens=320), whole[0] / "work", whole[0], "command")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*_drafts.yaml")), ids=lambda p: p.name)
def test_recipes_of_drafts_are_valid(path):
    assert boost_config.read(path).drafts in (1, 2)
