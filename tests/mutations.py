"""Checks that the quick suite catches wrong changes to the core: `python -m tests.mutations`.

Every mutation is made in a copy of the checkout, whose quick tests of the core run until the first
failure. They must pass without one. The command prints which test failed; exit code 1: a mutation
survives.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
TIMEOUT = 1200  # seconds of a run
CORE = ("trees", "verification", "kv_cache", "decoding", "drafters", "policies", "grammars")
# name -> file, correct text, wrong text
MUTATIONS = {
    "rejection keeps the target's distribution": (
        "magicjax/verification/sampling.py",
        "residual = jnp.maximum(p - q, 0)",
        "residual = p",
    ),
    "acceptance without q": (
        "magicjax/verification/sampling.py",
        "accept = jnp.minimum(p_token / jnp.where(q_token > 0, q_token, 1), 1)",
        "accept = p_token",
    ),
    "draws without replacement keep q": (
        "magicjax/verification/verify.py",
        "q=remove_token(q, token, axis_names),",
        "q=q,",
    ),
    "one accept number for all draws": (
        "magicjax/verification/verify.py",
        "Purpose.ACCEPT, attempted.draw)",
        "Purpose.ACCEPT, 0 * attempted.draw)",
    ),
    "bonus token with the accept key": (
        "magicjax/verification/verify.py",
        "u = uniforms(sampling.keys, root_position + walk.accepted + 1, Purpose.TARGET)",
        "u = uniforms(sampling.keys, root_position, Purpose.ACCEPT, walk.accepted)",
    ),
    "siblings see each other": (
        "magicjax/trees/token_tree.py",
        "reach = ((parents[..., None] == nodes) | (nodes[:, None] == nodes)).astype(xp.float32)",
        "reach = (parents[..., None] >= nodes).astype(xp.float32) + (nodes[:, None] == nodes)",
    ),
    "windows of one more position": (
        "magicjax/kv_cache/attend.py",
        'options["seen_from"] = attend.slice(attend.positions) - (window - 1)',
        'options["seen_from"] = attend.slice(attend.positions) - window',
    ),
    "rings that wrap one slot later": (
        "magicjax/kv_cache/full_cache.py",
        "index = jnp.where(live, (start[:, None] + steps) % size, size)",
        "index = jnp.where(live, (start[:, None] + steps) % (size + 1), size)",
    ),
    "positions of a tree count its nodes": (
        "magicjax/decoding/loop.py",
        "positions = state.cache.lengths[:, None] + token_tree.depths(proposal.parents)",
        "positions = state.cache.lengths[:, None] + jnp.arange(proposal.tokens.shape[1])",
    ),
    "all nodes have the grammar's state at the root": (
        "magicjax/grammars/masking.py",
        "return jnp.where(is_root, first, advance(transitions, rows, before, tokens))",
        "return first",
    ),
    "the ring starts one slot late": (
        "magicjax/kv_cache/sparse_cache.py",
        "pinned + (position - pinned) % ring)",
        "pinned + (position - pinned + 1) % ring)",
    ),
    "a draft of some layers reads the entries of others": (
        "magicjax/drafters/layer_skipping.py",
        "cache if layers is None else cache.of_layers(layers)",
        "cache if layers is None else cache.of_layers([layer - 1 for layer in layers])",
    ),
    "rejected nodes are written to the ring": (
        "magicjax/kv_cache/sparse_cache.py",
        "slots = jnp.where(steps < count[:, None], slots, capacity)",
        "slots = jnp.where(steps < count[:, None] + 1, slots, capacity)",
    ),
    "the path is written in node order": (
        "magicjax/kv_cache/full_cache.py",
        "return jnp.take_along_axis(x, index, axis=1).swapaxes(1, 2)",
        "return x[:, : path.shape[1]].swapaxes(1, 2)",
    ),
    "a pass attends to its own tokens before they are rounded": (
        "magicjax/kv_cache/attend.py",
        "k, v = rounded(k, v, self.cache.k[0])",
        "k, v = k, v",
    ),
    "a commit copies the cache": (
        "magicjax/kv_cache/full_cache.py",
        "start = cache.lengths + zero_after(count)",
        "start = 0 + cache.lengths",
    ),
    "a row keeps tokens after its end": (
        "magicjax/decoding/loop.py",
        "return (tokens[..., None] == eos[:, None]).any(-1)",
        "return (tokens[..., None] == eos[:, None]).all(-1)",
    ),
}


def run(name: str | None, folder: pathlib.Path) -> str | None:
    """Returns the test that fails with a mutation (None: without any), or None if all pass."""
    copy = folder / "checkout"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "results", "build"))
    if name is not None:
        path, correct, wrong = MUTATIONS[name]
        text = (copy / path).read_text()
        if text.count(correct) != 1:
            raise ValueError(f"{name}: {path} must contain {correct!r} once; update the mutation")
        (copy / path).write_text(text.replace(correct, wrong))
    # Programs without the mutation are compiled once, by this checkout's tests or an earlier run.
    cache = ROOT / ".pytest_cache"
    cache.mkdir(exist_ok=True)
    (copy / ".pytest_cache").symlink_to(cache)
    parallel = "-n", "logical", "--maxprocesses", "4", "--dist", "worksteal"
    command = [sys.executable, "-m", "pytest", "-q", "-x", *parallel]
    command += [f"tests/magicjax/{folder}" for folder in CORE]
    try:
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"no end within {TIMEOUT} s"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode != 0 and failed is None:
        raise RuntimeError(f"{name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
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
        with tempfile.TemporaryDirectory() as folder:
            test = run(name, pathlib.Path(folder))
        if name is None and test is not None:
            parser.error(f"{test} fails without a mutation")
        survived += name is not None and test is None
        print(f"| {name or 'none'} | {test or '–'} |", flush=True)
    sys.exit(survived > 0)


if __name__ == "__main__":
    main()
