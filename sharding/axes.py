"""Logical axis names: the meaning of an array's axis.

Models and states name logical axes, never mesh axes; the table in `sharding.split` maps them to a
mesh. A change of the mesh, or of what is divided over it, changes that table and no model.
"""

# Axes of parameters; HEADS and KV_HEADS also of caches.
EMBED = "embed"  # model width E
HEADS = "heads"  # query heads H, and heads of gated delta nets
KV_HEADS = "kv_heads"  # key/value heads K
HEAD_DIM = "head_dim"  # head size D
MLP = "mlp"  # hidden width F of the MLP
EXPERTS = "experts"  # experts X of a mixture
VOCAB = "vocab"  # vocabulary V
STAGES = "stages"  # pipeline stages S, of parameters stacked by stage

# Axes of the state between programs.
BATCH = "batch"  # rows B
LAYER_BATCH = "layer_batch"  # rows of a per-layer array; with pipeline stages, S * B


def logical_axes(*names: str | None) -> dict[str, tuple[str | None, ...]]:
    """Returns the metadata of a dataclass field that declares the logical axes of its arrays.

    Axes without a name, and those beyond the last name, are replicated.
    """
    return {"axes": names}
