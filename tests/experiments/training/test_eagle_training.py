"""The trainer of heads records text as it was read, drafts in training, and survives kills."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

import magicjax
import models
from experiments.prompts import corpus
from experiments.schema.fields import ConfigError
from experiments.training import eagle, eagle_loss, recording, trainer
from tests.experiments.training import test_boost
from tests.magicjax import oracle, tiny
from tests.models.conftest import GOLDEN
from tests.quick import quick

GENERATED = dict(tokens=700, batch=16, length=20)
SCHEDULE = dict(
    phases=[{"context": 12, "batch": 2, "steps": 5}],
    learning_rate=0.02,
    warmup=2,
    checkpoint_every=2,
)
HEAD = dict(draft_vocab_size=40, layer_inputs=(0, 1, 1))
LAYERS = 0, 1, 1, 1
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
SIZES += ("num_kv_heads", "head_dim", "max_positions", "target_hidden_size")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random target whose tokenizer has a chat template."""
    root = tmp_path_factory.mktemp("eagle")
    (root / "corpus").mkdir()
    for i in range(6):
        (root / "corpus" / f"m{i}.py").write_text(test_boost.TEXT.replace("x", f"x{i}"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=corpus.train_tokenizer(corpus.library(root / "corpus")[:5], 290),
        eos_token=corpus.END,
        pad_token=corpus.END,
    )
    test_boost.write_model(root / "target", tokenizer, 290, 0)
    path = root / "target" / "tokenizer_config.json"
    written = json.loads(path.read_text()) | {"chat_template": test_boost.TEMPLATE}
    path.write_text(json.dumps(written))
    return root / "target"


def recipe(target, **changes) -> eagle.EagleRecipe:
    raw = dict(target=str(target), dtype="float32", generated=GENERATED, head=HEAD, steps=3)
    return eagle.EagleRecipe(**raw | dict(cross_entropy=SCHEDULE, overlap=SCHEDULE) | changes)


@pytest.fixture(scope="module")
def rows(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    settings = recipe(target).generated
    return recording.write(str(target), "float32", (0, 1), settings, folder)


def test_hidden_states_are_those_of_a_pass_over_the_text(target, rows):
    model = magicjax.load(target, dtype="float32")
    tokens = recording.tokens_of(rows)
    assert len(np.unique(tokens, axis=0)) == len(rows) == 48
    start = model.tokenizer("<s>user: ")["input_ids"]
    assert (tokens[:, : len(start)] == start).all() and tokens.shape[1] == len(start) + 19
    found, hidden = recording.unpacked(jnp.asarray(rows[:3]), 2)
    np.testing.assert_array_equal(found, tokens[:3])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), found.shape)
    attend = models.in_every_layer(trainer.causal_attention)
    _, _, inputs = model.module.apply(model.params, found, positions, attend, (0, 1))
    for i, expected in inputs.items():
        rounded = expected.astype(jnp.bfloat16).astype(jnp.float32)
        np.testing.assert_allclose(hidden[:, :, i], rounded, rtol=0.01, atol=1e-3)
    # The text is what the target chose: its own log-probabilities are far above chance.
    logits = oracle.logits(model, tokens[0].tolist())
    assert np.isfinite(logits).all()


