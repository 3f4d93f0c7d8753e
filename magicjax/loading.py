"""`load` reads a model of a source or initializes a preset; `offload` moves it to the host."""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import models
from magicjax import compilation_cache, placement
from magicjax.checks import check_number
from magicjax.model import KV_DTYPES, Model
from magicjax.parallel import offloading, pipeline_stages
from magicjax.parallel.layouts import Layout, Offloaded, Pipelined, Resident
from magicjax.parallel.offloading import GB
from magicjax.sources import PRESET_DTYPE, Source, source_of
from magicjax.suggest import explain_unknown
from sharding import STAGE, AnyMesh, array_bytes, factored

logger = logging.getLogger("magicjax")

ACTIVATIONS = ("int8", "float")


@explain_unknown
def load(
    source: str | os.PathLike | Source,
    dtype: Any = None,
    *,
    weights: str | models.WeightFormat | None = None,
    activations: str = "int8",
    kv_dtype: str | None = None,
    draft_vocab: int | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
    shards: int | None = None,
    stages: int | None = None,
    offload: bool = False,
) -> Model:
    """Returns a model from a directory, the Hugging Face Hub or a GGUF file, or a random preset.

    It enables JAX's persistent compilation cache for the process (`magicjax.compilation_cache`).

    Args:
      source: a directory in Hugging Face format (config.json, safetensors, tokenizer files); a
        model of the Hugging Face Hub, such as "Qwen/Qwen2.5-0.5B" or "Qwen/Qwen2.5-0.5B@main",
        or one of its GGUF files, such as "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M", which are
        downloaded when they are first used; a GGUF file; a name that `magicjax fetch` lists;
        or the name of a preset (`models.PRESETS`), which has random weights, as a logged warning
        says. A `magicjax.sources.Source` keeps what it has read.
      dtype: dtype of parameters, caches and activations; None: as stored (GGUF: float32, presets:
        bfloat16).
      weights: quantize the blocks' matrices, one by one: "int8" with a scale for each output
        channel, "int4" or "int4:32" with one for each group of 128 or 32 inputs. A quantized
        checkpoint stays exact in its own format and in smaller groups of it, such as "float8:64".
        "Q4_0" or "Q8_0": types of GGUF files, for the CPU kernels; embedding and output matrix stay
        as stored. None: each as it is stored, quantized or not. "none": dequantize all.
      activations: "int8": with weights=None, matrices of a GGUF file stay in its types on a CPU
        without mesh and offload, and products round activations to 8 bits, as they do with "Q4_0"
        and "Q8_0". "float": as on other devices, matrices of blocks become integers with float32
        scales if their types can, else floating-point, and activations are not rounded.
      kv_dtype: dtype of the model's cache: "int8", with a scale for each token and head that is a
        power of two, for half the bytes of bfloat16. A property of the model, like its weights:
        plain decoding and verification read the same values. None: `dtype`.
      draft_vocab: rows of a draft model's output matrix, a multiple of 16: it proposes only the
        first tokens of its vocabulary and those that end a text, and reads all. None: all tokens.
      seed: seed of a preset's random weights.
      mesh: a mesh of `make_mesh`; each device receives only its part.
      shards: number of devices along the mesh's `model` axis that divide a small draft; None: all.
        Drafts with fewer shards are replicated; with 1, every device has the whole draft.
      stages: number of the mesh's stages that divide the layers. None: all, or 1 with `shards`. Use
        1 for small drafts, which every stage holds in full.
      offload: keep the blocks' weights in host memory and stream them to the device in every pass,
        for models larger than the device.

    Raises:
      OSError, ValueError: the source does not exist or is incomplete, more than a tenth of its
        tokenizer's tokens are outside the model's vocabulary, a dtype is unknown or kv_dtype is not
        supported, the mesh does not divide the model, or host memory is too small.
    """
    options: Any = dict(weights=weights, seed=seed, mesh=mesh, shards=shards, stages=stages)
    options |= dict(offload=offload, draft_vocab=draft_vocab, kv_dtype=kv_dtype)
    return _load(source_of(source), dtype, packed=_is_packed(activations), **options)


