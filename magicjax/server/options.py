"""Which requests a server accepts."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Keys, names and limits of a server.

    Attributes:
      api_key: which requests to /v1/ must have; None for none.
      allowed_hosts: names of the server in addition to localhost and IP addresses; "*" for any.
      cors_origins: of web pages that may use the server; "*" for any.
      max_body_bytes: of a request.
      body_s: seconds in which a body must arrive.
      max_requests_per_client: the most open requests from one address.
      stall_s: seconds without progress after which /health fails.
    """

    api_key: str | None
    allowed_hosts: Sequence[str]
    cors_origins: Sequence[str]
    max_body_bytes: int
    body_s: float
    max_requests_per_client: int
    stall_s: float
