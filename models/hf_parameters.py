"""Reads the parameters of a checkpoint: each tensor, or each part of a quantized matrix, once.

Files are memory-mapped, and each device receives only its part of every tensor, so that reading a
model needs the host memory of a few parameters.
"""

import collections
import concurrent.futures
import contextlib
import functools
import itertools
import math
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from models.build import ShardingFn, abstract_params, build
from models.decoder_config import DecoderConfig
from models.hf_tensors import GGUF_INDEX, Stored, Tensor, mapped_tensors
from models.quantized import BLOCK, MatrixFormats, WeightFormat, quantize
from models.quantized_checkpoints import (
    Matrix,
    QuantizationConfig,
    holds,
    parameters,
    read_matrix,
)
from pallas_kernels.cpu.packed import pack

MAX_READERS = 4  # threads that read and dequantize parameters, one each

Location = Stored | dict[str, Stored]  # of a tensor, or of the components of a quantized matrix
LocatedTensor = tuple[Tensor, Location]
Read = Callable[[Tensor, Location], dict[tuple[str, ...], np.ndarray]]


@functools.lru_cache(maxsize=8)  # tracing a model of 80 layers is slow
def parameter_shapes(
    config: DecoderConfig, weights: MatrixFormats | None = None
) -> dict[tuple[str, ...], Any]:
    """Returns boxes with shape and logical axes of every parameter, by path."""
    boxed = abstract_params(build(config, weights=weights))["params"]
    return flax.traverse_util.flatten_dict(boxed)


