"""Where arrays live on a device mesh: axes and their names, one table, sums over devices.

And what goes on across it: pipelines of stages, and processes that share it.
"""

from sharding import collectives, pipeline, processes
from sharding.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, MLP, VOCAB
from sharding.mesh import (
    DATA,
    MODEL,
    STAGE,
    AnyMesh,
    MeshSize,
    abstract_mesh,
    factored,
    first_axes,
    make_mesh,
    model_axes,
    parse_mesh,
    undivided,
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
    "STAGE",
    "VOCAB",
    "AnyMesh",
    "MeshSize",
    "Split",
    "abstract_mesh",
    "collectives",
    "factored",
    "first_axes",
    "make_mesh",
    "model_axes",
    "parse_mesh",
    "part_bytes",
    "pipeline",
    "processes",
    "split_over",
    "undivided",
]
