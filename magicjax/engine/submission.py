"""Validation of a submitted request, on the host, before anything runs."""

from typing import Any

import jax
from jax.sharding import Mesh

from magicjax.checks import OptionError, check_number
from magicjax.decoding.prompts import token_ids
from magicjax.decoding.reasoning import thinking_budget
from magicjax.decoding.text import Text, matcher_of
from magicjax.decoding.validation import bad_sequences, check_for_target, check_params
from magicjax.engine.config import EngineLimitError
from magicjax.engine.setup import EngineSetup
from magicjax.model import Model
from magicjax.sampling_params import SamplingParams
from magicjax.verification.logits_processor import MAX_SEQUENCE, MAX_SEQUENCES


def validated_text(
    setup: EngineSetup,
    prompt: Any,
    params: SamplingParams,
    priority: float,
    deadline_s: float | None,
) -> Text:
    """Returns the empty text of a request.

    Raises:
      ValueError, TypeError: as `Engine.submit`.
    """
    check_params(params)
    (tokens,) = token_ids(setup.row.target, [prompt])
    check_number("priority", priority, float)
    if deadline_s is not None:
        check_number("deadline_s", deadline_s, float, gt=0)
    mesh = setup.row.settings.mesh
    if isinstance(mesh, Mesh) and mesh.is_multi_process:
        for name, value in (("deadline_s", deadline_s), ("priority", priority or None)):
            if value is not None:
                raise ValueError(
                    f"{name}={value} on a mesh of {jax.process_count()} processes, whose clocks "
                    f"differ: omit {name}"
                )
    setup.config.check_params(params)
    check_for_target(setup.row.target, params)
    _check_bad_words(setup.row.target, params)
    thinking_budget(setup.row.target, tokens.tolist(), params)
    limit = _limit(setup, len(tokens), params.max_tokens)
    row = setup.row
    matcher = matcher_of(row.target, tokens, params, row.eos)
    return Text(row.target.tokenizer, tokens, params, limit, row.eos, matcher)


def _check_bad_words(target: Model, params: SamplingParams) -> None:
    """Raises ValueError if the tokenizations of `bad_words` exceed an engine's limits."""
    sequences = bad_sequences(target, params)
    if len(sequences) > MAX_SEQUENCES or any(len(each) > MAX_SEQUENCE for each in sequences):
        raise OptionError(
            f"{{}} have {len(sequences)} tokenizations of at most {max(map(len, sequences))} "
            f"tokens: at most {MAX_SEQUENCES} of at most {MAX_SEQUENCE} are supported; use fewer "
            "or shorter words",
            "bad_words",
        )


def _limit(setup: EngineSetup, length: int, limit: int | None) -> int:
    """Returns the limit of new tokens of a prompt of `length` tokens."""
    capacity = setup.capacity
    too_long = None
    if length > capacity or (length == capacity and limit != 0):
        too_long = f"the capacity of {capacity} leaves no room for new ones: shorten the prompt"
    elif length + (limit or 0) > capacity:
        too_long = (
            f"with {limit} new ones it exceeds the capacity of {capacity}: use at most "
            f"{capacity - length} new tokens, shorten the prompt"
        )
    if too_long is not None:
        message = f"the prompt has {length} tokens, and {too_long}"
        raise EngineLimitError(message, "prompt", ..., "capacity", "a larger capacity")
    return min(setup.config.max_tokens, capacity - length) if limit is None else limit
