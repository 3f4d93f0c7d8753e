"""EAGLE-3 heads draft what the reference in `make_golden_eagle.py` drafts, in every layout."""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import magicjax
import models
from magicjax.drafters.draft_pass import embed_for
from magicjax.kv_cache import full_cache
from magicjax.kv_cache.model_stats import ModelStats
from magicjax.settings import Settings
from tests.models import quantized_layouts
from tests.quick import quick

GOLDEN = pathlib.Path(__file__).parent / "golden_eagle"
CASES = sorted(path.name for path in GOLDEN.iterdir())
QUICK = ("eagle31", "grouped_rope_llama3", "specforge", "speculators")
TOLERANCE = 2e-5  # of the largest logit; the reference computes in float64
TARGET_LAYERS = 8
WEIGHTS = "model.safetensors"
IDS = "eagle_aux_hidden_state_layer_ids"
# Of a head without an embedding; SpecForge writes these names for the case `specforge`.
SPECFORGE_TENSORS = {
    "d2t": (20,),
    "fc.weight": (32, 96),
    "lm_head.weight": (20, 32),
    "midlayer.hidden_norm.weight": (32,),
    "midlayer.input_layernorm.weight": (32,),
    "midlayer.mlp.down_proj.weight": (32, 40),
    "midlayer.mlp.gate_proj.weight": (40, 32),
    "midlayer.mlp.up_proj.weight": (40, 32),
    "midlayer.post_attention_layernorm.weight": (32,),
    "midlayer.self_attn.k_proj.weight": (16, 64),
    "midlayer.self_attn.o_proj.weight": (32, 32),
    "midlayer.self_attn.q_proj.weight": (32, 64),
    "midlayer.self_attn.v_proj.weight": (16, 64),
    "norm.weight": (32,),
    "t2d": (48,),
}


@functools.cache
def expected(case: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / case / "expected.npz") as stored:
        return dict(stored)


@functools.cache
def target_of(case: str) -> magicjax.Model:
    """Returns a target that has the case's embedding and output matrix, and no layers' weights."""
    matrices = expected(case)
    vocab, width = matrices["target_embedding"].shape
    config = models.DecoderConfig(
        vocab_size=vocab,
        hidden_size=width,
        num_layers=TARGET_LAYERS,
        **dict(intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8, max_positions=64),
    )
    names = {"embedding": "target_embedding", "unembedding": "target_output"}
    params = {name: jnp.asarray(matrices[stored]) for name, stored in names.items()}
    return magicjax.Model(models.build(config), {"params": params})


@functools.cache
def drafter_of(case: str) -> magicjax.Eagle:
    """Returns the drafter of a case's head, for its target."""
    head = magicjax.load(GOLDEN / case, "float32")
    return magicjax.Eagle(head, check_agreement=False).for_target(target_of(case))


def logits_of(case: str, attend, steps: int, config=None, params=None, hidden=None) -> np.ndarray:
    """Returns the logits [steps, V] along the expected chain, by passes over the whole text.

    `config`, `params` and `hidden`, the target's hidden states, replace those of the case.
    """
    model, values = drafter_of(case).model, expected(case)
    module = model.module if config is None else model.module.clone(config=config)
    model = dataclasses.replace(model, module=module, params=params or model.params)
    fuse, decode = passes(module, attend)
    hidden = values["hidden"] if hidden is None else hidden
    features = np.asarray(fuse(model.params, list(hidden[:, None])))
    # Padded to one length, so that all passes share what is compiled.
    text, logits = np.concatenate([values["tokens"][1:], values["chain"]]), []
    first = features.shape[1]
    features = np.pad(features, ((0, 0), (0, len(text) - first), (0, 0)))
    for last in range(first - 1, first - 1 + steps):
        known = np.where(np.arange(len(text)) <= last, text, 0)
        out, found = map(np.asarray, decode(model, target_of(case), known[None], features))
        logits.append(found[0, last])
        features[:, last + 1 : last + 2] = out[:, last : last + 1]
    return np.stack(logits)


