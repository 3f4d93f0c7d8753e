"""Logical axis names: what an axis of a parameter *means*, so that one table can say where it goes.

Models name axes, never mesh axes. A change of the mesh, or of what is split over it, is then a
change of one table and of no model.
"""

EMBED = "embed"  # model width E
HEADS = "heads"  # query heads H
KV_HEADS = "kv_heads"  # key/value heads K
HEAD_DIM = "head_dim"  # head size D
MLP = "mlp"  # hidden width F of the MLP
VOCAB = "vocab"  # vocabulary V
