"""Attention of new tokens to a committed cache and to each other.

`tree_attention` serves prefill, decoding, drafting and verification, which differ in the shape of q
and in the mask over the new tokens. `prefix_mass` returns the attention that each slot of a cache
received. `Quantized` represents a cache in 8 or 4 bits.
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
