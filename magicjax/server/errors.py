"""Errors in the shape of OpenAI's API."""

import re
from collections.abc import Mapping
from typing import Any

from magicjax.engine.scheduler import QueueFullError

# Errors of the engine name its Python arguments; clients of the server know its options.
OPTIONS = {
    r"create the engine with sampling=True": "start the server without --greedy",
    r"create the engine with a larger capacity": "start the server with a larger --capacity",
    r"\bcapacity=": "--capacity ",
    r"the limit of the engine, or None for": "the limit of the server (--max-tokens); omit it for",
    r"or None for as many": "omit the limit for as many",
    r"\b(an|the) engine\b": "the server",
}
RETRY_AFTER_S = 1  # a slot is free when the shortest request ends; clients back off further


class ApiError(Exception):
    """An error that is the answer to a request.

    Attributes:
      status: of HTTP.
      message: for the client.
      type: as OpenAI names it.
      param: the field of the body; None for other errors.
      code: as OpenAI names it; None without one.
      headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.type = status, message, type
        self.param, self.code, self.headers = param, code, headers

    def body(self) -> dict[str, Any]:
        """Returns the body of the answer."""
        error = dict(message=self.message, type=self.type, param=self.param, code=self.code)
        return {"error": error}


def server_error(message: str, status: int = 500) -> ApiError:
    """Returns an error that is not the client's."""
    return ApiError(status, message, type="server_error")


def too_many_requests(message: str, code: str) -> ApiError:
    """Returns an error that asks the client to try again later."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(429, message, type="rate_limit_error", code=code, headers=headers)


def refused(error: Exception, fields: Mapping[str, str]) -> ApiError:
    """Returns the answer to an error of `Engine.submit`.

    Args:
      error: a full queue is 429, other ValueErrors and TypeErrors are 400, the rest is 500.
      fields: the body's fields for parameters of other names.
    """
    if isinstance(error, QueueFullError):
        return too_many_requests("the queue is full: try again later", "queue_full")
    if not isinstance(error, ValueError | TypeError):
        return server_error(f"the request failed: {type(error).__name__}")
    message = str(error)
    for parameter, field in fields.items():
        message = re.sub(rf"\b{parameter}=", f"{field}=", message, count=1)
    named = re.match(
        r"(?:the )?(\w+)(?:=| has the token | with a grammar | has \d+ tokens,)", message
    )
    param = named and fields.get(named[1], named[1])
    code = "context_length_exceeded" if "capacity=" in message else None
    for pattern, words in OPTIONS.items():
        message = re.sub(pattern, words, message)
    return ApiError(400, message, param=param, code=code)
