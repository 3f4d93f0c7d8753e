"""Validation of a submitted request, on the host, before anything runs."""

import math
import numbers
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from magicjax.decoding.validation import (
    RequestOptions,
    check_count,
    checked_logprobs,
    checked_stop,
    token_ids,
)
from magicjax.engine.handle import Submitted
from magicjax.engine.templates import Templates, any_sampling
from magicjax.grammars.arena import CLASSES, automaton_of
from magicjax.grammars.compiler import TokenAutomaton
from magicjax.grammars.grammar import Grammar
from magicjax.verification.sampling import Sampling
from sharding import processes


def checked(
    templates: Templates,
    prompt: Any,
    *,
    max_new_tokens: int | None,
    sampling: dict[str, Any],
    stop: str | Sequence[str],
    grammar: Grammar | None,
    logprobs: int | None,
    priority: float,
    deadline_s: float | None,
) -> Submitted:
    """Returns the validated request, submitted now; `sampling` has the four sampling arguments.

    Raises:
      ValueError, TypeError: as `Engine.submit`.
    """
    (tokens,) = token_ids(templates.row.target, [prompt])
    for name, value in (("deadline_s", deadline_s), ("priority", priority)):
        if not isinstance(value, numbers.Real | None):
            raise TypeError(f"{name}={value!r}: it must be a number")
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
    now = time.monotonic()
    return Submitted(
        prompt=tokens,
        limit=_checked_limit(templates, len(tokens), max_new_tokens),
        sampling=_checked_sampling(templates, **sampling),
        stop=checked_stop(templates.row.target, stop),
        grammar=_checked_grammar(templates, grammar),
        logprobs=_checked_logprobs(templates, logprobs),
        priority=priority,
        submitted_s=now,
        deadline_s=None if deadline_s is None else now + deadline_s,
    )


def check_samples(templates: Templates, n: int, temperature: float | None) -> None:
    """Raises TypeError or ValueError unless `n` requests of one prompt can differ."""
    check_count("n", n)
    if n > 1 and (not templates.sampled or temperature == 0):
        raise ValueError(
            f"n={n} greedy requests of one prompt have equal texts: use n=1, or create the engine "
            "with do_sample=True and give a temperature above 0"
        )


def _checked_limit(templates: Templates, length: int, limit: int | None) -> int:
    """Returns the limit of new tokens of a prompt of `length` tokens."""
    capacity, largest = templates.capacity, templates.row.settings.max_new_tokens
    if length >= capacity:
        raise ValueError(
            f"the prompt has {length} tokens, and capacity={capacity} leaves no room for new "
            "ones: shorten the prompt, or create the engine with a larger capacity"
        )
    if limit is None:
        return min(largest, capacity - length)
    check_count("max_new_tokens", limit)
    if limit > largest:
        raise ValueError(
            f"max_new_tokens={limit}: it must be at most {largest}, the limit of the engine"
        )
    if length + limit > capacity:
        raise ValueError(
            f"the prompt has {length} tokens, and with max_new_tokens={limit} it exceeds "
            f"capacity={capacity}: use at most {capacity - length} new tokens, shorten the "
            "prompt, or create the engine with a larger capacity"
        )
    return limit


def _checked_logprobs(templates: Templates, logprobs: int | None) -> int | None:
    """Returns the number of alternatives of a request; None without log-probabilities."""
    count, limit = checked_logprobs(templates.row.target, logprobs), templates.row.settings.logprobs
    if count is None or (limit is not None and count <= limit):
        return count
    raise ValueError(
        f"logprobs={count} in an engine with logprobs={limit}: create the engine with "
        f"logprobs={count}, or {'omit it' if limit is None else 'request fewer'}"
    )


def _checked_grammar(templates: Templates, grammar: Grammar | None) -> TokenAutomaton | None:
    """Returns the automaton of a request's grammar, which fits the engine's table."""
    if grammar is None:
        return None
    row = templates.row
    if row.transitions is None:
        raise ValueError(
            "grammar in an engine without grammars: create the engine with grammar_states=4096"
        )
    automaton = automaton_of(row.target, grammar, processes.fetch(row.eos).tolist())
    states, classes = automaton.next.shape
    needed, limit = -(-(automaton.next.size + 1) // CLASSES), len(row.transitions) // CLASSES
    if needed > limit:
        raise ValueError(
            f"the grammar has {states} states of {classes} token classes, which take {needed} of "
            f"the engine's grammar_states={limit}: create the engine with at least {needed}, or "
            "simplify the grammar"
        )
    return automaton


def _checked_sampling(
    templates: Templates,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
) -> Sampling | None:
    """Returns the sampling of one request; None in a greedy engine.

    Temperature 0 means greedy decoding, which a sampled engine runs as top_k=1.

    Raises:
      ValueError: a sampled request in a greedy engine, or invalid parameters.
    """
    greedy = temperature == 0
    if greedy:
        for name, value in (("top_k", top_k), ("top_p", top_p), ("seed", seed)):
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} has no effect with temperature=0, which decodes greedily: "
                    f"omit {name}, or give a temperature above 0"
                )
    if not templates.sampled:
        given = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        for name, value in given.items():
            if value is not None and not greedy:
                raise ValueError(
                    f"{name}={value!r} in an engine that decodes greedily: create the engine with "
                    f"do_sample=True, or omit {name}"
                )
        return None
    if greedy:
        temperature, top_k = None, 1
    options = RequestOptions(
        do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    return any_sampling(options, 1)