def _load(
    source: Source,
    dtype: Any,
    *,
    weights: str | models.WeightFormat | None,
    shards: int | None,
    offload: bool,
    mesh: Mesh | None = None,
    stages: int | None = None,
    seed: int = 0,
    packed: bool = True,
    draft_vocab: int | None = None,
    kv_dtype: str | None = None,
) -> Model:
    """Returns what `load` does."""
    compilation_cache.enable()  # conversions of weights are programs too
    offloading.check_offload(offload)
    _check_dtype(dtype)
    kv_bits = _kv_bits(kv_dtype, source)
    weight_format = models.parse_weights(weights)
    if mesh is not None and isinstance(source.config, models.EagleConfig):
        stages = 1  # every device has the whole head
    if offload:
        offloading.check_layers(source.config)
    stages = _validated_stages(stages, shards, mesh, offload)
    sharding_of = None
    if mesh is not None:
        formats = source.matrix_formats(weight_format, uniform_layers=stages > 1)
        module = models.build(source.config, weights=formats)
        sharding_of = placement.parameter_shardings(module, shards, mesh)
        pipeline_stages.check_layers(source.config, stages)
    if source.directory is None:
        dtype = source.stored_dtype if dtype is None else dtype
        module = models.build(source.config, dtype, source.matrix_formats(weight_format))
        _check_preset(module, source)
        params, layout = _initialized(module, seed, stages, offload, sharding_of)
        module, params = _with_draft_vocab(module, params, draft_vocab)
        return Model(
            module,
            params,
            source.tokenizer,
            name=source.name,
            shards=shards,
            layout=layout,
            kv_bits=kv_bits,
        )
    path = source.checkpoint_directory
    tokenizer = source.tokenizer  # an invalid one is an error before weights are read
    checkpoint = models.load_checkpoint(
        path,
        dtype,
        weights=weight_format,
        sharding_of=sharding_of,
        lazy_blocks=offload or stages > 1,
        uniform_layers=stages > 1,
        packed=packed,
    )
    params, layout = _with_layout(checkpoint, stages, offload, sharding_of)
    if (formats := models.formats_of(checkpoint.module)).is_packed:
        logger.info("weights are in %s, and products round activations to 8 bits", formats)
    eos = _eos(checkpoint.eos_token_ids, tokenizer, checkpoint.module.config)
    module, params = _with_draft_vocab(checkpoint.module, params, draft_vocab, eos)
    return Model(
        module,
        params,
        tokenizer=tokenizer,
        name=source.name,
        eos_token_ids=eos,
        pad_token_id=checkpoint.pad_token_id,
        shards=shards,
        layout=layout,
        kv_bits=kv_bits,
        mtp_head=_mtp_head_loader(source, checkpoint.module.dtype),
    )


def _mtp_head_loader(source: Source, dtype: Any) -> Callable[[], Model] | None:
    """Returns `Model.mtp_head`; the head is read once."""
    directory = source.directory
    if directory is None:
        return None

    @functools.cache
    def load(mesh: Mesh | None = None, stages: int | None = None) -> Model:
        sharding_of = None
        if mesh is not None:  # every device has the whole head
            sharding_of = placement.parameter_shardings(head().module, None, mesh)
        path = source.checkpoint_directory
        checkpoint = models.load_checkpoint(path, dtype, sharding_of=sharding_of, mtp=True)
        return Model(checkpoint.module, checkpoint.params)

    @functools.cache
    def head() -> Model:
        config = models.load_config(directory, mtp=True)
        return Model(models.build(config, dtype), None, load=load)

    return head


def _eos(stored: tuple[int, ...], tokenizer: Any, config: models.DecoderConfig) -> tuple[int, ...]:
    """Returns the tokens that end a text, which are in the vocabulary.

    They are those of the model's files, the tokenizer's EOS, and the end of a turn.
    """
    ends = (*stored, getattr(tokenizer, "eos_token_id", None), models.end_of_turn(tokenizer))
    size = config.vocab_size
    return tuple(dict.fromkeys(end for end in ends if end is not None and end < size))


def _kv_bits(kv_dtype: str | None, source: Source) -> int | None:
    """Returns the bits of an element of a model's cache; None: it is in the model's dtype."""
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"kv_dtype={kv_dtype!r} is not supported: use 'int8', or omit it")
    if kv_dtype is None:
        return None
    config = source.config
    if isinstance(config, models.EagleConfig):
        raise ValueError(f"kv_dtype={kv_dtype!r}: {source} is a learned head: omit kv_dtype")
    if config.kv_head_dim != config.head_dim:
        raise ValueError(
            f"kv_dtype={kv_dtype!r} rounds the positions that cached keys have with ALiBi: omit "
            "kv_dtype"
        )
    return KV_DTYPES[kv_dtype]