@functools.cache
def passes(module, attend):
    """Returns a head's compiled functions: the features of hidden states, and a draft pass."""

    @jax.jit
    def decode(model, target, tokens, features):
        positions = jnp.arange(tokens.shape[1])[None]
        apply = functools.partial(module.apply, model.params)
        x = embed_for(model, target, tokens, positions)
        out, _ = apply(x, features, positions, attend, method="decode")
        return out, apply(out, method="unembed")

    return jax.jit(functools.partial(module.apply, method="fuse")), decode


def relative_error(found: np.ndarray, case: str) -> float:
    """Returns the error of logits over the largest; inf if another token can be proposed."""
    known = expected(case)["logits"][: len(found)]
    can = np.isfinite(known)
    if (found[~can] > models.layers.NEVER).any():
        return np.inf
    return np.abs(found[can] - known[can]).max() / np.abs(known[can]).max()


@pytest.mark.parametrize("case", quick(CASES, *QUICK))
def test_logits_of_five_steps_are_those_of_the_reference(case, attend_causally, record_property):
    found = logits_of(case, attend_causally, 5)
    record_property("relative_error", float(relative_error(found, case)))
    assert relative_error(found, case) < TOLERANCE
    assert found.argmax(-1).tolist() == expected(case)["chain"].tolist()


