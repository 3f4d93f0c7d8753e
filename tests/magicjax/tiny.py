"""The tiny models, prompts, trees and drafters that the tests of the loop share.

Programs are compiled once for each (settings, shapes), so prompts of one batch size have the same
padded width everywhere, and every row has one EOS: a token that no text contains, unless a test
names another.
"""

import dataclasses
import functools
import math

import flax.traverse_util
import gguf
import jax
import numpy as np

import magicjax
import models
from pallas_kernels.cpu.packed import FORMATS, pack
from tests.magicjax import keywords, oracle

VOCAB = 48
NEVER = VOCAB - 1  # its logits are 0 everywhere, so it is never the best
NEW = 24  # new tokens of a row, unless a test says otherwise
SOURCE = "def add(first, second):\n    return first + second — été\n"  # a text to continue
LENGTHS = (5, 30, 1, 16, 17, 2, 23, 9)  # of the prompts: around the 16 that widths round to

TREES = {
    **{f"chain{n}": magicjax.chain(n) for n in range(1, 9)},
    "2,2,1": magicjax.expansion((2, 2, 1)),
    "1,1,3,1,1,1,1,1": magicjax.expansion((1, 1, 3, 1, 1, 1, 1, 1)),
    # Childless nodes beside inner ones at every level; siblings need not be neighbours.
    "irregular": magicjax.TokenTree.from_parents((-1, 0, 0, 1, 0, 1, 3, 5, 7, 6)),
}
# Trees that not every drafter can be asked for, or that are no shape of their own.
SPECIAL = {"dynamic": magicjax.DynamicTree(9, 4, 3), "branches": magicjax.expansion((3, 1, 1, 1))}
DRAFTERS = ("self", "other", "same", "near", "ensemble")
SINKS, BUDGET = 2, 12  # the ring is smaller than most prompts, and wraps while decoding


HYBRID = dict(
    linear_layers=(0,),
    delta_net=models.DeltaNetShape(
        key_heads=2, value_heads=4, key_dim=8, value_dim=6, conv_width=4
    ),
    attention_gate=True,
    qk_norm=True,
    norm="rms_plus_one",
    family="qwen3_5_text",
)


def config(**changes) -> models.DecoderConfig:
    shapes = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=512,
    )
    return models.DecoderConfig(**shapes | changes)


def loud(params, rng, noise: float, never: int | None = NEVER):
    """Returns the parameters scaled so that the text depends on its context, and `never` unsaid.

    A random model attends evenly and soon repeats itself; four times the queries make it choose.
    """

    def change(path, x):
        names = [key.key for key in path]
        x = np.asarray(x, np.float64) * (4.0 if "q" in names else 1.0)
        x = x * (1 + noise * rng.standard_normal(x.shape))
        if names[-1] == "unembedding" and never is not None:
            x[never] = 0
        return x

    return jax.tree_util.tree_map_with_path(change, params)


@functools.cache
def model(kind: str = "target", dtype: str = "float32") -> magicjax.Model:
    """Returns a model: the `target`, one `near` it (its weights with noise), or an `other`.

    `long`, `long near`: the first two with more positions. `hybrid`, `hybrid near`: with a gated
    delta net. `int8 cache`: the target with its cache in 8 bits. The weights are the same numbers
    in every dtype.
    """
    if kind == "int8 cache":
        return dataclasses.replace(model("target", dtype), kv_bits=8)
    shape = config(num_layers=1, hidden_size=16, num_kv_heads=4) if kind == "other" else config()
    if kind.startswith("hybrid"):
        shape = config(**HYBRID)
    if kind.startswith("long"):
        shape = config(max_positions=4096)
    random = drawn(shape, 1 if kind == "other" else 0)
    params = loud(random, np.random.default_rng(7), noise=0.1 if kind.endswith("near") else 0.0)
    return magicjax.Model(models.build(shape, dtype), put(params, dtype), name=kind)


def reciting(text, tokenizer) -> magicjax.Model:
    """Returns a model whose next token depends on the position only: greedy texts are given.

    After `text[:n]`, or another prompt of n tokens, it generates `text[n:]`, whose last token is
    EOS.
    """
    shape = config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_layers=1,
        positions=models.LearnedPositions(),
        max_positions=128,
    )
    following = np.zeros((shape.vocab_size, shape.hidden_size))
    following[[*text[1:]], np.arange(len(text) - 1)] = 1
    zeros = jax.tree.map(np.zeros_like, drawn(shape, 0))["params"]
    params = zeros | dict(
        position_embedding=np.eye(shape.max_positions, shape.hidden_size),
        norm=dict(scale=np.ones(shape.hidden_size)),
        unembedding=following,
    )
    module = models.build(shape)
    return magicjax.Model(
        module, put({"params": params}), tokenizer, "reciting", eos_token_ids=(text[-1],)
    )