def _with_draft_vocab(
    module: nn.Module, params: Any, draft_vocab: int | None, eos_token_ids: Sequence[int] = ()
) -> tuple[nn.Module, Any]:
    """Returns module and parameters with the draft vocabulary, if there is one."""
    if draft_vocab is None:
        return module, params
    check_number("draft_vocab", draft_vocab, ge=1)
    return models.with_draft_vocab(module, params, draft_vocab, eos_token_ids)


def _check_preset(module: nn.Module, source: Source) -> None:
    """Logs that a preset's weights are random; raises ValueError if host memory is too small."""
    logger.warning(
        "%s is a preset with random weights: pass a directory, or OWNER/NAME of the Hugging Face "
        "Hub, for trained ones",
        source,
    )
    if jax.local_devices()[0].platform != "cpu":
        return
    needed, available = _bytes_of(module), offloading.free_host_memory()
    if available is not None and needed > available:
        raise ValueError(
            f"the weights of {source} need {needed / GB:.1f} GB of memory, and "
            f"{available / GB:.1f} GB are available: use a smaller preset"
            + _weights_remedy(module.config, available)
        )


def _bytes_of(module: nn.Module) -> int:
    """Returns the bytes of a module's parameters."""
    leaves = jax.tree.leaves(models.abstract_params(module))
    return sum(array_bytes(x.shape, x.dtype) for x in leaves)


def _weights_remedy(config: models.DecoderConfig, available: int) -> str:
    """Returns options of `load` with which a preset's weights need `available` bytes, as text."""
    for weight_format in (None, "int8", "int4:32"):
        formats = models.blocks_in(config, weight_format)
        if _bytes_of(models.build(config, PRESET_DTYPE, formats)) <= available:
            hint = f" and weights={weight_format!r}" if weight_format else ""
            return f", or dtype={PRESET_DTYPE!r}" + hint
    return ""


def _initialized(
    module: nn.Module, seed: int, stages: int, offload: bool, sharding_of: Any
) -> tuple[Any, Layout]:
    """Returns the random parameters of a preset, and the layout with its blocks."""
    if offload:
        params = models.init_params(module, seed, sharding_of, blocks=False)
        blocks = offloading.stack(module, models.init_blocks(module, seed), sharding_of)
        return params, Offloaded(blocks)
    if stages > 1:
        params = pipeline_stages.init_params(module, seed, stages, sharding_of)
        return params, Pipelined(stages)
    return models.init_params(module, seed, sharding_of), Resident()


def _with_layout(
    checkpoint: models.Checkpoint, stages: int, offload: bool, sharding_of: Any
) -> tuple[Any, Layout]:
    """Returns the parameters of a checkpoint, and the layout with its blocks."""
    module = checkpoint.module
    if offload:
        blocks = map(checkpoint.read_block, range(module.config.num_layers))
        return checkpoint.params, Offloaded(offloading.stack(module, blocks, sharding_of))
    if stages > 1:
        params = pipeline_stages.load_params(checkpoint, stages, sharding_of)
        return params, Pipelined(stages)
    return checkpoint.params, Resident()


def _validated_stages(
    stages: int | None, shards: int | None, mesh: Mesh | None, offload: bool
) -> int:
    """Returns the number of stages that divide the layers."""
    for name, value in (("shards", shards), ("stages", stages)):
        if value is not None and mesh is None:
            raise ValueError(f"{name}={value} requires a mesh: pass mesh, or remove {name}")
    mesh_stages = 1 if mesh is None else factored(mesh).shape[STAGE]
    if stages not in (None, 1, mesh_stages):
        raise ValueError(
            f"stages={stages} differs from the mesh's {mesh_stages}: remove stages for a target, "
            "which is divided over all of them, or use stages=1 for a small draft"
        )
    if stages is None:
        stages = mesh_stages if shards is None else 1  # only small drafts have shards
    if stages > 1 and offload:
        raise ValueError(
            f"offload={offload!r} on a mesh with stages is not supported: remove offload, or use a "
            "mesh without stages"
        )
    return stages