@pytest.mark.parametrize("case", quick(CASES, "eagle31", "speculators"))
def test_chains_and_trees_are_those_of_the_reference(case):
    """The drafter's own prefill and cache; the hidden states are by the layers that it asks for."""
    drafter, values = drafter_of(case), expected(case)
    layers = (3, 4, 6) if case == "speculators" else (2, TARGET_LAYERS // 2, TARGET_LAYERS - 3)
    assert drafter.stats_spec().layer_inputs == layers
    chain = proposed(case, drafter, values["hidden"], magicjax.chain(5))
    assert chain == (values["chain"].tolist(), [0, 1, 2, 3, 4])
    tree = proposed(
        case, drafter, values["hidden"], magicjax.DynamicTree(nodes=13, depth=4, width=4)
    )
    assert tree == (values["tree_tokens"].tolist(), values["tree_parents"].tolist())


def proposed(case, drafter, hidden, tree) -> tuple[list[int], list[int]]:
    """Returns the tokens and parents of a drafter's tree for the text of a case.

    `hidden` are the target's hidden states [A, T, Et], by the layers that the drafter asks for.
    """
    target, layers = target_of(case), drafter.stats_spec().layer_inputs
    stats = ModelStats(None, None, dict(zip(layers, hidden[:, None], strict=True)))
    *text, root = expected(case)["tokens"]
    cache = full_cache.empty(target, 1, 32).replace(lengths=jnp.array([len(text)]))
    settings = Settings(tree, drafter.shape(tree), "greedy", 32, 16, 16)
    prefill = jax.jit(lambda *arguments: drafter.prefill(*arguments, settings))
    state = prefill(target, jnp.array([text]), cache, stats)
    propose = jax.jit(lambda *arguments: drafter.propose(*arguments, settings)[0])
    proposal = propose(target, state, jnp.array([root]), cache, None)
    parents = np.atleast_2d(proposal.parents)  # of a static tree, no row's
    return proposal.tokens[0, 1:].tolist(), parents[0, 1:].tolist()


def write_head(folder, config, tensors):
    """Writes a head, and returns its directory."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / WEIGHTS)
    return folder


def stored_head(case):
    """Returns config and tensors of a case."""
    config = json.loads((GOLDEN / case / "config.json").read_text())
    return config, safetensors.numpy.load_file(GOLDEN / case / WEIGHTS)


def of_four_layers(case, weight):
    """Returns config and tensors of a head that reads one layer more than a case's: its second.

    The new columns of its matrix are `weight`.
    """
    config, tensors = stored_head(case)
    config["eagle_config"] = {IDS: [2, 3, 4, 5]}
    first, *others = np.split(tensors["fc.weight"], 3, 1)
    tensors["fc.weight"] = np.concatenate([first, np.full_like(first, weight), *others], 1)
    if config.get("fc_norm"):
        tensors["fc_norm.3.weight"] = tensors["fc_norm.2.weight"]
        tensors["fc_norm.2.weight"] = tensors["fc_norm.1.weight"]
        tensors["fc_norm.1.weight"] = np.ones_like(tensors["fc_norm.2.weight"])
    return config, tensors


@pytest.mark.parametrize("case", ["specforge", "eagle31"])
@pytest.mark.slow
def test_a_head_may_read_four_layers(case, attend_causally, tmp_path):
    """It drafts as one of three if the fourth has no weights, and otherwise not."""
    values = expected(case)
    shape = values["hidden"][:1].shape
    hidden = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    hidden = np.concatenate([values["hidden"][:1], hidden, values["hidden"][1:]])
    for weight in (0, 1):
        folder = write_head(tmp_path / str(weight), *of_four_layers(case, weight))
        head = magicjax.load(folder, "float32")
        drafter = magicjax.Eagle(head, check_agreement=False).for_target(target_of(case))
        found = logits_of(case, attend_causally, 2, head.config, head.params, hidden)
        assert (relative_error(found, case) < TOLERANCE) == (weight == 0)
        assert drafter.stats_spec().layer_inputs == (2, 3, 4, 5)
        if weight == 0:
            tokens, _ = proposed(case, drafter, hidden, magicjax.chain(5))
            assert tokens == values["chain"].tolist()
    models.save_checkpoint(tmp_path / "again", head.module, head.params)
    assert models.load_config(tmp_path / "again") == head.config


@pytest.mark.parametrize(
    ("change", "message", "remedy"),
    [
        (
            {"eagle_config": None},
            "fc.weight has 128 columns, and config.json has no eagle_aux_.*_layer_ids, which "
            "stands for 3 layers .* hidden_size=32: set eagle_aux_hidden_state_layer_ids to the 4 "
            "that the head was trained with$",
            {IDS: [2, 3, 4, 5]},
        ),
        (
            {"eagle_config": {IDS: [2, 4]}},
            r"128 columns, and .*_layer_ids=\[2, 4\], which stands for 2 layers .*: set eagle_aux_"
            ".* to the 4 .*, or set target_hidden_size to 64 if that is the target's",
            {"eagle_config": {IDS: [2, 3, 4, 5]}},
        ),
        (
            {"target_hidden_size": 64},
            "128 columns, .* 4 layers of a target with hidden_size=64: set eagle_aux_.* to the 2 "
            ".*, or set target_hidden_size to 32",
            {"target_hidden_size": 32},
        ),
    ],
)
def test_the_columns_of_a_head_tell_its_layers(change, message, remedy, tmp_path):
    """Before any weights are read; the error names the key that is missing or wrong."""
    config, tensors = of_four_layers("specforge", 0)
    right = models.load_checkpoint(write_head(tmp_path / "right", config, tensors))
    folder = write_head(tmp_path / "wrong", config | change, tensors)
    for read in (models.load_config, models.load_checkpoint):
        with pytest.raises(ValueError, match=message):
            read(folder)
    write_head(folder, config | change | remedy, tensors)
    found = models.load_checkpoint(folder)
    assert found.module == right.module
    jax.tree.map(np.testing.assert_array_equal, found.params, right.params)


def test_a_wider_target_is_a_remedy_for_a_head_without_layer_ids(tmp_path):
    config, tensors = stored_head("wide_target")
    del config["target_hidden_size"]
    message = "fc.weight has 144 columns, .* hidden_size=32: set target_hidden_size to 48 if that"
    with pytest.raises(ValueError, match=message):
        models.load_config(write_head(tmp_path, config, tensors))
    write_head(tmp_path, config | {"target_hidden_size": 48}, tensors)
    found, right = (models.load_checkpoint(x) for x in (tmp_path, GOLDEN / "wide_target"))
    assert found.module == right.module
    jax.tree.map(np.testing.assert_array_equal, found.params, right.params)


@pytest.mark.parametrize("case", quick(CASES, "eagle31", "speculators"))
def test_every_tensor_matters(case, attend_causally):
    """Negative control: a missing or exchanged tensor changes the logits."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(drafter_of(case).model.params)
    for i, (path, leaf) in enumerate(leaves):
        values = [value for _, value in leaves]
        values[i] = np.roll(leaf, 1, -1)
        wrong = logits_of(case, attend_causally, 1, params=jax.tree.unflatten(tree, values))
        assert relative_error(wrong, case) > 20 * TOLERANCE, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("case", "setting", "value"),
    [
        ("specforge", "norm_before_residual", True),
        ("specforge", "norm_output", True),
        ("speculators", "norm_before_residual", False),
        ("eagle31", "norm_output", False),
        ("grouped_rope_llama3", "positions", models.Rope(theta=500.0)),
    ],
)
def test_a_wrong_setting_is_caught(case, setting, value, attend_causally):
    config = dataclasses.replace(drafter_of(case).config, **{setting: value})
    wrong = logits_of(case, attend_causally, 2, config)
    assert relative_error(wrong, case) > 20 * TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_a_saved_head_loads_back_equal(case, tmp_path):
    loaded = models.load_checkpoint(GOLDEN / case)
    models.save_checkpoint(tmp_path / "head", loaded.module, loaded.params)
    again = models.load_checkpoint(tmp_path / "head")
    assert again.config == loaded.config
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    saved = safetensors.numpy.load_file(tmp_path / "head" / WEIGHTS)
    original = safetensors.numpy.load_file(GOLDEN / case / WEIGHTS)
    assert set(saved) == {name.replace("layers.0.", "midlayer.") for name in original}
    if case == "specforge":
        assert {name: x.shape for name, x in saved.items()} == SPECFORGE_TENSORS
        for name in ("d2t", "t2d"):
            np.testing.assert_array_equal(saved[name], original[name], strict=True)


