"""Reads directories of Hugging Face's format: config.json, safetensors."""

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Collection
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from models import eagle_checkpoints, mtp_checkpoints
from models.build import ShardingFn, blocks_in, build
from models.decoder_config import DecoderConfig
from models.eagle import EagleConfig
from models.eagle_checkpoints import tensors_of
from models.families import FAMILIES, TEXT_DECODERS
from models.hf_config import drafter_head, read_config, text_decoder
from models.hf_config_keys import check_type, log_ignored
from models.hf_parameters import (
    LocatedTensor,
    named,
    parameter_reader,
    parameter_shapes,
    read_block,
    read_params,
)
from models.hf_tensors import (
    DTYPES,
    GGUF_INDEX,
    IGNORED,
    UNEMBEDDING,
    Stored,
    check_not_pointer,
    mismatch,
    read_tensor,
    separate_experts,
)
from models.mtp import MtpConfig
from models.quantized import (
    NONE,
    MatrixFormats,
    WeightFormat,
    check_fits,
    parse_weights,
    rounded_format,
)
from models.quantized_checkpoints import (
    CACHE_SETTING,
    QuantizationConfig,
    chosen_format,
    component_dtypes,
    gather,
    matrix_format,
    missing_components,
    read_quantization_config,
)
from pallas_kernels.cpu import build as cpu_build
from pallas_kernels.cpu.packed import FLOATS, ROUNDED

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARDS = "model-*-of-*.safetensors"
GENERATION = "generation_config.json"
QUANTIZATION = "quantization_config"
PACKED_DTYPES = tuple(map(np.dtype, FLOATS))
# Names of tensors in models that also read images: in the text decoder, and elsewhere.
OF_TEXT = re.compile(r"^(?:model\.)?language_model\.")
# Of images, and of sound.
OF_ENCODERS = re.compile(
    r"(?:model\.)?(?:vision_tower|multi_modal_projector|visual|audio_tower|embed_(?:vision|audio))\."
)
# Settings in generation_config.json that change a sampled text, and their values without an effect.
SAMPLING_KEYS = {
    "temperature": None,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "guidance_scale": 1.0,
    "bad_words_ids": None,
    "suppress_tokens": None,
}
SAMPLING_TYPES = {  # of those that are used
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
ADAPTER = "adapter_config.json"  # of PEFT


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model with its weights and special tokens.

    Attributes:
      module: applied as `module.apply(params, tokens, positions, attend)`.
      params: the variables, `{"params": ...}`, unboxed; without the blocks' if they are lazy.
      read_block: returns the parameters of a block, by its index, as host arrays.
      eos_token_ids: tokens that end a text; may be empty.
      bos_token_id, pad_token_id: None if not set.
    """

    module: nn.Module
    params: Any
    read_block: Callable[[int], dict[str, Any]]
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    @property
    def config(self) -> DecoderConfig:
        return self.module.config


def load_checkpoint(
    path: str | os.PathLike,
    dtype: Any = None,
    *,
    weights: str | WeightFormat | None = None,
    sharding_of: ShardingFn | None = None,
    lazy_blocks: bool = False,
    uniform_layers: bool = False,
    packed: bool = True,
    mtp: bool = False,
) -> Checkpoint:
    """Returns the model in a directory of Hugging Face format.

    Args:
      path: the directory.
      dtype: dtype of parameters and activations; None: as stored, and if the tensors have several,
        as config.json names it.
      weights: a format, or its text, to which the blocks' matrices are quantized one by one. None:
        each as it is stored; "none": dequantize all. A quantized matrix of the same bits keeps its
        zero points, and its groups may be divided; others are dequantized and rounded again.
        "Q4_0", "Q8_0": rounded to a type of GGUF files and `packed`.
      sharding_of: the sharding of a parameter, by its logical axes; each device and process reads
        only its part. None: the default device.
      lazy_blocks: do not read the blocks. `Checkpoint.read_block` reads and quantizes one of them;
        matrices that it does not quantize are memory-mapped, in the files' dtype.
      uniform_layers: a matrix has the same format in all layers, which holds those of the files
        exactly.
      packed: whether matrices of a GGUF file stay in its types on a CPU with the native kernels,
        which round activations to 8 bits. With another format, a sharding, lazy blocks or
        `uniform_layers` they do not, and those of blocks become integers with float32 scales if
        their types can.
      mtp: return the head for multi-token prediction that is stored beside the model; its matrices
        are not quantized.

    Raises FileNotFoundError for missing files, and ValueError for pickled weights, an unsupported
    config or dtype, and missing, unexpected or wrongly shaped tensors, which it lists.
    """
    path = pathlib.Path(path)
    config, quantization, stored = _open(path, mtp)
    special = special_tokens(path)
    dtype = _stored_dtype(path, stored) if dtype is None else np.dtype(dtype)
    if dtype not in map(np.dtype, DTYPES.values()):
        names = ", ".join(np.dtype(known).name for known in DTYPES.values())
        raise ValueError(f"dtype={dtype.name} is not supported: it must be one of {names}")
    if dtype == np.float64 and not jax.config.jax_enable_x64:
        raise ValueError(
            "dtype=float64 needs 64-bit mode, or JAX would round to float32: call "
            'jax.config.update("jax_enable_x64", True), or pass dtype="float32"'
        )
    weight_format, formats = parse_weights(NONE if mtp else weights), MatrixFormats()
    if packed and sharding_of is None and not lazy_blocks and not uniform_layers:
        formats = _packed(path, config, dtype, weight_format)
    if not formats:
        formats = _formats(config, quantization, stored, weight_format, uniform_layers)
    module = build(config, dtype, formats)
    read = parameter_reader(module, quantization, path)
    params = read_params(module, stored, read, sharding_of, lazy_blocks)
    read_layer = functools.partial(read_block, stored, read)
    return Checkpoint(module, params, read_layer, **special)


def stored_dtype(path: str | os.PathLike) -> np.dtype:
    """Returns the dtype of the weights in a directory of Hugging Face format.

    Of a directory whose weights are not there yet, it is that of config.json.

    Raises as `load_checkpoint`.
    """
    path = pathlib.Path(path)
    if not any(path.glob("*.safetensors")) and (dtype := _named_dtype(path)) is not None:
        return _checked_stored(path, dtype)
    return _stored_dtype(path, _open(path)[2])


def is_quantized(path: str | os.PathLike) -> bool:
    """Returns whether config.json describes quantized weights.

    Raises FileNotFoundError if it is missing.
    """
    return bool(_read_json(pathlib.Path(path) / "config.json").get(QUANTIZATION))


def matrix_formats(
    path: str | os.PathLike,
    weights: str | WeightFormat | None = None,
    dtype: Any = None,
    *,
    packed: bool = True,
    uniform_layers: bool = False,
) -> MatrixFormats:
    """Returns the formats of the matrices that `load_checkpoint` returns.

    Args:
      path, weights, dtype, packed, uniform_layers: arguments of `load_checkpoint`; packed needs a
        call without `sharding_of` and `lazy_blocks`.

    Raises as `load_checkpoint`. Reads only config.json if the checkpoint is not quantized.
    """
    path, weight_format = pathlib.Path(path), parse_weights(weights)
    config = load_config(path)
    if packed and not uniform_layers:
        packed_formats = _packed(path, config, jnp.dtype(dtype or np.float32), weight_format)
        if packed_formats:
            return packed_formats
    if not is_quantized(path):
        return blocks_in(config, rounded_format(weight_format))
    return _formats(*_open(path), weight_format, uniform_layers)


def _packed(
    path: pathlib.Path, config: DecoderConfig, dtype: Any, weight_format: WeightFormat | str | None
) -> MatrixFormats:
    """Returns the types of the matrices that are packed.

    Args:
      path: the directory, of a GGUF file if `weight_format` is None.
      config, dtype: the model's.
      weight_format: one of `ROUNDED`, to which matrices of blocks are rounded; None: the types of
        the file.
    """
    if weight_format not in (None, *ROUNDED):
        return MatrixFormats()
    if dtype not in PACKED_DTYPES or not cpu_build.is_default():
        return MatrixFormats()
    if (path / GGUF_INDEX).is_file():
        from models.gguf import files as gguf_files  # imports the packages gguf and tokenizers

        return gguf_files.packed_types(path, config, weight_format)
    return MatrixFormats() if weight_format is None else _rounded_types(config, weight_format)


def _rounded_types(config: DecoderConfig, weight_format: str) -> MatrixFormats:
    """Returns the type of the matrices of blocks, none for a model that has experts or is a head.

    Raises ValueError for a matrix that does not fit it.
    """
    if config.num_experts is not None or isinstance(config, EagleConfig):
        return MatrixFormats()
    shapes, types = parameter_shapes(config), []
    for tensor in tensors_of(config):
        if tensor.is_block_matrix and tensor.matrix is not None:
            shape = shapes[tensor.path].value.shape
            inputs = math.prod(shape[-tensor.inputs :])
            check_fits(weight_format, tensor.matrix, math.prod(shape) // inputs, inputs)
            types.append((tensor.matrix, weight_format))
    return MatrixFormats(tuple(types))


def load_config(path: str | os.PathLike, *, mtp: bool = False) -> DecoderConfig:
    """Returns the config in a directory of Hugging Face format; reads only config.json.

    Args:
      path: the directory.
      mtp: of the head for multi-token prediction beside the model, not of the model; then also
        reads the names of the tensors, if they are there.

    Raises FileNotFoundError if it is missing, and ValueError if it is not supported, or there is no
    such head.
    """
    path = pathlib.Path(path)
    file = path / "config.json"
    raw = _read_json(file)
    _refuse_adapter(path)
    raw = {key: value for key, value in raw.items() if key != QUANTIZATION}
    read = functools.partial(read_config, file=str(file))
    try:
        raw = dict(text_decoder(raw))
        if mtp or mtp_checkpoints.is_head(raw):
            return mtp_checkpoints.read_config(raw, _names_in(path), read)
        if eagle_checkpoints.may_be_head(raw):
            tensors = eagle_checkpoints.canonical(_tensors_in(path))
            if eagle_checkpoints.is_head(raw, tensors):
                return eagle_checkpoints.read_config(raw, tensors, read)
        return read(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _names_in(path: pathlib.Path) -> Collection[str]:
    """Returns the names of all tensors, none without files; of a GGUF file only those of a head."""
    if not (path / GGUF_INDEX).is_file():
        return _tensors_in(path)
    from models.gguf import files as gguf_files

    return gguf_files.head_names(path) or (GGUF_INDEX,)


def _refuse_adapter(path: pathlib.Path) -> None:
    """Raises ValueError for a directory with the changes of a model's weights."""
    if (path / ADAPTER).is_file():
        raise ValueError(
            f"{path} has a LoRA adapter ({ADAPTER}), which is not supported: merge it into its "
            "base model with merge_and_unload of PEFT and save_pretrained; if the weights are "
            f"merged, remove {ADAPTER}"
        )


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        _refuse_adapter(path.parent)
        raise FileNotFoundError(f"{path} does not exist: a checkpoint directory must hold it")
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        check_not_pointer(path)
        raise ValueError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} has no settings, but a {type(raw).__name__}: download it again")
    return raw


