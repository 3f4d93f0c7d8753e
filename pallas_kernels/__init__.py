"""Attention of new tokens to a committed cache and to each other: arrays in, arrays out.

One entry point, `tree_attention`, serves prefill, decoding, drafting and verification; what tells
them apart is the shape of q and the mask over the new tokens. `prefix_mass` gives the attention
that each slot of a cache got, and `Quantized` stands for a cache in 8 or 4 bits.
"""

from pallas_kernels.attention import BACKENDS, choose_backend, tree_attention
from pallas_kernels.attention_mass import prefix_mass
from pallas_kernels.lse_merge import EMPTY_LSE, merge
from pallas_kernels.quantized import Quantized, dequantize, quantize

__all__ = [
    "BACKENDS",
    "EMPTY_LSE",
    "Quantized",
    "choose_backend",
    "dequantize",
    "merge",
    "prefix_mass",
    "quantize",
    "tree_attention",
]
