"""Where arrays live on a device mesh: axes and their names, one table, and sums over devices."""

from sharding import collectives
from sharding.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, MLP, VOCAB
from sharding.mesh import (
    DATA,
    MODEL,
    AnyMesh,
    abstract_mesh,
    factored,
    first_axes,
    make_mesh,
    model_axes,
    parse_mesh,
)
from sharding.split import Split, part_bytes, split_over

__all__ = [
    "DATA",
    "EMBED",
    "HEADS",
    "HEAD_DIM",
    "KV_HEADS",
    "MLP",
    "MODEL",
    "VOCAB",
    "AnyMesh",
    "Split",
    "abstract_mesh",
    "collectives",
    "factored",
    "first_axes",
    "make_mesh",
    "model_axes",
    "parse_mesh",
    "part_bytes",
    "split_over",
]
