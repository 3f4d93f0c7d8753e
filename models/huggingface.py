"""Checkpoints in Hugging Face's directory format: config.json, safetensors, tokenizer files.

Files are memory-mapped, and each device receives only its part of every tensor, so that reading a
model needs little host memory. A round trip is bit-exact.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from models.build import BLOCK, ShardingFn, abstract_params, build
from models.decoder import DecoderConfig
from models.families import FAMILIES
from models.hf_config import read_config, write_config
from models.hf_tensors import IGNORED, UNEMBEDDING, Tensor, tensors_of, to_stored
from models.quantized import WeightFormat, quantize

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
DTYPES = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64}
STORED = DTYPES | {"I32": np.int32}  # integers keep their dtype


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model with its weights and special tokens.

    Attributes:
      module: applied as `module.apply(params, tokens, positions, attend)`.
      params: the variables, `{"params": ...}`, unboxed.
      eos_token_ids: tokens that end a text; may be empty.
      bos_token_id, pad_token_id: None if not set.
    """

    module: nn.Module
    params: Any
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    @property
    def config(self) -> DecoderConfig:
        return self.module.config


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A tensor in a file."""

    file: pathlib.Path
    name: str  # in the file, perhaps without the family's prefix
    dtype: str
    shape: tuple[int, ...]


def load_checkpoint(
    path: str | os.PathLike,
    dtype: Any = None,
    *,
    weights: WeightFormat | None = None,
    sharding_of: ShardingFn | None = None,
    mapped_blocks: bool = False,
) -> Checkpoint:
    """Returns the model in a directory of Hugging Face format.

    Args:
      path: the directory.
      dtype: of parameters and activations; None: as stored.
      weights: quantize the blocks' matrices, one by one; None: as stored.
      sharding_of: the sharding of a parameter, by its logical axes; each device and process reads
        only its part. None: the default device.
      mapped_blocks: return the blocks' parameters as memory-mapped numpy arrays, in the files'
        dtype, without reading or quantizing them.

    Raises FileNotFoundError for missing files, and ValueError for pickled weights, an unsupported
    config or dtype, and missing, unexpected or wrongly shaped tensors, which it lists.
    """
    path = pathlib.Path(path)
    config = load_config(path)
    stored = _match(config, _scan(path, config))
    dtype = _common_dtype(stored) if dtype is None else np.dtype(dtype)
    if dtype not in map(np.dtype, DTYPES.values()):
        names = ", ".join(np.dtype(known).name for known in DTYPES.values())
        raise ValueError(f"dtype={dtype.name} is not supported: it must be one of {names}")
    if dtype == np.float64 and not jax.config.jax_enable_x64:
        raise ValueError(
            "dtype=float64 needs 64-bit mode, or JAX would round to float32: call "
            'jax.config.update("jax_enable_x64", True), or pass dtype="float32"'
        )
    module = build(config, dtype, weights)
    params = _read_params(module, stored, sharding_of, mapped_blocks)
    return Checkpoint(module, params, **_special_tokens(path))


def stored_dtype(path: str | os.PathLike) -> np.dtype:
    """Returns the dtype of the weights in a directory of Hugging Face format.

    Raises as `load_checkpoint`.
    """
    path = pathlib.Path(path)
    config = load_config(path)
    return _common_dtype(_match(config, _scan(path, config)))


def load_config(path: str | os.PathLike) -> DecoderConfig:
    """Returns the config in a directory of Hugging Face format; reads only config.json.

    Raises FileNotFoundError if it is missing, and ValueError if it is not supported.
    """
    return read_config(_read_json(pathlib.Path(path) / "config.json"))


def save_checkpoint(
    path: str | os.PathLike,
    module: nn.Module,
    params: Any,
    *,
    eos_token_ids: Sequence[int] = (),
    bos_token_id: int | None = None,
    pad_token_id: int | None = None,
    tokenizer: Any = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Writes a directory of Hugging Face format, atomically.

    Args:
      path: the directory to create.
      module, params: as for `apply`; values keep their dtype and are unboxed.
      eos_token_ids, bos_token_id, pad_token_id: for config.json and generation_config.json.
      tokenizer: an object with `save_pretrained`.
      max_shard_bytes: larger weights are split over several files with an index.
      overwrite: replace an existing directory.

    Raises FileExistsError if `path` exists and `overwrite` is False, and ValueError if the
    parameters are quantized or not the module's, or its family cannot express its config.
    """
    path = pathlib.Path(path)
    if module.weights is not None:
        raise ValueError(
            f"a model with weights={str(module.weights)!r} cannot be saved: load it without weights"
        )
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: choose another path, or pass overwrite=True")
    values = _named_params(module, params)
    special = {
        "bos_token_id": bos_token_id,
        "eos_token_id": _int_or_list(eos_token_ids),
        "pad_token_id": pad_token_id,
    }
    dtype = values[0][1].dtype.name
    raw = {**write_config(module.config), **special, "torch_dtype": dtype}
    with _replacing(path) as partial:
        _write_json(partial / "config.json", raw)
        _write_json(partial / "generation_config.json", special)
        _write_tensors(partial, values, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)