def special_tokens(path: pathlib.Path) -> dict[str, Any]:
    """Returns the ids `eos_token_ids`, `bos_token_id` and `pad_token_id` as in `Checkpoint`.

    generation_config.json has precedence over config.json.

    Raises ValueError for a value that is not a token id.
    """
    ids = dict[str, Any](eos_token_id=(), bos_token_id=None, pad_token_id=None)
    for file in (path / "config.json", path / GENERATION):
        settings = _read_json(file) if file == path / "config.json" or file.is_file() else {}
        for key in ids:
            if (value := settings.get(key)) is not None:
                ids[key] = _token_ids(file, key, value)
    return {"eos_token_ids": ids.pop("eos_token_id"), **ids}


def _token_ids(file: pathlib.Path, key: str, value: Any) -> Any:
    """Returns the id that a file names, of `eos_token_id` all of them."""
    is_eos = key == "eos_token_id"
    several = value if is_eos and isinstance(value, list) else [value]
    least = 0 if is_eos else -1  # in LLaMA 1, for no token
    if any(not isinstance(i, int) or isinstance(i, bool) or i < least for i in several):
        expected = "a token id, or an array of token ids" if is_eos else "a token id"
        raise ValueError(f"{file} has {key}={json.dumps(value)}: it must be {expected}")
    return tuple(several) if is_eos else value