def read_params(
    module: nn.Module,
    stored: list[LocatedTensor],
    read: Read,
    sharding_of: ShardingFn | None,
    lazy_blocks: bool,
) -> Any:
    """Returns the variables of a module, on the devices.

    Args:
      module: that has them.
      stored: each tensor and its location.
      read: the result of `parameter_reader`.
      sharding_of: the sharding of a parameter, by its logical axes; None: the default device.
      lazy_blocks: leave the blocks to `read_block`.
    """
    boxes = parameter_shapes(module.config, module.weights)
    flat = dict[tuple[str, ...], jax.Array]()

    def put(read_in_a_thread: concurrent.futures.Future) -> None:
        for arrays in read_in_a_thread.result():
            for path, values in arrays.items():
                is_integer = values.dtype in (np.int32, np.uint8)  # of a map, or packed
                dtype = values.dtype if is_integer or len(arrays) > 1 else module.dtype
                flat[path] = _put(values, dtype, sharding_of and sharding_of(boxes[path].names))

    wanted = (
        tensors
        for tensors in _by_parameter(stored)
        if not (lazy_blocks and tensors[0][0].path[0].startswith(BLOCK))
    )
    # The parameters of a fused matrix are read in one thread, which unpacks it once.
    by_tensor = [list(group) for _, group in itertools.groupby(wanted, lambda x: x[0][0].name)]
    readers = min(MAX_READERS, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(readers) as pool:
        reading = collections.deque[concurrent.futures.Future]()
        for parameters in by_tensor:
            reading.append(
                pool.submit(lambda x: [_read_parameter(each, read) for each in x], parameters)
            )
            if len(reading) > readers:
                put(reading.popleft())  # in this thread, to which JAX's settings can apply alone
        for each in reading:
            put(each)
    return {"params": flax.traverse_util.unflatten_dict(flat)}


def read_block(stored: list[LocatedTensor], read: Read, index: int) -> dict[str, Any]:
    """Returns the parameters of a layer, on the host."""
    flat = dict[tuple[str, ...], np.ndarray]()
    for tensors in _by_parameter(stored):
        if tensors[0][0].path[0] == f"{BLOCK}{index}":
            values_by_path = _read_parameter(tensors, read)
            flat |= {path[1:]: values for path, values in values_by_path.items()}
    return flax.traverse_util.unflatten_dict(flat)


def _by_parameter(stored: list[LocatedTensor]) -> Iterator[list[LocatedTensor]]:
    """Yields the tensors of each parameter, one unless each expert has its own."""
    for _, group in itertools.groupby(stored, lambda group: group[0].path):
        yield list(group)


def _read_parameter(tensors: list[LocatedTensor], read: Read) -> dict[tuple[str, ...], np.ndarray]:
    """Returns the parameters of the tensors of `_by_parameter`, as `parameter_reader` does."""
    if tensors[0][0].expert is None:
        return read(*tensors[0])
    by_expert = [read(*pair) for pair in tensors]
    # Scales and zero points have their groups first.
    return {
        path: np.stack([arrays[path] for arrays in by_expert], int(path[-1] in ("scale", "zero")))
        for path in by_expert[0]
    }


def parameter_reader(
    module: nn.Module, quantization: QuantizationConfig | None, path: pathlib.Path
) -> Read:
    """Returns a function that returns the parameters of a tensor on the host, by path.

    A quantized matrix has several, unless it is packed.
    """
    shapes, thread_local = parameter_shapes(module.config), threading.local()

    @functools.cache
    def mapped(file: pathlib.Path) -> Mapping[str, np.ndarray]:
        if file.name != GGUF_INDEX:
            return mapped_tensors(file)
        from models.gguf import files as gguf_files
        from models.gguf.tensors import MappedTensors

        return MappedTensors(gguf_files.weights_of(path, module.config))

    def packed_matrix(tensor: Tensor, to: str) -> np.ndarray:
        from models.gguf import files as gguf_files
        from models.gguf.tensors import Weight

        weight = gguf_files.weights_of(path, module.config)[tensor.name]
        assert isinstance(weight, Weight)
        return weight.packed(tensor.fused, to)

    def unpacked(tensor: Tensor, locations: dict[str, Stored]) -> Matrix:
        # A fused matrix is unpacked once for adjacent parameters.
        unpacked_matrices: dict[str, Matrix] = thread_local.__dict__
        if tensor.name not in unpacked_matrices:
            unpacked_matrices.clear()
            components = {
                suffix: mapped(location.file)[location.name]
                for suffix, location in locations.items()
            }
            with named(tensor):
                shape = tensor.matrix_shape(shapes[tensor.path].value.shape)
                unpacked_matrices[tensor.name] = read_matrix(quantization, components, shape)
        matrix, fused = unpacked_matrices[tensor.name], tensor.fused
        return matrix if fused is None else matrix.map(fused.part)

    def read(tensor: Tensor, location: Location) -> dict[tuple[str, ...], np.ndarray]:
        whole, inputs = shapes[tensor.path].value.shape, tensor.inputs
        shape = tensor.part_shape(whole)
        weight_format = module.weights.of(tensor.matrix) if tensor.matrix else None
        if isinstance(weight_format, str) and (path / GGUF_INDEX).is_file():
            return {tensor.path: packed_matrix(tensor, weight_format)}
        arrays = None
        if isinstance(location, Stored):
            values = tensor.to_parameter(location.of(mapped(location.file)[location.name]), whole)
        else:
            matrix = unpacked(tensor, location)
            if isinstance(weight_format, WeightFormat) and holds(weight_format, matrix):
                arrays = parameters(matrix, weight_format, shape, inputs)
            else:
                values = matrix.dequantized().reshape(shape)
        if isinstance(weight_format, str):
            rows = values.reshape(-1, math.prod(shape[len(shape) - inputs :]))
            arrays = {tensor.path[-1]: pack(rows.astype(np.float32), "F32", to=weight_format)}
        elif arrays is None:
            arrays = (
                quantize(values, weight_format, inputs)
                if weight_format
                else {tensor.path[-1]: values}
            )
        return {(*tensor.path[:-1], name): values for name, values in arrays.items()}

    return read


@contextlib.contextmanager
def named(tensor: Tensor) -> Iterator[None]:
    """Adds the name of a quantized matrix to errors."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{tensor.name} cannot be read: {error}") from error


def _put(values: np.ndarray, dtype: Any, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Returns a device array; each device's part is copied.

    Without a copy JAX may alias the memory map: later writes to the file would change the model.
    """
    if sharding is None:
        is_packed = values.dtype == np.uint8  # in memory of its own, which JAX keeps
        return jax.device_put(values) if is_packed else jnp.array(values, dtype)

    def shard(index):
        return np.array(values[index], dtype, order="C")

    return jax.make_array_from_callback(values.shape, sharding, shard)
