"""Where arrays live on a device mesh; so far the names of the axes that parameters carry."""

from sharding.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, MLP, VOCAB

__all__ = ["EMBED", "HEADS", "HEAD_DIM", "KV_HEADS", "MLP", "VOCAB"]