def sampling_defaults(path: pathlib.Path) -> dict[str, Any]:
    """Returns the settings of sampling in generation_config.json that change the text.

    Those without an effect, such as a repetition penalty of 1, are omitted. Without `do_sample`
    they are taken as asked for, as by the cards of many models; if it is false, there are none.

    Raises ValueError for a value of another type.
    """
    if not (path / GENERATION).is_file():
        return {}
    generation = _read_json(path / GENERATION)
    sample = generation.get("do_sample")
    if sample is False:
        return {}
    if sample:
        generation = {"temperature": 1.0} | {k: x for k, x in generation.items() if x is not None}
    settings = {key: generation.get(key) for key in SAMPLING_KEYS}
    settings = {key: x for key, x in settings.items() if x is not None and x != SAMPLING_KEYS[key]}
    for key, expected_type in SAMPLING_TYPES.items():
        if key in settings:
            check_type(key, settings[key], expected_type, GENERATION)
    return settings


def weight_map(path: pathlib.Path) -> dict[str, str]:
    """Returns the name of each tensor's file as the index has it; {} without an index."""
    if not (path / INDEX).is_file():
        return {}
    files = _read_json(path / INDEX).get("weight_map")
    if not files or not isinstance(files, dict):
        raise ValueError(f"{path / INDEX} has no weight_map: download it again")
    for name, file in files.items():
        if not isinstance(file, str):
            raise ValueError(
                f"{path / INDEX} has {json.dumps(file)} as the file of {name}: download it again"
            )
    return files


