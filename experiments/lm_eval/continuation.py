"""Generation up to a stop string: the compiled loop in calls of a few rounds.

The loop compares tokens, not strings. The host therefore decodes the text between calls, stops when
every row has ended or contains a stop string, and truncates the text there. Prompts of similar
lengths share a shape, so that a benchmark compiles few programs.
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

ROUNDS = 16  # per call: host synchronization against rounds after the last stop string


@dataclasses.dataclass(frozen=True)
class Continued:
    """The result of a batch of prompts.

    Attributes:
      texts: the new text of each prompt up to its first stop string.
      emitted: new tokens of all rows without prefill's, including those after a stop string.
      target_passes: of all rows; emitted / target_passes is τ.
    """

    texts: list[str]
    emitted: int
    target_passes: int


def continue_until(
    target: Model,
    prompts: Sequence[Sequence[int]],
    until: Sequence[str],
    *,
    max_new_tokens: int,
    rows: int | None = None,
    indices: Sequence[int] | None = None,
    drafter: Drafter | None = None,
    tree: Tree | None = None,
    backend: str | None = None,
    seed: int = 0,
    **sampling: Any,
) -> Continued:
    """Returns the texts of `magicjax.generate`, each up to its first stop string.

    Args:
      target: a model with a tokenizer.
      prompts: token ids of each row.
      until: stop strings, excluded from the texts.
      max_new_tokens: new tokens per row.
      rows: rows of the batch with padding; None for the number of prompts.
      indices: an index per prompt that, with the seed, determines its samples independently of the
        batch. None for 0, 1, ….
      drafter, tree, backend, seed, sampling: as in `magicjax.generate`.

    Raises:
      ValueError, TypeError: invalid input, see `magicjax.generate`; a target without a tokenizer.
    """
    if target.tokenizer is None:
        raise ValueError(f"the target {target.name!r} has no tokenizer: stop strings need one")
    padding = (rows or len(prompts)) - len(prompts)
    if padding < 0:
        raise ValueError(f"rows={rows} is too small: give at least {len(prompts)}, one per prompt")
    sampling |= {"seed": seed} if sampling.get("do_sample") else {}
    request = prepare(
        target,
        [*prompts, *[prompts[0]] * padding],
        drafter=drafter,
        tree=tree,
        max_new_tokens=[max_new_tokens] * len(prompts) + [1] * padding,
        backend=backend,
        **sampling,
    )
    request = in_bucket(request)
    if request.sampling is not None and indices is not None:
        keys = row_keys(seed, jnp.array([*indices, *[0] * padding]))
        drawn = dataclasses.replace(request.sampling, keys=keys)
        request = dataclasses.replace(request, sampling=drawn)
    return _continued(request, len(prompts), [stop for stop in until if stop])


def _continued(request: Request, count: int, until: Sequence[str]) -> Continued:
    """Returns the result of a request's first `count` rows."""
    state, _ = runner.prefill_and_init(request)
    while True:
        state, _ = runner.run(request, request.settings, state, ROUNDS)
        arrays = (state.output, state.emitted, state.ended, state.histogram)
        output, emitted, ended, histogram = (x[:count] for x in jax.device_get(arrays))
        texts = [_text(request, row[:n]) for row, n in zip(output, emitted, strict=True)]
        stops = [_first_stop(text, until) for text in texts]
        if all(end or stop < len(text) for end, stop, text in zip(ended, stops, texts)):
            cut = [text[:stop] for text, stop in zip(texts, stops, strict=True)]
            return Continued(cut, int((emitted - 1).sum()), int(histogram.sum()))


def _text(request: Request, tokens: Int[np.ndarray, "n"]) -> str:
    """Returns the text of a row's new tokens without a final EOS token."""
    if np.isin(tokens[-1], np.asarray(request.eos)):
        tokens = tokens[:-1]
    return request.target.tokenizer.decode(tokens, skip_special_tokens=True)


def _first_stop(text: str, until: Sequence[str]) -> int:
    """Returns the index of the first stop string, or the length of the text."""
    return min((i for stop in until if (i := text.find(stop)) >= 0), default=len(text))


def in_bucket(request: Request) -> Request:
    """Returns the request in a shape that prompts of similar lengths share.

    Prompts are padded to a power of two, 700 and 900 tokens to 1,024, and the capacity follows from
    that. The output does not change.
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
