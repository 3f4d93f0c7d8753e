"""Errors in the shape of OpenAI's API."""

from collections.abc import Mapping
from typing import Any

from magicjax.checks import OptionError
from magicjax.engine.config import EngineLimitError
from magicjax.engine.scheduler import QueueFullError

# How to start a server whose engine has another configuration.
REMEDIES = {
    "sampling": "without --greedy",
    "capacity": "with a larger --capacity",
    "max_tokens": "with a larger --max-tokens",
}
SHOWN = 60  # characters of a wrong value in an error
RETRY_AFTER_S = 1  # a slot is free when the shortest request ends; clients back off further


class ApiError(Exception):
    """An error that is the answer to a request.

    Attributes:
      status: HTTP status.
      message: for the client.
      type: as OpenAI names it.
      param: the field of the body; None for other errors.
      code: as OpenAI names it; None without one.
      headers: headers of the answer.
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
    if not isinstance(error, OptionError):
        return ApiError(400, str(error))
    param, code = fields.get(error.field, error.field), None
    message = error.naming(param if error.value is ... else f"{param}={shown(error.value)}")
    if isinstance(error, EngineLimitError):
        if remedy := REMEDIES.get(error.config):
            message = f"{message}, or start the server {remedy}"
        code = "context_length_exceeded" if error.config == "capacity" else None
    return ApiError(400, message, param=param, code=code)


def shown(value: Any) -> str:
    """Returns a wrong value for an error, cut if it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
