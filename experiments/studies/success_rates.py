"""SpecInfer's table 1: how often the target's next token is among a draft model's first k tries.

    python -m experiments.studies.success_rates [--target PATH --drafts PATH ...]

Both models read the same held-out text, and nothing is generated. Under sampling, the probability
of success given the draft's tokens is computed exactly instead of drawn.
"""

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import magicjax
from experiments import prompts
from experiments.runner import teacher
from experiments.studies import tables
from magicjax.decoding import rows
from magicjax.verification.sampling import (
    Sampling,
    accept_or_residual,
    draw,
    remove_token,
    row_keys,
    warp,
)

WINDOW = 1024  # tokens of a text; the second half counts
# The event that each kind of success counts.
GREEDY, TOP, MSS, NAIVE = KINDS = "greedy", "sampled, top", "sampled, mss", "sampled, naive"
MEANINGS = (
    "the target's most likely token is among the draft's k most likely",
    "a token sampled from the target is among the draft's k most likely",
    "one of k tokens drawn from the draft is accepted by multi-step speculative sampling",
    "a token sampled from the target is among k drawn from the draft",
)


def sampling_of(temperature: float, window: int) -> Sampling:
    """Returns the sampling of one window at a temperature, without filters."""
    sampling = rows.sampling_of([magicjax.SamplingParams(temperature=temperature)])
    return dataclasses.replace(sampling, keys=row_keys(0, jnp.array([window])))


@functools.partial(jax.jit, static_argnames="ranks")
def window_rates(
    sampling: Sampling, p_logits: Float[Array, "1 T V"], q_logits: Float[Array, "1 T V"], ranks: int
) -> dict[str, Float[Array, "k"]]:
    """Returns the success rate of each kind with 1, 2, ... tries, averaged over a window."""
    p, q = warp(sampling, p_logits), warp(sampling, q_logits)
    likely = jax.lax.top_k(q_logits, ranks)[1]  # [1, T, k]
    hit = likely == p_logits.argmax(-1)[..., None]
    number = jnp.arange(p.shape[1]) * ranks
    tokens, live = draw(sampling, q, ranks, False, jnp.zeros(1, jnp.int32), number, 0)

    residual, draft, rejected, success = p, q, jnp.ones(p.shape[:2]), []
    for i in range(ranks):
        accept, remainder = accept_or_residual(residual, draft, tokens[..., i])
        rejected = rejected * jnp.where(live[..., i], 1 - accept, 1)
        success.append(1 - rejected)
        residual, draft = remainder, remove_token(draft, tokens[..., i])

    def cumulated(x):
        return jnp.cumsum(x, -1).mean((0, 1))

    drawn = jnp.where(live, jnp.take_along_axis(p, tokens, -1), 0)
    return {
        GREEDY: cumulated(hit.astype(p.dtype)),
        TOP: cumulated(jnp.take_along_axis(p, likely, -1)),
        MSS: jnp.stack(success, -1).mean((0, 1)),
        NAIVE: cumulated(drawn),
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each draft and kind: the mean over windows and its standard error."""
    target = magicjax.load(options.target, "float32")
    windows = prompts.cut(prompts.stdlib_stream(target.tokenizer), options.windows, WINDOW)
    rows = []
    for path in options.drafts:
        draft = magicjax.load(path, "float32")
        rates = []
        for number, window in enumerate(windows):
            p, q = (
                teacher.logits(model, window[None])[:, WINDOW // 2 :] for model in (target, draft)
            )
            sampling = sampling_of(options.temperature, number)
            rates.append(window_rates(sampling, p, q, options.tries))
        for kind in KINDS:
            shares = np.stack([rate[kind] for rate in rates])
            errors = shares.std(0, ddof=1) / np.sqrt(len(shares))
            row: dict[str, Any] = {"draft": pathlib.PurePath(path).name, "decoding": kind}
            for k, (share, error) in enumerate(zip(shares.mean(0), errors), 1):
                row |= {f"top{k}": float(share), f"top{k}_error": float(error)}
            rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints and writes the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.success_rates",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    zoo = pathlib.Path(__file__).parents[1] / "zoo"
    drafts = [str(zoo / "draft-1"), str(zoo / "draft-2")]
    add = parser.add_argument
    add("--target", default=str(zoo / "target"), help="model that is predicted")
    add("--drafts", nargs="+", default=drafts, help="models with the same tokenizer")
    add("--tries", type=int, default=5, help="the most tries k")
    add("--windows", type=int, default=16, help=f"texts of {WINDOW} tokens, at least 2")
    add("--temperature", type=float, default=1.0, help="of the sampled kinds")
    tables.add_out(parser)
    options = parser.parse_args(arguments)
    try:
        table = measure(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    tables.publish(table, options.out)
    print("", *(f"{kind}: {meaning}" for kind, meaning in zip(KINDS, MEANINGS)), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