def load_tokenizer(path: str | os.PathLike) -> Any:
    """Returns the directory's transformers tokenizer, or None if there is none.

    Raises ValueError if its files are incomplete or damaged.
    """
    path = pathlib.Path(path)
    described = (path / "tokenizer_config.json").is_file()
    if not described and not (path / "tokenizer.json").is_file():
        return None
    # Without torch, transformers recommends installing it, but tokenizers do not need it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers  # takes seconds to import, and is needed only for text

    try:
        if described:
            return transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    except ImportError:
        raise  # names the package that this tokenizer needs
    except Exception as error:  # `tokenizers` raises no other type for a damaged file
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the tokenizer in {path} cannot be read ({reason}): replace tokenizer.json and "
            "tokenizer_config.json by the model's"
        ) from error


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a checkpoint directory must hold it")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): download it again") from error


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _special_tokens(path: pathlib.Path) -> dict[str, Any]:
    """Returns token ids for `Checkpoint`; generation_config.json has precedence."""
    settings = _read_json(path / "config.json")
    if (path / "generation_config.json").is_file():
        generation = _read_json(path / "generation_config.json")
        settings |= {key: value for key, value in generation.items() if value is not None}
    eos = settings.get("eos_token_id")
    eos = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    others = {key: settings.get(key) for key in ("bos_token_id", "pad_token_id")}
    return {"eos_token_ids": eos, **others}


def _int_or_list(ids: Sequence[int]) -> int | list[int] | None:
    ids = [int(i) for i in ids]
    return ids[0] if len(ids) == 1 else ids or None


def _weight_files(path: pathlib.Path) -> list[pathlib.Path]:
    if (path / INDEX).is_file():
        names = sorted(set(_read_json(path / INDEX)["weight_map"].values()))
        if missing := [name for name in names if not (path / name).is_file()]:
            raise FileNotFoundError(
                f"{path / INDEX} names files that do not exist: {missing}; download them"
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
    raise FileNotFoundError(f"{path} has no weights: it must hold {SINGLE} or {INDEX}")


def _scan(path: pathlib.Path, config: DecoderConfig) -> dict[str, _Stored]:
    """Returns all tensors by full name; reads only the files' headers."""
    stored, prefix = {}, FAMILIES[config.family].prefix
    for file in _weight_files(path):
        try:
            with safetensors.safe_open(file, "numpy") as handle:
                for name in handle.keys():
                    part = handle.get_slice(name)
                    where = _Stored(file, name, part.get_dtype(), tuple(part.get_shape()))
                    whole = name.startswith(prefix) or name == UNEMBEDDING
                    stored[name if whole else prefix + name] = where
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{file} is not a complete safetensors file ({error}): download it again"
            ) from error
    return stored


@functools.lru_cache(maxsize=8)  # tracing a model of 80 layers is slow
def _shapes(
    config: DecoderConfig, weights: WeightFormat | None = None
) -> dict[tuple[str, ...], Any]:
    """Returns boxes with shape and logical axes of every parameter, by path."""
    boxed = abstract_params(build(config, weights=weights))["params"]
    return flax.traverse_util.flatten_dict(boxed)


def _match(config: DecoderConfig, stored: dict[str, _Stored]) -> list[tuple[Tensor, _Stored]]:
    """Returns each tensor of the config with its place in the files; raises with all mismatches."""
    needed, shapes = {t.name: t for t in tensors_of(config)}, _shapes(config)
    if config.tie_embeddings:
        stored = _fold_tied(tensors_of(config)[0].name, stored)
    problems = [f"missing {name}" for name in needed if name not in stored]
    for name, where in stored.items():
        if name not in needed:
            if not IGNORED.fullmatch(name):
                problems.append(f"unexpected {where.name}")
            continue
        expected = needed[name].stored_shape(shapes[needed[name].path].value.shape)
        if where.shape != expected:
            problems.append(f"{where.name} has shape {where.shape}, expected {expected}")
        allowed = ["I32"] if shapes[needed[name].path].value.dtype == np.int32 else list(DTYPES)
        if where.dtype not in allowed:
            names = ", ".join(allowed)
            problems.append(f"{where.name} has dtype {where.dtype}, supported: {names}")
    if problems:
        raise ValueError(
            f"the weights do not match config.json ({len(problems)} problems):\n  "
            + "\n  ".join(problems)
        )
    return [(tensor, stored[tensor.name]) for tensor in tensors_of(config)]


def _fold_tied(embedding: str, stored: dict[str, _Stored]) -> dict[str, _Stored]:
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


def _read(where: _Stored) -> np.ndarray:
    with safetensors.safe_open(where.file, "numpy") as handle:
        return handle.get_tensor(where.name)


def _bits(where: _Stored) -> np.ndarray:
    """Returns the values as bytes, in which NaN equals itself."""
    return np.ascontiguousarray(_read(where)).view(np.uint8)


