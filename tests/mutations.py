"""Checks that the quick suite catches wrong changes to the core: `python -m tests.mutations`.

A mutation replaces one function by a wrong one, made from the correct one. `pytest --mutation NAME`
runs with it; this command runs the quick tests of the core with each until the first failure. They
must pass without one. It prints which test failed; exit code 1: a mutation survives.
"""

import argparse
import importlib
import pathlib
import re
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from magicjax.verification.sampling import Purpose

ROOT = pathlib.Path(__file__).parent.parent
TIMEOUT = 1200  # seconds of a run
CORE = ("trees", "verification", "kv_cache", "decoding", "drafters", "policies", "grammars")


class Mutation(NamedTuple):
    """The name that is replaced, `module:attribute`, and what makes the wrong value of it."""

    where: str
    wrong: Callable[[Any], Any]


def _residual_is_the_target(f):
    return lambda p, *rest: (f(p, *rest)[0], p)


def _accept_without_q(f):
    def wrong(p, q, *rest):
        return f(p, jnp.ones_like(q), *rest)[0], f(p, q, *rest)[1]

    return wrong


def _one_accept_number(f):
    def wrong(keys, position, purpose, number=0, drafter=0):
        return f(keys, position, purpose, number * (purpose != Purpose.ACCEPT), drafter)

    return wrong


def _bonus_with_the_accept_key(f):
    def wrong(keys, position, purpose, *rest):
        is_target = purpose == Purpose.TARGET  # the root's position, if its first draw is rejected
        return f(keys, position - is_target, Purpose.ACCEPT, *rest)

    return wrong


def _siblings_see_each_other(f):
    def wrong(parents):
        nodes = jnp.arange(parents.shape[-1])
        siblings = parents[..., None] == parents[..., None, :]
        return f(parents) | (siblings & (nodes[:, None] > nodes))

    return wrong


def _wider_window(f):
    def wrong(*arguments, seen_from=None, **options):
        if seen_from is not None:
            options["seen_from"] = seen_from - 1
        return f(*arguments, **options)

    return wrong


def _wraps_one_slot_later(f):
    def wrong(slots, entries, start, count):
        return f(slots, entries, start + (start >= slots.shape[2]), count)

    return wrong


def _depths_count_nodes(module):
    def wrong(parents):
        return jnp.broadcast_to(jnp.arange(parents.shape[-1]), parents.shape)

    return types.SimpleNamespace(**vars(module) | {"depths": wrong})


def _masks_of_the_root(f):
    def wrong(*arguments):
        masks = f(*arguments)
        masks[:] = masks[:, :1]
        return masks

    return wrong


def _ring_one_slot_late(f):
    def wrong(position, pinned, capacity):
        return f(position + (position >= pinned), pinned, capacity)

    return wrong


def _layers_before(f):
    def wrong(cache, layers):
        return f(cache, layers and [layer - 1 for layer in layers])

    return wrong


def _one_node_more(f):
    return lambda *arguments: f(*arguments[:-1], arguments[-1] + 1)


def _path_in_node_order(f):
    def wrong(nodes, path):
        return f(nodes, jnp.broadcast_to(jnp.arange(path.shape[1]), path.shape))

    return wrong


MUTATIONS = {
    "rejection keeps the target's distribution": Mutation(
        "magicjax.verification.verify:accept_or_residual", _residual_is_the_target
    ),
    "acceptance without q": Mutation(
        "magicjax.verification.verify:accept_or_residual", _accept_without_q
    ),
    "draws without replacement keep q": Mutation(
        "magicjax.verification.verify:remove_token", lambda f: lambda q, *rest: q
    ),
    "one accept number for all draws": Mutation(
        "magicjax.verification.verify:uniforms", _one_accept_number
    ),
    "bonus token with the accept key": Mutation(
        "magicjax.verification.verify:uniforms", _bonus_with_the_accept_key
    ),
    "siblings see each other": Mutation(
        "magicjax.trees.token_tree:ancestor_mask", _siblings_see_each_other
    ),
    "windows of one more position": Mutation(
        "magicjax.kv_cache.attend:tree_attention", _wider_window
    ),
    "rings that wrap one slot later": Mutation(
        "magicjax.kv_cache.full_cache:write_ring", _wraps_one_slot_later
    ),
    "positions of a tree count its nodes": Mutation(
        "magicjax.decoding.loop:token_tree", _depths_count_nodes
    ),
    "all nodes have the mask of the root": Mutation(
        "magicjax.decoding.decoder:tree_masks", _masks_of_the_root
    ),
    "the ring starts one slot late": Mutation(
        "magicjax.kv_cache.sparse_cache:slot_of", _ring_one_slot_late
    ),
    "a draft of some layers reads the entries of others": Mutation(
        "magicjax.drafters.layer_skipping:of_cache", _layers_before
    ),
    "rejected nodes are written to the ring": Mutation(
        "magicjax.kv_cache.sparse_cache:_append", _one_node_more
    ),
    "the path is written in node order": Mutation(
        "magicjax.kv_cache.full_cache:take_path", _path_in_node_order
    ),
    "a pass attends to its own tokens before they are rounded": Mutation(
        "magicjax.kv_cache.attend:rounded", lambda f: lambda k, v, cache: (k, v)
    ),
    "only the first end token ends a row": Mutation(
        "magicjax.decoding.loop:_is_eos", lambda f: lambda tokens, eos: f(tokens, eos[:, :1])
    ),
}


def apply(name: str) -> None:
    """Makes a mutation in this process, before anything is compiled."""
    mutation = MUTATIONS[name]
    module, attribute = mutation.where.split(":")
    owner = importlib.import_module(module)
    setattr(owner, attribute, mutation.wrong(getattr(owner, attribute)))


def run(name: str | None) -> str | None:
    """Returns the test that fails with a mutation (None: without any), or None if all pass."""
    parallel = "-n", "logical", "--maxprocesses", "4", "--dist", "worksteal"
    command = [sys.executable, "-m", "pytest", "-q", "-x", *parallel]
    command += [f"tests/magicjax/{folder}" for folder in CORE]
    command += ["--mutation", name] if name else []
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name}: no end within {TIMEOUT} s") from None
    failed = re.search(r"^(?:FAILED|ERROR) (.+)$", done.stdout, re.MULTILINE)
    if done.returncode != 0 and failed is None:
        raise RuntimeError(f"{name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
    if failed and re.search("TypeError|AttributeError", failed[1]):
        raise RuntimeError(f"{name} does not fit the code, update it: {failed[1]}")
    return failed and failed[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join(MUTATIONS)}")
    names = parser.parse_args().names or list(MUTATIONS)
    if unknown := [name for name in names if name not in MUTATIONS]:
        parser.error(f"unknown mutations {unknown}")
    survived = 0
    print("| mutation | caught by |\n| --- | --- |", flush=True)
    for name in (None, *names):
        test = run(name)
        if name is None and test is not None:
            parser.error(f"{test} fails without a mutation")
        survived += name is not None and test is None
        print(f"| {name or 'none'} | {test or '–'} |", flush=True)
    sys.exit(survived > 0)


if __name__ == "__main__":
    main()
