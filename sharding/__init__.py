"""Device meshes: axis names, shardings, collectives, pipelines, and arrays of several processes."""

from sharding import collectives, global_arrays, pipeline
from sharding.axes import (
    BATCH,
    EMBED,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYER_BATCH,
    MLP,
    STAGES,
    VOCAB,
    logical_axes,
)
from sharding.mesh import (
    DATA,
    MODEL,
    STAGE,
    AnyMesh,
    MeshSize,
    abstract_mesh,
    factored,
    make_mesh,
    model_axes,
    parse_mesh,
)
from sharding.split import Split, array_bytes, part_bytes, split_over

__all__ = [
    "BATCH",
    "DATA",
    "EMBED",
    "HEADS",
    "HEAD_DIM",
    "KV_HEADS",
    "LAYER_BATCH",
    "MLP",
    "MODEL",
    "STAGE",
    "STAGES",
    "VOCAB",
    "AnyMesh",
    "MeshSize",
    "Split",
    "abstract_mesh",
    "array_bytes",
    "collectives",
    "factored",
    "global_arrays",
    "logical_axes",
    "make_mesh",
    "model_axes",
    "parse_mesh",
    "part_bytes",
    "pipeline",
    "split_over",
]