def put(params, dtype: str = "float32"):
    """Returns parameters on the device, rounded to float32 and to the dtype without compiling."""

    def rounded(x):
        is_floating = np.issubdtype(x.dtype, np.floating)
        return x.astype(np.float32).astype(jax.numpy.dtype(dtype)) if is_floating else x

    return jax.device_put(jax.tree.map(rounded, params))


def few(whole: magicjax.Model, size: int) -> magicjax.Model:
    """Returns the model with a draft vocabulary of its first tokens."""
    shape = dataclasses.replace(whole.config, draft_vocab_size=size)
    own = np.arange(size)
    vocab_map = np.minimum(np.arange(shape.vocab_size, dtype=np.int32), size - 1)
    inner = {
        name: value[own] if name in ("embedding", "unembedding") else value
        for name, value in whole.params["params"].items()
    }
    params = {"params": inner | {"vocab_map": jax.numpy.asarray(vocab_map)}}
    return magicjax.Model(models.build(shape, whole.dtype), params, name="few")


def head(target: magicjax.Model, seed: int = 3, **changes) -> magicjax.Model:
    """Returns a random EAGLE head of a target, which can propose five sixths of the tokens."""
    c = target.config
    rows = c.vocab_size - max(1, c.vocab_size // 6)
    shape = models.EagleConfig(
        **dict(
            vocab_size=c.vocab_size,
            draft_vocab_size=rows,
            hidden_size=c.hidden_size,
            target_hidden_size=c.hidden_size,
            intermediate_size=40,
            num_layers=1,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            max_positions=c.max_positions,
            layer_inputs=(0, c.num_layers // 2, c.num_layers),
        )
        | changes
    )
    params = drawn(shape, seed)
    if shape.draft_vocab_size is not None:
        vocab_map = np.full(c.vocab_size, rows, np.int32)
        vocab_map[np.random.default_rng(seed).permutation(c.vocab_size)[:rows]] = np.arange(rows)
        params["params"]["vocab_map"] = vocab_map
    return magicjax.Model(models.build(shape, target.dtype), put(params, target.dtype), name="head")


def mtp_head(target: magicjax.Model, seed: int = 4, **changes) -> magicjax.Model:
    """Returns a random head for multi-token prediction of a target."""
    layers = (target.config.num_layers,)
    shape = models.MtpConfig.of_target(target.config, **dict(layer_inputs=layers) | changes)
    params = put(drawn(shape, seed), target.dtype)
    return magicjax.Model(models.build(shape, target.dtype), params, name="mtp head")


def drawn(shape, seed):
    """Returns random parameters, drawn by numpy: the same in 64-bit mode, nothing to compile."""
    rng = np.random.default_rng(seed)

    def draw(path, x):
        names = [key.key for key in path if hasattr(key, "key")]
        if names[-1] == "scalar" or names[-1].endswith("scale"):
            return 1 + 0.1 * rng.standard_normal(x.shape)
        if names[-1] == "bias":
            return np.zeros(x.shape)
        inputs = 1 if names[-1] == "embedding" else x.shape[-1]
        if "out" in names:
            inputs = x.shape[1] * x.shape[2]
        return rng.standard_normal(x.shape) / np.sqrt(inputs)

    import flax.linen as nn

    shapes = nn.meta.unbox(models.abstract_params(models.build(shape)))
    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def quantized(whole: magicjax.Model, weights: str) -> magicjax.Model:
    """Returns the model with quantized matrices."""
    module = models.build(whole.config, whole.dtype, models.WeightFormat.parse(weights))
    rest, layers = models.split_blocks(jax.device_get(whole.params))
    blocks = {f"layers_{i}": models.quantize_block(x, module, i) for i, x in enumerate(layers)}
    params = jax.device_put({"params": rest["params"] | blocks})
    return dataclasses.replace(whole, module=module, params=params)


def packed(whole: magicjax.Model, kinds=("Q4_0", "Q5_1", "Q8_0", "Q4_1")) -> magicjax.Model:
    """Returns the model with the matrices that fit packed in types of GGUF files, by turns."""
    flat = flax.traverse_util.flatten_dict(jax.device_get(whole.params["params"]))
    types = []
    for path, x in flat.items():
        if path[-1] not in ("weight", "embedding", "unembedding"):
            continue
        axes = 2 if path[-2:-1] == ("out",) else 1
        matrix = np.asarray(x, np.float32).reshape(-1, math.prod(x.shape[x.ndim - axes :]))
        kind = kinds[len(types) % len(kinds)]
        if FORMATS[kind].fits(*matrix.shape):
            types.append(("/".join(path).removesuffix("/weight"), kind))
            flat[path] = pack(gguf.quantize(matrix, gguf.GGMLQuantizationType[kind]), kind)
    module = models.build(whole.config, whole.dtype, models.MatrixFormats(tuple(types)))
    params = {"params": flax.traverse_util.unflatten_dict(jax.device_put(flat))}
    return dataclasses.replace(whole, module=module, params=params)


def dequantized(model: magicjax.Model) -> magicjax.Model:
    """Returns the model whose matrices are those that a quantized model stands for."""
    params = models.dequantize_params(model.params, model.dtype)
    return dataclasses.replace(
        model, module=model.module.clone(weights=models.MatrixFormats()), params=params
    )


@functools.cache
def drafter(kind: str, dtype: str = "float32"):
    """Returns a drafter by what it is to the target; `same` is the target: all is accepted."""
    if kind == "self":
        policy = magicjax.StreamingLLM(sinks=SINKS)
        return magicjax.SelfSpeculation(policy=policy, budget=BUDGET)
    if kind == "layers":
        return dataclasses.replace(drafter("self"), layers="1")
    if kind == "quest":
        return magicjax.PageRetrieval(BUDGET, page_size=4)
    if kind == "prompt-lookup":
        return magicjax.PromptLookup()
    if kind == "suffix":
        made = magicjax.SuffixLookup(store_tokens=256)
        for row in expected(8):
            mistaken = row.copy()
            mistaken[::5] = (mistaken[::5] + 1) % NEVER
            made = made.remember(mistaken)
        return made
    if kind == "eagle":
        return magicjax.Eagle(head(model("target", dtype)))
    if kind == "mtp":
        return magicjax.MTP(mtp_head(model("target", dtype)))
    if kind == "same and heads":
        kinds = ("same", "eagle", "mtp")
        return magicjax.Ensemble([drafter(each, dtype) for each in kinds])
    if kind == "ensemble":
        return magicjax.Ensemble([drafter("other", dtype), drafter("near", dtype)])
    if kind == "cascade":
        return magicjax.Cascade(drafter("near", dtype), drafter("self"), TREES["chain2"])
    if kind == "cascade of one tree":
        return magicjax.Cascade(drafter("near", dtype), magicjax.FullCacheSpeculation("int4:8"))
    if kind == "cascade of several":
        several = magicjax.Ensemble([drafter("eagle", dtype), magicjax.PromptLookup()])
        return magicjax.Cascade(several, drafter("quest"), TREES["chain2"])
    return magicjax.SmallModel(model("target" if kind == "same" else kind, dtype))


def prompts(batch: int, seed: int = 0) -> list[np.ndarray]:
    """Returns ragged prompts; one of them has 30 tokens, so that all pad to a width of 32."""
    rng = np.random.default_rng(seed)
    lengths = {1: (30,), 3: (1, 30, 17)}.get(batch) or tuple(rng.permutation(LENGTHS)[:batch])
    assert max(lengths) == 30
    return [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]


@functools.cache
def expected(batch: int, seed: int = 0, new_tokens: int = NEW) -> tuple[np.ndarray, ...]:
    """Returns the oracle's text behind each of `prompts(batch, seed)`."""
    target = model()
    return tuple(oracle.greedy(target, prompt, new_tokens) for prompt in prompts(batch, seed))


def rows_of(output: magicjax.Output) -> list[np.ndarray]:
    """Returns each row's new tokens, without padding."""
    return [row[:n] for row, n in zip(output.tokens, output.lengths, strict=True)]


def generate(batch: int = 8, seed: int = 0, kind: str | None = None, tree=None, **options):
    """Returns the target's output for `prompts(batch, seed)`; defaults share programs."""
    dtype = options.pop("dtype", "float32")
    options = dict(max_tokens=NEW, eos_token_id=NEVER) | options
    if kind is not None:
        options |= dict(drafter=drafter(kind, dtype), tree=(TREES | SPECIAL)[tree])
    return keywords.generate(model("target", dtype), prompts(batch, seed), **options)
