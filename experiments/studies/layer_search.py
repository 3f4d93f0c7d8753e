"""Searches for the layers with which a target drafts best for itself (`layers=` of a drafter).

    python -m experiments.studies.layer_search --target PATH --out DIR

The target continues prompts greedily. Layers are then removed one at a time: at each size the one
without which the draft chooses most of these tokens. Rounds of a few sizes are timed. The layers
with the most expected tokens per second then draft for other prompts.

Every set of layers is a line of DIR/agreement.jsonl, and is not evaluated again after a kill.
"""

import argparse
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int

import magicjax
import models
from experiments import prompts
from experiments.runner import teacher
from experiments.training import export
from magicjax.benchmarks.tables import record_table
from magicjax.drafters.spec import parse
from magicjax.files import write_atomically

Layers = tuple[int, ...]
KV = tuple[tuple[Array, Array], ...]
ROWS, CONTEXT, NEW = 4, 512, 128  # prompts, their tokens, and those that the target writes


@jax.jit
def read(target: magicjax.Model, tokens: Int[Array, "B S"]) -> KV:
    """Returns the target's keys and values [B, S, K, D] of a text, for each layer."""
    causal = teacher.windowed_attention(0, None)

    def attend(q, k, v):
        return causal(q, k, v)[0], (k, v)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return target(tokens, positions, models.in_every_layer(attend))[1]


@jax.jit
def agreement(
    target: magicjax.Model, text: Int[Array, "B S+1"], kv: KV, kept: Bool[Array, "L"]
) -> Float[Array, ""]:
    """Returns the share of the last `NEW` tokens of a text that a draft of the kept layers chooses.

    As the root of a draft, each token sees itself, and those before it through the target's keys
    and values `kv`.
    """
    tokens, chosen, size = text[:, -NEW - 1 : -1], text[:, -NEW:], text.shape[1] - 1
    positions = jnp.broadcast_to(jnp.arange(size - NEW, size), tokens.shape)
    before = (jnp.arange(size) < positions[0, :, None])[:, None, None]  # [T, 1, 1, S]
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def attend_to(keys, values, q, k, v):
        grouped = q.reshape(*k.shape[:3], -1, q.shape[-1])
        scores = jnp.where(before, product("btkgd,bskd->btkgs", grouped, keys), -jnp.inf)
        own = product("btkgd,btkd->btkg", grouped, k)[..., None]
        scores = jnp.concatenate([scores, own], -1) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(scores).astype(v.dtype)
        out = jnp.einsum("btkgs,bskd->btkgd", weights[..., :-1], values)
        return (out + weights[..., -1:] * v[:, :, :, None]).reshape(q.shape), None

    def attend(layer):
        return Partial(attend_to, *kv[layer])

    def block(x, layer):
        arguments = x, positions, attend, layer
        return target.module.apply(target.params, *arguments, method="block")[0]

    x = target.embed(tokens, positions)
    for layer in range(target.config.num_layers):
        x = jax.lax.cond(kept[layer], functools.partial(block, layer=layer), lambda x: x, x)
    return (target.unembed(x).argmax(-1) == chosen).mean()