def test_what_a_head_does_not_need_is_ignored(tmp_path):
    """The target's tensors of speculators, and maps of a whole vocabulary."""
    shutil.copytree(GOLDEN / "full_vocabulary", tmp_path / "head")
    original = models.load_checkpoint(tmp_path / "head")
    tensors = safetensors.numpy.load_file(tmp_path / "head" / WEIGHTS)
    lm_head = tensors["lm_head.weight"]
    more = {"d2t": np.zeros(48, np.int64), "t2d": np.ones(48, bool)}
    more |= {"verifier_norm.weight": lm_head[0], "verifier_lm_head.weight": lm_head}
    safetensors.numpy.save_file(tensors | more, tmp_path / "head" / WEIGHTS)
    found = models.load_checkpoint(tmp_path / "head")
    jax.tree.map(np.testing.assert_array_equal, found.params, original.params)


def without(name):
    return lambda config, tensors: tensors.pop(name)


def store_ids(config, tensors):
    tensors["d2t"] += np.arange(len(tensors["d2t"]))


def subtract_ids(config, tensors):
    tensors["d2t"] -= np.arange(len(tensors["d2t"]))


def make_eagle_1(config, tensors):
    del (
        config["draft_vocab_size"],
        config["eagle_config"],
        tensors["d2t"],
        tensors["t2d"],
        tensors["lm_head.weight"],
    )
    config["architectures"] = ["LlamaForCausalLM"]
    tensors["fc.weight"] = tensors["fc.weight"][:, :64].copy()
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)


def setting(**settings):
    return lambda config, tensors: config.update(settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (store_ids, "d2t has tokens outside 0 to 47.*less the draft token, not the target's token"),
        (without("midlayer.mlp.up_proj.weight"), "missing midlayer.mlp.up_proj.weight"),
        (
            setting(num_hidden_layers=2),
            "num_hidden_layers=2 of an .* a head with num_hidden_layers=1",
        ),
        (
            setting(eagle_config={"use_aux_hidden_state": False}),
            "use_aux_hidden_state=false of an .* a head with use_aux_hidden_state=true",
        ),
        (
            setting(use_mtp_layernorm=True),
            "use_mtp_layernorm=true of an .* a head with use_mtp_layernorm=false",
        ),
        (
            setting(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 5]),
            r"fc.weight has 96 columns, .*_layer_ids=\[1, 2, 3, 5\], .* 4 layers .* to the 3 that",
        ),
        (make_eagle_1, "kind EAGLE-1 or EAGLE-2, .* not supported"),
        (
            setting(layer_types=["sliding_attention"]),
            r'layer_types=\["sliding_attention"\] is not supported',
        ),
        (
            setting(norm_before_fc=True, fc_norm=True),
            "norm_before_fc and fc_norm .* exclude each other",
        ),
        (setting(norm_output="false"), "norm_output='false' must be true or false"),
        (setting(draft_vocab_size="40"), "draft_vocab_size='40' must be an integer"),
        (setting(eagle_config=[1]), "eagle_config=.1. must be an object"),
        (
            setting(eagle_aux_hidden_state_layer_ids=[2, None, 3]),
            "a layer of eagle_aux_hidden_state_layer_ids=None must be an integer",
        ),
        (
            setting(eagle_config={"first_token_acceptance": 41.9}),
            "acceptance=41.9 of an EAGLE head: it must be 0 to 1",
        ),
    ],
)
def test_a_wrong_file_is_one_clear_error(change, message, tmp_path):
    config, tensors = stored_head("specforge")
    change(config, tensors)
    write_head(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=message):
        magicjax.load(tmp_path, "float32")


