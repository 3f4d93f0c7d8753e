"""Table 1: how often the target's next token is among the draft's tries, on held-out text.

Both models read the same text, and nothing is generated. Under sampling, the probability of success
given the draft's tokens is computed exactly instead of drawn.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments import prompts
from experiments.runner import teacher
from experiments.runner.workload import Bench
from experiments.studies.specinfer.settings import Tables
from experiments.studies.specinfer.statistics import mean_and_error, name_of
from magicjax.verification.sampling import (
    Sampling,
    accept_or_residual,
    draw,
    remove_token,
    row_keys,
    warp,
)

GREEDY, TOP, MSS, NAIVE = "greedy", "sampled, top", "sampled, mss", "sampled, naive"
# The event that each kind of success counts.
KINDS = {
    GREEDY: "the target's most likely token is among the draft's k most likely",
    TOP: "a token sampled from the target is among the draft's k most likely",
    MSS: "one of k tokens drawn from the draft is accepted by multi-step speculative sampling",
    NAIVE: "a token sampled from the target is among k drawn from the draft",
}


def rates(tables: Tables, bench: Bench) -> list[dict[str, Any]]:
    """Returns a row for each draft and kind, and one for all drafts' most likely tokens."""
    target = bench.model(tables.target, tables.dtype)
    text = prompts.cut(prompts.stdlib_stream(target.tokenizer), tables.windows, tables.window)
    ranks, half = tables.widths[-1], tables.window // 2
    measured: dict[tuple[str, str], list[np.ndarray]] = {}
    for number, window in enumerate(text):
        sampling = sampling_of(tables.temperature, tables.seed, number)
        p = teacher.logits(target, window[None])[:, half:]
        likely = []
        for directory in tables.drafts:
            q = teacher.logits(bench.model(directory, tables.dtype), window[None])[:, half:]
            likely.append(jax.lax.top_k(q, ranks)[1])
            for kind, shares in _window_rates(sampling, p, q, ranks).items():
                measured.setdefault((name_of(directory), kind), []).append(np.asarray(shares))
        if len(likely) > 1:
            names = " + ".join(map(name_of, tables.drafts))
            shares = _joint(p.argmax(-1), likely, ranks)
            measured.setdefault((names, GREEDY), []).append(shares)
    return [_row(*key, np.stack(shares)) for key, shares in measured.items()]


def sampling_of(temperature: float, seed: int, window: int) -> Sampling:
    """Returns the sampling of one window at a temperature, without top_k and top_p."""
    return Sampling(
        temperature=jnp.full(1, temperature, jnp.float32),
        top_k=jnp.zeros(1, jnp.int32),
        top_p=jnp.ones(1, jnp.float32),
        keys=row_keys(seed, jnp.array([window])),
        top_k_used=False,
        top_p_used=False,
    )


def _row(draft: str, kind: str, shares: Float[np.ndarray, "W k"]) -> dict[str, Any]:
    row: dict[str, Any] = {"draft": draft, "decoding": kind}
    for rank, by_window in enumerate(shares.T, 1):
        known = not np.isnan(by_window).any()
        estimate = mean_and_error(by_window) if known else (None, None)
        row[f"top{rank}"], row[f"top{rank}_error"] = estimate
    return row


@functools.partial(jax.jit, static_argnames="ranks")
def _window_rates(
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


def _joint(
    target: Int[Array, "1 T"], likely: list[Int[Array, "1 T k"]], ranks: int
) -> Float[np.ndarray, "k"]:
    """Returns the greedy success rate of all drafts' most likely tokens by number of tries.

    With two drafts, 4 tries are the two most likely tokens of each, and 3 tries are NaN.
    """
    shares = np.full(ranks, np.nan)
    for each in range(1, ranks // len(likely) + 1):
        tries = jnp.concatenate([tokens[..., :each] for tokens in likely], -1)
        shares[each * len(likely) - 1] = (tries == target[..., None]).any(-1).mean()
    return shares