def stored(path: pathlib.Path, evaluate: Callable[[Layers], float]) -> Callable[[Layers], float]:
    """Returns the function with its values read from a file, to which new ones are appended."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    lines = [line for line in lines if line.endswith("\n")]  # a kill can leave a part of the last
    write_atomically(path, "".join(lines))
    known: dict[str, float] = dict(map(json.loads, lines))

    def value(layers: Layers) -> float:
        text = written(layers)
        if text not in known:
            known[text] = evaluate(layers)
            with path.open("a") as file:
                file.write(json.dumps([text, known[text]]) + "\n")
        return known[text]

    return value


def written(layers: Layers) -> str:
    """Returns layers as the option has them: (0, 1, 2, 5) is "0-2,5"."""
    first = [n for n in layers if n - 1 not in layers]
    last = [n for n in layers if n + 1 not in layers]
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(first, last, strict=True))


def eliminate(value: Callable[[Layers], float], num_layers: int, smallest: int) -> list[Layers]:
    """Returns the layers left after each removal, always of the layer that costs least value."""
    layers, found = tuple(range(num_layers)), []
    while len(layers) > smallest:
        layers = max((tuple(n for n in layers if n != out) for out in layers), key=value)
        found.append(layers)
    return found


def ranked(
    found: Mapping[Layers, float], seconds: Mapping[int, float], tree: magicjax.TokenTree
) -> list[dict[str, Any]]:
    """Returns a row for each set of layers; the most expected tokens per second are marked.

    Args:
      found: the agreement of each set.
      seconds: of a round, by ascending number of layers; between them they are interpolated.
      tree: that is drafted.
    """
    rows: list[dict[str, Any]] = []
    for layers, value in found.items():
        tokens = magicjax.expected_tokens(tree, [value])
        ms = 1e3 * float(np.interp(len(layers), [*seconds], [*seconds.values()]))
        row = {"layers left": len(layers), "agreement": value, "tokens per round": tokens}
        rows.append(row | {"ms per round": ms, "tokens per ms": tokens / ms, "best": ""})
    max(rows, key=lambda row: row["tokens per ms"])["best"] = "*"
    return rows


def search(options: argparse.Namespace) -> None:
    """Prints the agreement and speed of each size, and a run of the best.

    Raises:
      ValueError: a drafter without layers, prompts that cannot be made, no layer to remove, or a
        folder of a search with other settings.
    """
    target, tree = magicjax.load(options.target, options.dtype), magicjax.chain(options.depth)
    config, num_layers = target.config, target.config.num_layers
    if any(config.windows) or config.attention_softcap is not None or config.attention_sinks:
        raise ValueError(
            f"a target of the family {config.family!r} with sliding windows, capped scores or "
            "attention sinks is not supported: use another target"
        )
    smallest = max(1, num_layers // 3) if options.smallest is None else options.smallest
    if not 0 < smallest < num_layers:
        raise ValueError(f"smallest={smallest} must be from 1 to {num_layers - 1}")
    parse(f"{options.drafter}:layers=0")  # before the search
    source = options.prompts, target.tokenizer, options.prompt_path
    rows = [each.tokens for each in prompts.make(*source, 2 * ROWS, CONTEXT)]
    settings = options.target, options.dtype, *source[::2], ROWS, CONTEXT, NEW
    export.claim(options.out / "settings.txt", json.dumps(settings) + "\n")
    params = magicjax.SamplingParams(max_tokens=NEW)
    run = functools.partial(magicjax.generate, target, params=params, eos_token_id=[])
    text = jnp.asarray(np.stack(run(prompts=rows[:ROWS]).sequences))
    kv = read(target, text[:, :-1])

    def evaluate(layers: Layers) -> float:
        return float(agreement(target, text, kv, np.isin(np.arange(num_layers), layers)))

    value = stored(options.out / "agreement.jsonl", evaluate)
    found = {layers: value(layers) for layers in eliminate(value, num_layers, smallest)}
    drafters = [f"{options.drafter}:layers={written(layers)}" for layers in found]
    seconds = {}
    for i in sorted({0, len(drafters) // 2, len(drafters) - 1}, reverse=True):
        stats = run(prompts=rows[:ROWS], drafter=drafters[i], tree=tree).stats
        seconds[num_layers - 1 - i] = stats.decode_s / stats.rounds
    table = ranked(found, seconds, tree)
    best = drafters[[row["best"] for row in table].index("*")]
    plain, drafted = (
        run(prompts=rows[ROWS:], drafter=each, tree=each and tree).stats for each in (None, best)
    )
    speedup = plain.decode_s / drafted.decode_s
    print(record_table(table))
    print(f"\n{best}, chain:{options.depth}")
    print(f"other prompts: tau {drafted.tau:.2f}, {speedup:.2f} times as fast as plain decoding")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the search; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.layer_search",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--target", required=True, help="model that drafts for itself")
    add("--out", type=pathlib.Path, required=True, help="folder of the evaluated sets")
    add("--dtype", default="bfloat16", help="of the target")
    add("--drafter", default="self:full", help="what drafts, without its layers")
    add("--depth", type=int, default=4, help="tokens of a draft")
    add("--prompts", default="chat", help=f"kind of prompts: {', '.join(prompts.KINDS)}")
    add("--prompt-path", default="", help="their files")
    add("--smallest", type=int, help="the fewest layers; default: a third of them")
    options = parser.parse_args(arguments)
    try:
        search(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