def offload(model: Model) -> Model:
    """Returns the model with its blocks' weights in host memory.

    For a model larger than the device, use `magicjax.load(..., offload=True)` instead.

    Args:
      model: as `magicjax.load` returns it, on one device.

    Raises:
      ValueError: the model is offloaded already or is on several devices, or host memory is
        unavailable.
    """
    if model.offload:
        raise ValueError(f"the model {model.name!r} is offloaded already")
    if model.weights.is_packed:
        raise ValueError(
            f"the matrices of {model.name!r} ({model.weights}) are packed for the CPU kernels: "
            "load it with offload=True"
        )
    if any(len(leaf.sharding.device_set) > 1 for leaf in jax.tree.leaves(model.params)):
        raise ValueError(
            f"the model {model.name!r} is on several devices: load it with offload for their mesh"
        )
    offloading.check_layers(model.config)
    params, layers = models.split_blocks(model.params)
    blocks = offloading.stack(model.module, map(jax.device_get, layers))
    return dataclasses.replace(model, params=params, layout=Offloaded(blocks))


def _is_packed(activations: str) -> bool:
    """Returns whether matrices of a GGUF file may be packed."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations={activations!r} is unknown: use 'int8' or 'float'")
    return activations == "int8"


def _check_dtype(dtype: Any) -> None:
    try:
        if dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            return
    except TypeError:
        pass  # no dtype of NumPy or JAX
    is_format = str(dtype).startswith(("int8", "int4"))
    hint = f"; to quantize the weights, pass weights={dtype!r}" if is_format else ""
    raise ValueError(
        f"dtype={dtype!r} is not supported: use float32, bfloat16 or float16, or None{hint}"
    )


def abstract_model(
    source: str | os.PathLike | Source,
    dtype: Any = None,
    *,
    weights: str | models.WeightFormat | None = None,
    shards: int | None = None,
    stages: int = 1,
    offload: bool = False,
    packed: bool = True,
    draft_vocab: int | None = None,
    kv_dtype: str | None = None,
) -> Model:
    """Returns the model of a source without weights.

    Requests are validated with it (`magicjax.decoding.preparation.validated_request`), and then
    `with_weights` loads it. The blocks of an offloaded model are shapes.

    Args:
      source, dtype, weights, shards, stages, offload, draft_vocab, kv_dtype: see `load`.
      packed: whether matrices of a GGUF file stay as they are, and others can be rounded to its
        types, as `load` does on a CPU without mesh and offload.
    """
    source = source_of(source)
    if offload:
        offloading.check_layers(source.config)
    dtype = source.stored_dtype if dtype is None else dtype
    is_packed = packed and not offload
    formats = source.matrix_formats(weights, dtype, packed=is_packed, uniform_layers=stages > 1)
    module = models.build(source.config, dtype, formats)
    layout = Offloaded(offloading.shapes(module)) if offload else Resident()
    ids = {} if source.directory is None else models.special_tokens(source.directory)
    eos = _eos(ids["eos_token_ids"], source.tokenizer, module.config) if ids else ()
    module, _ = _with_draft_vocab(module, None, draft_vocab, eos)
    return Model(
        module,
        params=None,
        tokenizer=source.tokenizer,
        name=source.name,
        eos_token_ids=eos,
        pad_token_id=ids.get("pad_token_id"),
        shards=shards,
        layout=layout,
        kv_bits=_kv_bits(kv_dtype, source),
        mtp_head=_mtp_head_loader(source, module.dtype),
        load=functools.partial(
            _load,
            source,
            dtype,
            weights=weights,
            shards=shards,
            offload=offload,
            packed=packed,
            draft_vocab=draft_vocab,
            kv_dtype=kv_dtype,
        ),
    )


def with_weights(tree: Any, mesh: AnyMesh | None = None, stages: int | None = None) -> Any:
    """Returns a model, or a drafter, with the weights of the models that were not loaded.

    Args:
      tree: a pytree of models.
      mesh, stages: arguments of `load`.
    """

    def loaded(model: Any) -> Any:
        if not isinstance(model, Model) or model.load is None or model.params is not None:
            return model
        with_params = model.load(mesh=mesh, stages=stages)
        backend = getattr(model.module, "backend", None)
        return dataclasses.replace(with_params.with_backend(backend), tokenizer=model.tokenizer)

    return jax.tree.map(loaded, tree, is_leaf=lambda x: isinstance(x, Model))
