"""Validation of a submitted request, on the host, before anything runs."""

import math
import time
from typing import Any

import jax
from jax.sharding import Mesh

from magicjax.checks import check_real
from magicjax.decoding.prompts import token_ids
from magicjax.decoding.reasoning import thinking_budget
from magicjax.decoding.text import matcher_of
from magicjax.decoding.validation import bad_sequences, check_params, check_stop, check_token_ids
from magicjax.engine.request import EngineRequest
from magicjax.engine.templates import Templates
from magicjax.model import Model
from magicjax.sampling_params import SamplingParams
from magicjax.verification.logits_processor import MAX_SEQUENCE, MAX_SEQUENCES


def validated(
    templates: Templates,
    prompt: Any,
    params: SamplingParams,
    priority: float,
    deadline_s: float | None,
) -> EngineRequest:
    """Returns the request, submitted now.

    Raises:
      ValueError, TypeError: as `Engine.submit`.
    """
    check_params(params)
    (tokens,) = token_ids(templates.row.target, [prompt])
    for name, value in (("deadline_s", deadline_s), ("priority", priority)):
        if value is not None or name == "priority":
            check_real(name, value)
    if deadline_s is not None and not deadline_s > 0:
        raise ValueError(f"deadline_s={deadline_s}: it must be above 0 seconds from now")
    if not math.isfinite(priority):
        raise ValueError(f"priority={priority}: it must be finite")
    mesh = templates.row.settings.mesh
    if isinstance(mesh, Mesh) and mesh.is_multi_process:
        for name, value in (("deadline_s", deadline_s), ("priority", priority or None)):
            if value is not None:
                raise ValueError(
                    f"{name}={value} on a mesh of {jax.process_count()} processes, whose clocks "
                    f"differ: omit {name}"
                )
    templates.config.check_params(params)
    check_stop(templates.row.target, [params])
    check_token_ids(templates.row.target, params)
    _check_bad_words(templates.row.target, params)
    thinking_budget(templates.row.target, tokens.tolist(), params)
    now = time.monotonic()
    return EngineRequest(
        prompt=tokens,
        params=params,
        max_tokens=_limit(templates, len(tokens), params.max_tokens),
        matcher=matcher_of(templates.row.target, tokens, params, templates.row.eos),
        priority=priority,
        submitted_s=now,
        deadline_s=None if deadline_s is None else now + deadline_s,
    )


def _check_bad_words(target: Model, params: SamplingParams) -> None:
    """Raises ValueError if the tokenizations of `bad_words` exceed an engine's limits."""
    sequences = bad_sequences(target, params)
    if len(sequences) > MAX_SEQUENCES or any(len(each) > MAX_SEQUENCE for each in sequences):
        raise ValueError(
            f"bad_words have {len(sequences)} tokenizations of at most "
            f"{max(map(len, sequences))} tokens, and an engine excludes {MAX_SEQUENCES} of at most "
            f"{MAX_SEQUENCE}: use fewer or shorter words"
        )


def _limit(templates: Templates, length: int, limit: int | None) -> int:
    """Returns the limit of new tokens of a prompt of `length` tokens."""
    capacity = templates.capacity
    if length > capacity or (length == capacity and limit != 0):
        raise ValueError(
            f"the prompt has {length} tokens, and capacity={capacity} leaves no room for new "
            "ones: shorten the prompt, or create the engine with a larger capacity"
        )
    if limit is None:
        return min(templates.config.max_tokens, capacity - length)
    if length + limit > capacity:
        raise ValueError(
            f"the prompt has {length} tokens, and with max_tokens={limit} it exceeds "
            f"capacity={capacity}: use at most {capacity - length} new tokens, or None for as many "
            "as fit, shorten the prompt, or create the engine with a larger capacity"
        )
    return limit
