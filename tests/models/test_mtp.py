"""Heads for multi-token prediction draft what the reference in `mtp_reference.py` drafts."""

import dataclasses
import functools
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import magicjax
import models
from magicjax import loading
from magicjax.kv_cache import full_cache
from magicjax.kv_cache.model_stats import ModelStats
from magicjax.settings import Settings
from models import hf_parameters
from models.eagle_checkpoints import tensors_of
from models.hf_config import text_decoder
from tests.models import mtp_reference
from tests.models.conftest import GOLDEN
from tests.models.mtp_reference import Reference
from tests.models.published_configs import PUBLISHED
from tests.quick import quick

CASES = ("qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_next")
QUICK = ("qwen3_5", "qwen3_next")
TOLERANCE = 2e-5  # of the largest logit
TEXT, STEPS = 9, 4
CONTROLS = ("hidden_first", "raw_hidden", "raw_output")


@dataclasses.dataclass(frozen=True)
class Stored:
    """A golden model with a random head beside it."""

    path: pathlib.Path
    config: dict
    tensors: dict


def config_of(case: str) -> dict:
    return json.loads((GOLDEN / case / "config.json").read_text())


def write(folder: pathlib.Path, case: str, head: dict) -> Stored:
    """Writes a golden model with a head's tensors in a file of their own, as they are published."""
    shutil.copytree(GOLDEN / case, folder)
    safetensors.numpy.save_file(head, folder / "mtp.safetensors")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    files = dict.fromkeys(tensors, "model.safetensors") | dict.fromkeys(head, "mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return Stored(folder, config_of(case), tensors | head)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Returns a function that returns a case's directory."""

    @functools.cache
    def of(case: str) -> Stored:
        head = mtp_reference.drawn(config_of(case), 1)
        return write(tmp_path_factory.mktemp("mtp") / case, case, head)

    return of


def text_of(case: str) -> tuple[list[int], np.ndarray]:
    """Returns tokens of a text, and random hidden states of the target at all but the last."""
    config, rng = config_of(case), np.random.default_rng(2)
    hidden = 3 * rng.standard_normal((TEXT - 1, config["hidden_size"]))
    return rng.integers(3, config["vocab_size"], TEXT).tolist(), hidden.astype(np.float32)


def loaded(path) -> tuple[magicjax.Model, magicjax.MTP]:
    """Returns a target, and the drafter that is its own head."""
    target = magicjax.load(path, "float32")
    drafter = magicjax.MTP(check_agreement=False)
    drafter.check(target, magicjax.chain(2), 2, 16)
    drafter = loading.with_weights(drafter.for_target(dataclasses.replace(target, params=None)))
    return target, drafter.for_target(target)


def logits_of(target, drafter, text, hidden, attend) -> np.ndarray:
    """Returns the logits of a chain of drafts, by passes over the whole text."""
    apply = functools.partial(drafter.model.module.apply, drafter.model.params)

    @jax.jit
    def run(tokens, features):
        positions = jnp.arange(tokens.shape[1])[None]
        x = target.embed(tokens, positions)
        out, _ = apply(x, features, positions, attend, method="decode")
        return out, apply(out, method="unembed")

    features = np.asarray(apply([hidden[None]], method="fuse"))
    features = np.pad(features, ((0, 0), (0, STEPS), (0, 0)))  # so that all passes are one program
    tokens, found = np.zeros(TEXT - 1 + STEPS, np.int32), []
    tokens[: TEXT - 1] = text[1:]
    for last in range(TEXT - 2, TEXT - 2 + STEPS):
        out, logits = map(np.asarray, run(tokens[None], features))
        found.append(logits[0, last])
        features[:, last + 1] = out[:, last]
        tokens[last + 1] = logits[0, last].argmax()
    return np.stack(found)


@pytest.mark.parametrize("case", quick(CASES, *QUICK))
def test_logits_of_a_chain_are_those_of_the_reference(case, stored, attend_causally):
    """Other wirings are far from it."""
    files, (text, hidden) = stored(case), text_of(case)
    found = logits_of(*loaded(files.path), text, hidden, attend_causally)

    def error(**control) -> float:
        expected, _ = Reference(files.config, files.tensors, **control).chain(text, hidden, STEPS)
        return np.abs(found - expected).max() / np.abs(expected).max()

    assert error() < TOLERANCE
    for control in CONTROLS:
        assert error(**{control: True}) > 1e-2


@pytest.mark.parametrize("case", quick(CASES, *QUICK))
@pytest.mark.slow
def test_the_drafter_proposes_the_tokens_of_the_reference(case, stored):
    """By its own prefill and cache, from the output of the target's last layer."""
    files, (text, hidden) = stored(case), text_of(case)
    target, drafter = loaded(files.path)
    (layer,) = drafter.stats_spec().layer_inputs
    assert layer == target.config.num_layers
    tree = magicjax.chain(STEPS)
    stats = ModelStats(None, None, {layer: jnp.asarray(hidden[None])})
    cache = full_cache.empty(target, 1, 64).replace(lengths=jnp.array([TEXT - 1]))
    settings = Settings(tree, drafter.shape(tree), "greedy", 64, 16, 16)

    @jax.jit
    def propose(drafter, target, tokens, root):
        state = drafter.prefill(target, tokens, cache, stats, settings)
        return drafter.propose(target, state, root, cache, None, settings)[0].tokens

    tokens = propose(drafter, target, jnp.array([text[:-1]]), jnp.array(text[-1:]))
    _, expected = Reference(files.config, files.tensors).chain(text, hidden, STEPS)
    assert tokens[0].tolist() == [text[-1], *expected]


@pytest.mark.slow
def test_a_head_is_found_beside_its_target_or_by_path(stored, tmp_path):
    """Greedy text is that of plain decoding; the head is read once."""
    files = stored("qwen3")
    target, params = magicjax.load(files.path, "float32"), magicjax.SamplingParams(max_tokens=8)
    plain = magicjax.generate(target, [[5, 7, 9]], params, eos_token_id=[])
    head = loaded(files.path)[1].model
    alone = dataclasses.replace(head.module.config, layer_inputs=None, own_unembedding=False)
    inner = {k: v for k, v in head.params["params"].items() if k != "unembedding"}
    models.save_checkpoint(tmp_path / "head", models.build(alone), {"params": inner})
    again = magicjax.load(tmp_path / "head")
    assert again.config == alone
    jax.tree.map(np.testing.assert_array_equal, again.params, {"params": inner})
    options = dict(tree="chain:3", eos_token_id=[])
    shape = dict(check_agreement=False)
    drafters = ["mtp", f"mtp:{tmp_path / 'head'}", f"mtp:{files.path}:check_agreement=false"]
    for drafter in (*drafters, magicjax.MTP(**shape), magicjax.MTP(again, **shape)):
        found = magicjax.generate(target, [[5, 7, 9]], params, drafter=drafter, **options)
        np.testing.assert_array_equal(found.tokens, plain.tokens)
        assert found.stats.drafted > 0
    assert target.mtp_head().load() is target.mtp_head().load()
    with pytest.raises(ValueError, match="is a learned head, which drafts for another model"):
        magicjax.generate(again, [[5]], params)


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "qwen3.5-27b", "qwen3.5-35b-a3b"])
def test_tensors_of_published_heads(name, tmp_path):
    """Names and shapes, without values: of a layer with attention, whatever the target's first."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = models.load_config(tmp_path, mtp=True)
    raw, shapes = text_decoder(PUBLISHED[name]), hf_parameters.parameter_shapes(config)
    found = {
        tensor.name: tensor.stored_shape(shapes[tensor.path].value.shape)
        for tensor in tensors_of(config)
    }
    norm = {"model.norm.weight": (raw["hidden_size"],)}
    assert found == mtp_reference.shapes_of(raw) | norm
    assert models.MtpConfig.of_target(models.load_config(tmp_path)) == config


def test_a_head_beside_a_model_that_reads_images_has_experts_in_two_tensors(stored, tmp_path):
    """As Qwen3.5's files are: the text decoder has a prefix, the head has none."""
    files = stored("qwen3_5_moe")
    expected = models.load_checkpoint(files.path, mtp=True)
    tensors, experts = dict(files.tensors), "mtp.layers.0.mlp.experts"
    for fused, kinds in {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.items():
        tensors[f"{experts}.{fused}"] = np.stack(
            [
                np.concatenate([tensors.pop(f"{experts}.{i}.{kind}_proj.weight") for kind in kinds])
                for i in range(files.config["num_experts"])
            ]
        )
    tensors = {re.sub("^model", "model.language_model", name): x for name, x in tensors.items()}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    raw = {"model_type": "qwen3_5_moe", "text_config": files.config}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = models.load_checkpoint(tmp_path, mtp=True)
    assert found.module == expected.module
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


@pytest.mark.parametrize(
    ("change", "head", "message"),
    [
        (
            {},
            {},
            r"{path}: the directory has no head .* \(tensors mtp.*\): name that .* \(mtp:PATH\)",
        ),
        ({"mtp_num_hidden_layers": 2}, None, "{path}: mtp_num_hidden_layers=2: heads .* of one"),
        ({"num_nextn_predict_layers": 3}, None, "{path}: num_nextn_predict_layers=3: heads .*"),
        ({}, {"mtp.layers.1.mlp.up_proj.weight": (24, 16)}, "unexpected mtp.layers.1.mlp.up_proj"),
        ({}, {"mtp.fc.weight": (16, 16)}, "fc.weight has shape .16, 16., expected .16, 32."),
    ],
)
def test_files_without_such_a_head_are_refused(change, head, message, tmp_path):
    """Before anything is compiled; a target alone is loaded as ever."""
    if head != {}:
        own = mtp_reference.drawn(config_of("qwen3"), 1)
        head = own | {name: np.zeros(shape, np.float32) for name, shape in (head or {}).items()}
    path = tmp_path / "model"
    write(path, "qwen3", head or {"model.layers.0.self_attn.q_scale": np.zeros(1, np.float32)})
    (path / "config.json").write_text(json.dumps(config_of("qwen3") | change))
    target, params = magicjax.load(path), magicjax.SamplingParams(max_tokens=2)
    with pytest.raises(ValueError, match=message.format(path=path)):
        magicjax.generate(target, [[5]], params, drafter="mtp")


def test_a_target_without_files_and_other_models_are_refused(stored):
    target, params = loading.abstract_model("llama-68m"), magicjax.SamplingParams(max_tokens=2)
    with pytest.raises(ValueError, match="has no files with a head .* name that directory"):
        magicjax.generate(target, [[5]], params, drafter="mtp")
    files = stored("qwen3")
    with pytest.raises(ValueError, match="head for multi-token prediction has vocab_size=61"):
        magicjax.generate(target, [[5]], params, drafter=f"mtp:{files.path}")
    head = magicjax.MTP(loaded(files.path)[1].model)
    with pytest.raises(TypeError, match="Eagle needs the EAGLE-3 head .* not ''"):
        magicjax.Eagle(head.model).check(target, magicjax.chain(2), 2, 16)
    for drafter in (magicjax.MTP, magicjax.Eagle):
        with pytest.raises(TypeError, match=rf"is a path: .*{drafter.__name__}\(magicjax.load\("):
            drafter(str(files.path))
    golden = magicjax.load("tests/models/golden_eagle/eagle31")
    with pytest.raises(ValueError, match="eagle31: the directory has no head for multi-token"):
        magicjax.MTP(golden).check(target, magicjax.chain(2), 2, 16)
    for name in ("opt-125m", "gemma-4-e2b"):
        with pytest.raises(ValueError, match="rotary positions, and RMSNorm before the logits"):
            models.MtpConfig.of_target(models.preset(name))
