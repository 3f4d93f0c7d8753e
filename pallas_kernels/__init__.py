"""Attention of new tokens to a committed cache and to each other: arrays in, arrays out.

One entry point, `tree_attention`, serves prefill, decoding, drafting and verification; what tells
them apart is the shape of q and the mask over the new tokens.
"""

from pallas_kernels.attention import BACKENDS, choose_backend, tree_attention
from pallas_kernels.partials import EMPTY_LSE, merge

__all__ = ["BACKENDS", "EMPTY_LSE", "choose_backend", "merge", "tree_attention"]