def parts_of_loss(target, head=None):
    """Returns the loss, the head's module and parameters, and what is frozen."""
    checkpoint = models.load_checkpoint(target, "float32")
    config = eagle.head_config(head or eagle.HeadShape(**HEAD), checkpoint.config)
    size = config.output_rows
    tokens = np.sort(np.random.default_rng(0).permutation(290)[:size])
    vocab_map = np.full(290, size, np.int32)
    vocab_map[tokens] = np.arange(size)
    frozen = eagle_loss.frozen_of(jnp.asarray(vocab_map), checkpoint, jnp.asarray(tokens))
    loss = eagle_loss.HeadLoss(*eagle_loss.modules_of(checkpoint, size), 3, 0.8, windows=False)
    head = models.build(eagle.dataclasses.replace(config, own_unembedding=True))
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), tiny.drawn(head.config, 1))
    return loss, head, eagle._without_frozen(params), frozen


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "gpt_oss", "mixtral", "gpt2"])
def test_a_head_has_the_sizes_of_its_target_and_no_other_setting(case):
    target = models.load_config(GOLDEN / case)
    config = eagle.head_config(eagle.HeadShape(**HEAD), target)
    assert config.hidden_size == config.target_hidden_size == target.hidden_size
    assert config.intermediate_size == target.intermediate_size * max(target.experts_per_token, 1)
    defaults = models.EagleConfig(**{field: getattr(config, field) for field in SIZES})
    changed = dict(draft_vocab_size=40, layer_inputs=(0, 1, 1), positions=config.positions)
    changed |= dict(norm_eps=target.norm_eps, own_unembedding=False, family="llama")
    assert config == dataclasses.replace(defaults, **changed, tie_embeddings=False)
    assert config.rope == (target.rope or models.Rope())