def _weight_files(path: pathlib.Path) -> list[pathlib.Path]:
    if names := sorted(set(weight_map(path).values())):
        if missing := [name for name in names if not (path / name).is_file()]:
            instead = f", or remove the index to read {SINGLE}"
            raise FileNotFoundError(
                f"{path / INDEX} names files that do not exist: {missing}; download them"
                + instead * (path / SINGLE).is_file()
            )
        return [path / name for name in names]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    pickles = sorted(p.name for pattern in PICKLES for p in path.glob(pattern))
    if pickles:
        raise ValueError(
            f"{path} has only weights in pickle format ({', '.join(pickles)}), which can execute "
            "code: convert them to safetensors with save_pretrained of transformers"
        )
    if shards := sorted(file.name for file in path.glob(SHARDS)):
        raise FileNotFoundError(
            f"{path} has {shards[0]}, and {INDEX} does not exist, which names all such files: "
            "download it"
        )
    raise FileNotFoundError(f"{path} has no weights: it must hold {SINGLE} or {INDEX}")


def _tensors_in(path: pathlib.Path) -> dict[str, Stored]:
    """Returns all tensors by their names in the files, {} without files; reads only headers.

    Of several files that have a tensor, the one that the index names is read.
    """
    stored = {}
    files = _weight_files(path) if any(path.glob("*.safetensors*")) else []
    owners = weight_map(path) if files else {}
    for file in files:
        try:
            with safetensors.safe_open(file, "numpy") as handle:
                for name in handle.keys():
                    if name in stored and path / owners.get(name, file.name) != file:
                        continue
                    tensor = handle.get_slice(name)
                    stored[name] = Stored(file, name, tensor.get_dtype(), tuple(tensor.get_shape()))
        except safetensors.SafetensorError as error:
            check_not_pointer(file)
            raise ValueError(
                f"{file} is not a complete safetensors file ({error}): download it again"
            ) from error
    return stored


def _scan(path: pathlib.Path, config: DecoderConfig) -> dict[str, Stored]:
    """Returns all tensors by full name; reads only the files' headers."""
    if (path / GGUF_INDEX).is_file():
        from models.gguf import files as gguf_files

        weights = gguf_files.weights_of(path, config).items()
        return {
            tensor: Stored(path / GGUF_INDEX, tensor, *shape)
            for name, weight in weights
            for tensor, shape in weight.shapes(name).items()
        }
    _weight_files(path)  # raises if there are none
    stored = _tensors_in(path)
    if isinstance(config, EagleConfig) and not isinstance(config, MtpConfig):
        unused = eagle_checkpoints.unused(config)
        canonical = eagle_checkpoints.canonical(stored).items()
        return {name: location for name, location in canonical if name not in unused}
    if config.family in TEXT_DECODERS.values():
        stored = {OF_TEXT.sub("", n): x for n, x in stored.items() if not OF_ENCODERS.match(n)}
    if config.shared_kv_layers:
        stored = {n: x for n, x in stored.items() if not _is_unread(n, config)}
    if "delta_conv" in FAMILIES[config.family].names:
        stored = separate_experts(stored)
    prefix = FAMILIES[config.family].prefix
    known = prefix, UNEMBEDDING.removesuffix("weight"), mtp_checkpoints.PREFIX
    named = {n if n.startswith(known) else prefix + n: location for n, location in stored.items()}
    return mtp_checkpoints.of_model(config, named)


