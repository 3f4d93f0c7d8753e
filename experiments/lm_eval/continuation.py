"""Texts continued until a stop string: the compiled loop in calls of a few rounds.

The loop knows tokens, not strings. So the host looks at the text between calls, ends when every row
has met a stop string or ended, and cuts what stands behind it. Prompts of similar lengths share a
shape, so that few programs are compiled for a whole benchmark.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from experiments.lm_eval.likelihood import bucket
from magicjax.decoding import runner
from magicjax.decoding.request import CAPACITY_MULTIPLE, Request, prefill_chunk, prepare
from magicjax.drafters import Drafter
from magicjax.model import Model
from magicjax.trees.token_tree import Tree
from magicjax.verification.sampling import row_keys

ROUNDS = 16  # of a call: a word with the host costs less than a round that nobody needs


@dataclasses.dataclass(frozen=True)
class Continued:
    """What came of a batch of prompts.

    Attributes:
      texts: the new text of each, before its first stop string.
      emitted: new tokens of all rows, prefill's aside and those behind a stop string included.
      rounds: of all rows; emitted / rounds is τ.
    """

    texts: list[str]
    emitted: int
    rounds: int


def continue_until(
    target: Model,
    prompts: Sequence[Sequence[int]],
    until: Sequence[str],
    *,
    max_new_tokens: int,
    rows: int | None = None,
    places: Sequence[int] | None = None,
    drafter: Drafter | None = None,
    tree: Tree | None = None,
    backend: str | None = None,
    seed: int = 0,
    **sampling: Any,
) -> Continued:
    """Returns the texts behind the prompts: those of `magicjax.generate`, up to a stop string.

    Args:
      target: with a tokenizer.
      prompts: token ids of each row.
      until: stop strings; none of them is in the texts.
      max_new_tokens: of each row.
      rows: of the batch; None: as many as prompts. With more, rows are filled up and dropped, so
        that a last batch needs no program of its own.
      places: numbers of the prompts, which with the seed decide what is sampled: that depends on
        no neighbour, and not on the batch. None: 0, 1, ….
      drafter, tree, backend: as for `magicjax.generate`.
      seed: with do_sample.
      sampling: do_sample, temperature, top_k, top_p, as for `magicjax.generate`.

    Raises:
      ValueError, TypeError: bad input, as for `magicjax.generate`; a target without a tokenizer.
    """
    if target.tokenizer is None:
        raise ValueError(f"the target {target.name!r} has no tokenizer: stop strings are text")
    missing = (rows or len(prompts)) - len(prompts)
    if missing < 0:
        raise ValueError(f"rows={rows} hold no {len(prompts)} prompts: give as many, or more")
    if sampling.get("do_sample"):
        sampling["seed"] = seed
    request = prepare(
        target,
        [*prompts, *[prompts[0]] * missing],
        drafter=drafter,
        tree=tree,
        max_new_tokens=[max_new_tokens] * len(prompts) + [1] * missing,
        backend=backend,
        **sampling,
    )
    request = in_bucket(request)
    if request.sampling is not None and places is not None:
        keys = row_keys(seed, jnp.array([*places, *[0] * missing]))
        drawn = dataclasses.replace(request.sampling, keys=keys)
        request = dataclasses.replace(request, sampling=drawn)
    return _continued(request, len(prompts), [stop for stop in until if stop])


def _continued(request: Request, count: int, until: Sequence[str]) -> Continued:
    """Returns what comes of a request's first `count` rows."""
    state, _, _ = runner.start(request)
    while True:
        state, _, _ = runner.run(request, request.settings, state, ROUNDS)
        arrays = (state.output, state.emitted, state.ended, state.histogram)
        output, emitted, ended, histogram = (x[:count] for x in jax.device_get(arrays))
        texts = [_text(request, row[:n]) for row, n in zip(output, emitted, strict=True)]
        stops = [_first_stop(text, until) for text in texts]
        if all(end or stop < len(text) for end, stop, text in zip(ended, stops, texts)):
            cut = [text[:stop] for text, stop in zip(texts, stops, strict=True)]
            return Continued(cut, int((emitted - 1).sum()), int(histogram.sum()))


def _text(request: Request, tokens: Int[np.ndarray, "n"]) -> str:
    """Returns the text of a row's new tokens, without the token that ended it."""
    if np.isin(tokens[-1], np.asarray(request.eos)):
        tokens = tokens[:-1]
    return request.target.tokenizer.decode(tokens, skip_special_tokens=True)


def _first_stop(text: str, until: Sequence[str]) -> int:
    """Returns where the first stop string begins; the text's length if there is none."""
    return min((at for stop in until if (at := text.find(stop)) >= 0), default=len(text))


def in_bucket(request: Request) -> Request:
    """Returns the request in a shape that prompts of similar lengths share.

    Prompts are padded to a power of two, and the capacity follows from that: of 700 tokens and 900
    both become 1,024. What comes out of them stays the same.
    """
    settings = request.settings
    rows, positions = len(request.prompts), request.target.config.max_positions
    width = bucket(max(map(len, request.prompts)))
    chunk = min(prefill_chunk(rows), width)
    width = min(width, -(-positions // chunk) * chunk)
    needed = width + settings.max_new_tokens + 2 * settings.shape.depth + 1
    tokens = np.zeros((rows, width), np.int32)
    for row, ids in zip(tokens, request.prompts, strict=True):
        row[: len(ids)] = ids
    capacity = -(-needed // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
    return dataclasses.replace(
        request,
        settings=dataclasses.replace(settings, chunk=chunk, capacity=capacity),
        tokens=jnp.asarray(tokens),
    )
