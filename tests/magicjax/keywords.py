"""Calls of `magicjax` with parameters and options as keywords of one dict, which tests vary.

A list of `max_tokens`, `temperature`, `top_k`, `top_p` or `grammar` has one value for each row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import magicjax
from magicjax.decoding import preparation
from magicjax.decoding.request import Request, RequestOptions
from sharding import global_arrays

OF_ONE = (
    "stop",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)  # sequences of one row
FIELDS = tuple(magicjax.SamplingParams.__dataclass_fields__)


def split(
    rows: int, **settings: Any
) -> tuple[magicjax.SamplingParams | list[magicjax.SamplingParams], dict[str, Any]]:
    """Returns (parameters, keyword arguments) for `rows` prompts."""
    given = {name: settings.pop(name) for name in FIELDS if name in settings}
    given = {name: getattr(value, "tolist", lambda v=value: v)() for name, value in given.items()}
    lists = {
        name: value
        for name, value in given.items()
        if name not in OF_ONE and isinstance(value, Sequence) and not isinstance(value, str)
    }
    if not lists:
        return magicjax.SamplingParams(**given), settings
    each = [{name: values[row] for name, values in lists.items()} for row in range(rows)]
    return [magicjax.SamplingParams(**given | own) for own in each], settings


def generate(target: magicjax.Model, prompts: Any, **settings: Any) -> magicjax.Output:
    params, options = split(len(prompts), **settings)
    return magicjax.generate(target, prompts, params, **options)


def stream(target: magicjax.Model, prompts: Any, **settings: Any) -> Any:
    """Yields the new tokens of each row."""
    params, options = split(len(prompts), **settings)
    return _tokens(magicjax.stream(target, prompts, params, **options))


def _tokens(rounds: Any) -> Any:
    sent = None
    try:
        while True:
            sent = yield [piece.tokens for piece in rounds.send(sent)]
    except StopIteration as end:
        return end.value


def prepare(
    target: magicjax.Model, prompts: Any, put: Callable = global_arrays.put, **settings: Any
) -> Request:
    """Returns the placed request; of a target without weights, the validated one."""
    params, keywords = split(len(prompts), **settings)
    options = RequestOptions(**keywords)
    request = preparation.validated_request(target, prompts, params, options)
    if target.params is None:
        return request
    return preparation.place(request, options.micro_batches, put)