@pytest.mark.parametrize("kind", quick([None, "mtp"], None))
def test_steps_of_the_loss_are_drafts_from_every_position(kind, target, rows):
    """Each logit equals that of a draft of one position, with explicit lists of keys and values."""
    loss, head, params, frozen = parts_of_loss(target, kind)
    first, last = rows[:2, :14, 2:18], rows[:2, :14, 18:]
    hidden = [last] if kind == "mtp" else [first, last, last, last]
    windows = np.concatenate([rows[:2, :14, :2], *hidden], -1)
    steps = jax.jit(lambda *arguments: list(loss._steps(head, *arguments)))(params, windows, frozen)
    inner = {"params": params["params"] | {k: frozen[k] for k in eagle_loss.OF_TARGET}}
    tokens, hidden = recording.unpacked(jnp.asarray(windows[:1]), len(hidden))
    inputs = [hidden[:, :, i] for i in range(head.config.num_features)]
    features = head.apply(inner, inputs, method="fuse")

    def embed(position):
        read = tokens[:, position : position + 1]
        return loss.embedder.apply(frozen["embedder"], read, read, method="embed")

    def drafted(position):
        """Yields the logits of the drafts that begin after a position."""
        keys, values = [], []
        for slot in range(position):
            at = jnp.array([[slot + 1]])
            arguments = embed(slot + 1), features[:, slot : slot + 1], at
            k, v = head.apply(inner, *arguments, method="keys_values")
            keys.append(k)
            values.append(v)

        def attention(q, k, v):
            keys.append(k)
            values.append(v)
            whole = [
                np.repeat(np.concatenate(x, 1), q.shape[2] // k.shape[2], 2) for x in (keys, values)
            ]
            scores = np.einsum("bthd,bshd->bhts", q, whole[0]) * q.shape[-1] ** -0.5
            p = np.exp(scores - scores.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            return jnp.asarray(np.einsum("bhts,bshd->bthd", p, whole[1])), None

        attend = models.in_every_layer(attention)
        feature = features[:, position : position + 1]
        for step in range(3):
            at = jnp.array([[position + 1 + step]])
            feature, _ = head.apply(
                inner, embed(position + 1 + step), feature, at, attend, method="decode"
            )
            yield head.apply(inner, feature, method="draft_logits")[0, 0]

    for position in (0, 4, 9):
        for (logits, _, _), expected in zip(steps, drafted(position), strict=True):
            np.testing.assert_allclose(logits[0, position], expected, rtol=1e-4, atol=1e-4)


def test_a_head_is_written_with_the_output_rows_of_the_target_if_asked(target, tmp_path):
    _, head, params, frozen = parts_of_loss(target)
    found = {"same token": [0.5] * 3}
    eagle.save(tmp_path, head.config, params, frozen, found, recipe(target))
    read = magicjax.load(tmp_path, dtype="float32")
    assert read.config.own_unembedding and read.config.acceptance == 0.5
    rounded = frozen["unembedding"].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(read.params["params"]["unembedding"], rounded)


def test_rows_that_see_few_tokens_have_other_losses(target, rows):
    loss, head, params, frozen = parts_of_loss(target)
    whole = eagle_loss._Attend(jnp.array([99, 99]))
    few = eagle_loss._Attend(jnp.array([99, 3]))
    q = jax.random.normal(jax.random.key(0), (2, 9, 2, 8))
    (one, _), (two, _) = whole(q, q, q), few(q, q, q)
    np.testing.assert_allclose(one[0], two[0], rtol=1e-5)
    np.testing.assert_allclose(one[1, :3], two[1, :3], rtol=1e-5)
    assert np.abs(one[1, 3:] - two[1, 3:]).max() > 0.01


@pytest.mark.slow
def test_a_run_that_is_killed_twice_writes_the_same_head(target, tmp_path, monkeypatch):
    eagle.train(recipe(target), tmp_path / "whole", tmp_path / "head")
    batch, drawn, seen = recording._batch, trainer.batches, []

    def killed_in_the_second_batch(*arguments):
        if arguments[-1] == 1:
            raise KeyboardInterrupt
        return batch(*arguments)

    def killed_at_the_fourth_step(*arguments):
        for count, windows in enumerate(drawn(*arguments)):
            if count == 3:
                raise KeyboardInterrupt
            yield windows

    for module, name, killed in (
        (recording, "_batch", killed_in_the_second_batch),
        (trainer, "batches", killed_at_the_fourth_step),
    ):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, name, killed)
            eagle.train(recipe(target), tmp_path / "killed", tmp_path / "again")
    monkeypatch.setattr(recording, "_batch", lambda *a: seen.append(a[-1]) or batch(*a))
    found = eagle.train(recipe(target), tmp_path / "killed", tmp_path / "again")
    assert seen == []  # the text was complete
    one, two = (tmp_path / name / "model.safetensors" for name in ("head", "again"))
    assert one.read_bytes() == two.read_bytes()
    assert len(found["same token"]) == 3
    head = magicjax.load(tmp_path / "head", dtype="float32")
    assert head.config.draft_vocab_size == 40 and not head.config.own_unembedding
    model = magicjax.load(target, dtype="float32")
    drafter = magicjax.Eagle(head, check_agreement=False)
    params = magicjax.SamplingParams(max_tokens=12)
    out = magicjax.generate(
        model, ["def f"], params, drafter=drafter, tree="expansion:2,2,1", eos_token_id=[]
    )
    plain = magicjax.generate(model, ["def f"], params, eos_token_id=[])
    assert out.texts == plain.texts


@pytest.mark.slow
def test_a_head_for_multi_token_prediction_is_trained_and_drafts(target, tmp_path):
    """Its layer is the target's, and what it reads of the target is not trained."""
    short = SCHEDULE | dict(phases=[{"context": 12, "batch": 2, "steps": 2}])
    made = recipe(target, head="mtp", steps=2, cross_entropy=short, overlap=None)
    eagle.train(made, tmp_path / "work", tmp_path / "head")
    model, head = (magicjax.load(x, dtype="float32") for x in (target, tmp_path / "head"))
    assert head.config == models.MtpConfig.of_target(model.config)
    norms = (x.params["params"][n]["scale"] for x, n in ((head, "target_norm"), (model, "norm")))
    np.testing.assert_array_equal(*norms)
    options = dict(tree="chain:3", eos_token_id=[])
    options["drafter"] = f"mtp:{tmp_path / 'head'}:check_agreement=false"
    params = magicjax.SamplingParams(max_tokens=12)
    out = magicjax.generate(model, ["def f"], params, **options)
    assert out.texts == magicjax.generate(model, ["def f"], params, eos_token_id=[]).texts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(head=HEAD | dict(num_heads=3, num_kv_heads=2)), "not a multiple of num_kv_heads=2"),
        (dict(head=HEAD | dict(draft_vocab_size=400)), "draft_vocab_size=400 must be at least 2"),
    ],
)
def test_heads_that_do_not_fit_are_refused(target, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        eagle.train(recipe(target, **changes), tmp_path / "work", tmp_path / "out")
    assert not (tmp_path / "work").exists()
