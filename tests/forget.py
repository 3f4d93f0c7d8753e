"""Drops what is traced and compiled, before and after a test that changes code of programs."""

import jax

from magicjax.decoding import program_cache


def forget_programs() -> None:
    """Drops all programs, and the traces of functions in them."""
    program_cache.clear()
    jax.clear_caches()