def _is_unread(name: str, config: DecoderConfig) -> bool:
    """Returns whether a tensor has keys or values of a layer that reads those of another one."""
    found = re.search(r"layers\.(\d+)\.self_attn\.(?:[kv]_proj|[kv]_norm)\.", name)
    if found is None or int(found[1]) >= config.num_layers:
        return False
    return config.kv_sources[int(found[1])] is not None


def _open(
    path: pathlib.Path, mtp: bool = False
) -> tuple[DecoderConfig, QuantizationConfig | None, list[LocatedTensor]]:
    """Returns config, quantization and all tensors of the model in a directory, or of its head.

    Reads the files' headers, a tied matrix that is stored twice, and biases that should be zero.
    """
    settings = _read_json(path / "config.json").get(QUANTIZATION)
    quantization, config = read_quantization_config(settings), load_config(path, mtp=mtp)
    if settings and settings.get(CACHE_SETTING):
        key = f"{CACHE_SETTING} of {QUANTIZATION}"
        log_ignored(str(path / "config.json"), (key,), "KV caches are not in float8")
    stored = _scan(path, config)
    is_head = any(location.name == eagle_checkpoints.FC for location in stored.values())
    if is_head and not isinstance(config, EagleConfig):  # whose config is a model's
        raise ValueError(f"{path}: {drafter_head('EAGLE-1 or EAGLE-2')}")
    return config, quantization, _match(config, stored, quantization)


def _formats(
    config: DecoderConfig,
    quantization: QuantizationConfig | None,
    stored: list[LocatedTensor],
    weights: WeightFormat | str | None,
    uniform_layers: bool,
) -> MatrixFormats:
    """Returns the formats of a module's matrices; raises if they cannot be `weights`.

    Args:
      config, quantization, stored: the checkpoint's.
      weights: as `parse_weights` returns it.
      uniform_layers: as in `load_checkpoint`.
    """
    shapes = parameter_shapes(config)
    formats_by_matrix = dict[str, list[tuple[WeightFormat | None, int]]]()
    for tensor, location in stored:
        if tensor.is_block_matrix:
            shape, weight_format = tensor.matrix_shape(shapes[tensor.path].value.shape), None
            if not isinstance(location, Stored):
                with named(tensor):
                    weight_format = matrix_format(quantization, location, shape)
            formats_by_matrix.setdefault(str(tensor.matrix), []).append((weight_format, shape[1]))
    is_quantized = any(fmt for formats in formats_by_matrix.values() for fmt, _ in formats)
    if weights == NONE or not is_quantized:
        return blocks_in(config, rounded_format(weights))
    texts, in_blocks = list[tuple[str, str]](), dict[str, Any]()
    for path, weight_formats in formats_by_matrix.items():
        in_blocks.setdefault(path.partition("/")[2], []).extend(weight_formats)
    for path, weight_formats in formats_by_matrix.items():
        name = path.partition("/")[2]
        if uniform_layers:
            weight_format = chosen_format(name, in_blocks[name], weights)
        else:
            weight_format = chosen_format(path, weight_formats, weights)
        texts += [] if weight_format is None else [(path, str(weight_format))]
    return MatrixFormats(tuple(texts))