@pytest.mark.parametrize(
    ("case", "change", "message", "remedy"),
    [
        ("specforge", store_ids, "the target's token less the draft token", subtract_ids),
        (
            "speculators",
            setting(fc_norm=True),
            "exclude each other: use one of them",
            setting(fc_norm=False),
        ),
        ("eagle31", setting(norm_before_fc=True), "use one of them", setting(norm_before_fc=None)),
        (
            "specforge",
            setting(num_hidden_layers=2),
            "use a head with num_hidden_layers=1",
            setting(num_hidden_layers=1),
        ),
        (
            "specforge",
            setting(use_aux_hidden_state=False),
            "use a head with use_aux_hidden_state=true",
            setting(use_aux_hidden_state=True),
        ),
        (
            "specforge",
            setting(draft_vocab_size="20"),
            "must be an integer: correct config.json",
            setting(draft_vocab_size=20),
        ),
    ],
)
def test_what_an_error_about_a_head_asks_for_gives_the_head(
    case, change, message, remedy, tmp_path
):
    config, tensors = stored_head(case)
    change(config, tensors)
    with pytest.raises(ValueError, match=message):
        models.load_checkpoint(write_head(tmp_path, config, tensors))
    remedy(config, tensors)
    found = models.load_checkpoint(write_head(tmp_path, config, tensors))
    right = models.load_checkpoint(GOLDEN / case)
    assert found.module == right.module
    jax.tree.map(np.testing.assert_array_equal, found.params, right.params)


@pytest.mark.parametrize("quantized", [False, True])
def test_weights_of_a_head_are_floating_point(quantized, tmp_path):
    """Those of a quantized head are dequantized with the option that the error names."""
    config, tensors = stored_head("specforge")
    name, draw = "midlayer.mlp.up_proj", np.random.default_rng(0)
    settings, quantize = quantized_layouts.LAYOUTS["int8"]
    parts, matrix = quantize(draw, 32, 40)
    tensors[f"{name}.weight"] = np.ascontiguousarray(matrix)
    right = models.load_checkpoint(write_head(tmp_path / "right", config, tensors), "float32")
    if quantized:
        tensors |= {f"{name}.{part}": np.ascontiguousarray(x) for part, x in parts.items()}
        config["quantization_config"] = settings
    folder = write_head(tmp_path / "head", config, tensors)
    with pytest.raises(ValueError, match="for a learned head: pass weights='none'"):
        models.load_checkpoint(folder, "float32", weights=None if quantized else "int8")
    found = models.load_checkpoint(folder, "float32", weights="none")
    assert found.module == right.module
    jax.tree.map(np.testing.assert_array_equal, found.params, right.params)


def test_options_that_heads_do_not_have_are_omitted():
    for options, message in (
        (dict(kv_dtype="int8"), "is a learned head: omit kv_dtype"),
        (dict(draft_vocab=16), "vocabulary of its own; omit draft_vocab"),
    ):
        with pytest.raises(ValueError, match=message):
            magicjax.load(GOLDEN / "specforge", **options)
    assert magicjax.load(GOLDEN / "specforge").config.draft_vocab_size == 20


def test_weights_in_pickle_format_are_refused(tmp_path):
    shutil.copy(GOLDEN / "specforge" / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="only weights in pickle format .pytorch_model.bin."):
        magicjax.load(tmp_path, "float32")