def _common_dtype(stored: list[tuple[Tensor, _Stored]]) -> np.dtype:
    names = sorted({where.dtype for _, where in stored if where.dtype in DTYPES})
    if len(names) > 1:
        raise ValueError(
            f"the tensors have several dtypes ({', '.join(names)}): pass dtype to convert them"
        )
    return np.dtype(DTYPES[names[0]])


def _read_params(
    module: nn.Module,
    stored: list[tuple[Tensor, _Stored]],
    sharding_of: ShardingFn | None,
    mapped_blocks: bool,
) -> Any:
    shapes, flat = _shapes(module.config, module.weights), dict[tuple[str, ...], Any]()
    files: dict[pathlib.Path, dict[str, np.ndarray]] = {}
    for tensor, where in stored:
        if where.file not in files:
            files[where.file] = _mapped(where.file)
        box = shapes[tensor.path]
        values = tensor.to_parameter(files[where.file][where.name], box.value.shape)
        if mapped_blocks and tensor.path[0].startswith(BLOCK):
            flat[tensor.path] = values
            continue
        parts = {tensor.path: values}
        scale = (*tensor.path[:-1], "scale")
        if module.weights is not None and tensor.path[-1] == "weight" and scale in shapes:
            inputs = values.ndim - (len(shapes[scale].value.shape) - 1)
            matrix = quantize(values, module.weights, inputs)
            parts = {tensor.path: matrix["weight"], scale: matrix["scale"]}
        for path, values in parts.items():
            box = shapes[path]
            stored_as_is = values.dtype == np.int32 or len(parts) > 1
            dtype = values.dtype if stored_as_is else module.dtype
            flat[path] = _put(values, dtype, sharding_of and sharding_of(box.names))
    return {"params": flax.traverse_util.unflatten_dict(flat)}


def _mapped(file: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns a file's tensors by name as memory-mapped views, which `safetensors` does not offer.

    The format: the header's length in 8 bytes, the header as JSON with each tensor's dtype, shape
    and byte range, and the tensors.
    """
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    raw = np.memmap(file, np.uint8, "r", offset=8 + size)
    header.pop("__metadata__", None)
    return {
        name: raw[slice(*entry["data_offsets"])]
        .view(STORED[entry["dtype"]])
        .reshape(entry["shape"])
        for name, entry in header.items()
        if entry["dtype"] in STORED
    }


def _put(values: np.ndarray, dtype: Any, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Returns a device array; each device's part is copied.

    Without a copy JAX may alias the memory map: later writes to the file would change the model.
    """
    if sharding is None:
        return jnp.array(values, dtype)

    def part(index):
        return np.array(values[index], dtype, order="C")

    return jax.make_array_from_callback(values.shape, sharding, part)


def _named_params(module: nn.Module, params: Any) -> list[tuple[Tensor, Any]]:
    """Returns the parameters in file order; raises unless they are the module's."""
    shapes = {path: box.value.shape for path, box in _shapes(module.config).items()}
    flat = flax.traverse_util.flatten_dict(nn.meta.unbox(params)["params"])
    problems = [f"missing {'/'.join(p)}" for p in shapes if p not in flat]
    problems += [f"unexpected {'/'.join(p)}" for p in flat if p not in shapes]
    problems += [
        f"{'/'.join(p)} has shape {flat[p].shape}, expected {shapes[p]}"
        for p in shapes
        if p in flat and tuple(flat[p].shape) != tuple(shapes[p])
    ]
    if problems:
        raise ValueError("the parameters are not the module's:\n  " + "\n  ".join(problems))
    return [(tensor, flat[tensor.path]) for tensor in tensors_of(module.config)]


def _write_tensors(
    path: pathlib.Path, values: list[tuple[Tensor, Any]], max_shard_bytes: int
) -> None:
    stored: dict[str, list[tuple[Tensor, Any]]] = {}  # a tensor may have several parameters
    for tensor, value in values:
        stored.setdefault(tensor.name, []).append((tensor, value))
    shards: list[list[str]] = [[]]
    size = 0
    for name, parts in stored.items():
        nbytes = sum(value.nbytes for _, value in parts)
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    where: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else SINGLE
        arrays = {}
        for name in shard:
            tensors, parameters = zip(*stored[name], strict=True)
            arrays[name] = to_stored(tensors, [np.asarray(jax.device_get(x)) for x in parameters])
        # Hugging Face requires the framework's name in the metadata.
        safetensors.numpy.save_file(arrays, path / file, metadata={"format": "pt"})
        where |= dict.fromkeys(arrays, file)
    if len(shards) > 1:
        total = sum(value.nbytes for _, value in values)
        _write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


@contextlib.contextmanager
def _replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary directory, which replaces `path` if the body succeeds."""
    mark = uuid.uuid4().hex[:8]
    partial = path.parent / f".{path.name}.{mark}.partial"
    partial.mkdir(parents=True)
    try:
        yield partial
        if path.exists():
            old = path.parent / f".{path.name}.{mark}.old"
            path.rename(old)
            partial.rename(path)
            shutil.rmtree(old)
        else:
            partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