def _match(
    config: DecoderConfig, stored: dict[str, Stored], quantization: QuantizationConfig | None
) -> list[LocatedTensor]:
    """Returns each tensor of the config with its location in the files; raises with all mismatches.

    The location of a quantized matrix is that of its components.
    """
    needed, shapes = {t.name: t for t in tensors_of(config)}, parameter_shapes(config)
    stored, matrices = gather(stored)
    if matrices and quantization is None:
        raise ValueError(
            f"{next(iter(matrices))} is quantized, and config.json has no {QUANTIZATION}: add the "
            "one of the checkpoint, or the contents of its quantize_config.json or "
            "quant_config.json with quant_method"
        )
    if config.tie_embeddings:
        stored = _fold_tied(tensors_of(config)[0].name, stored)
    problems = [f"missing {name}" for name in needed if name not in stored and name not in matrices]
    problems += [f"unexpected {name}" for name in matrices if name not in needed]
    for name, components in matrices.items():
        problems += [
            f"missing {name.removesuffix('weight')}{p}" for p in missing_components(components)
        ]
        for suffix, location in components.items():
            if location.dtype not in (dtypes := component_dtypes(suffix, components)):
                names = ", ".join(dtypes)
                problems.append(f"{location.name} has dtype {location.dtype}, supported: {names}")
    for name, location in stored.items():
        if name not in needed:
            if not IGNORED.fullmatch(name) and not _is_empty_bias(name, location, matrices):
                problems.append(f"unexpected {location.name}")
            continue
        expected = needed[name].stored_shape(shapes[needed[name].path].value.shape)
        if location.shape != expected:
            problems.append(f"{location.name} has shape {location.shape}, expected {expected}")
        allowed = (
            ["I32", "I64"] if shapes[needed[name].path].value.dtype == np.int32 else list(DTYPES)
        )
        if location.dtype not in allowed:
            names = ", ".join(allowed)
            problems.append(f"{location.name} has dtype {location.dtype}, supported: {names}")
    if problems:
        raise mismatch("weights", "config.json", problems, _prefix_hint(problems))
    sources: dict[str, Any] = {**stored, **matrices}
    return [(tensor, sources[tensor.name]) for tensor in tensors_of(config)]


def _prefix_hint(problems: list[str]) -> str:
    """Returns the prefix without which the unexpected tensors are the missing ones, as a text."""
    missing, unexpected = (
        {name for problem in problems for name in [problem.removeprefix(label)] if name != problem}
        for label in ("missing ", "unexpected ")
    )
    first = min(missing, default="")
    for prefix in sorted(name.removesuffix(first) for name in unexpected if name.endswith(first)):
        if missing and prefix and {prefix + name for name in missing} <= unexpected:
            return f"; the files' names begin with {prefix!r}: save the tensors without it"
    return ""


def _is_empty_bias(name: str, location: Stored, matrices: dict[str, Any]) -> bool:
    """Returns whether a bias is zero, as AutoGPTQ adds to all matrices."""
    module, _, parameter = name.rpartition(".")
    return (
        parameter == "bias" and f"{module}.weight" in matrices and not read_tensor(location).any()
    )


def _fold_tied(embedding: str, stored: dict[str, Stored]) -> dict[str, Stored]:
    """Returns the tensors with only one of the two names of a tied matrix; both must be equal."""
    stored = dict(stored)
    output = stored.pop(UNEMBEDDING, None)
    if output is None:
        return stored
    other = stored.setdefault(embedding, output)
    same = other is output or np.array_equal(_bits(other), _bits(output))
    if not same:
        raise ValueError(
            f"config.json ties the embeddings, but {output.name} differs from {other.name}: set "
            "tie_word_embeddings to false to use both, or remove the first"
        )
    return stored


def _bits(location: Stored) -> np.ndarray:
    """Returns the values as bytes, in which NaN equals itself."""
    return np.ascontiguousarray(read_tensor(location)).view(np.uint8)


def _named_dtype(path: pathlib.Path) -> np.dtype | None:
    """Returns the dtype that config.json names; None without one."""
    raw = _read_json(path / "config.json")
    name = str(raw.get("dtype") or raw.get("torch_dtype")).removeprefix("torch.")
    return {np.dtype(known).name: np.dtype(known) for known in DTYPES.values()}.get(name)


def _checked_stored(path: pathlib.Path, dtype: np.dtype) -> np.dtype:
    """Returns the dtype of the files; raises ValueError if JAX would round it."""
    if dtype == np.float64 and not jax.config.jax_enable_x64:
        raise ValueError(
            f"{path} has weights in float64, which needs JAX's 64-bit mode: pass dtype='float32'"
        )
    return dtype


def _stored_dtype(path: pathlib.Path, stored: list[LocatedTensor]) -> np.dtype:
    """Returns the dtype of the tensors; if they have several, the one that config.json names.

    Raises as `_checked_stored`, and ValueError for several dtypes if config.json names none.
    """
    plain = [location for _, location in stored if isinstance(location, Stored)]
    names = sorted({location.dtype for location in plain if location.dtype in DTYPES})
    if len(names) > 1:
        if (dtype := _named_dtype(path)) is not None:
            return _checked_stored(path, dtype)
        raise ValueError(
            f"the tensors have several dtypes ({', '.join(names)}): pass dtype to convert them"
        )
    return _checked_stored(path, np.dtype(DTYPES[names[0]]))
