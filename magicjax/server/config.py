"""Which requests a server accepts, and how long it waits."""

import dataclasses
from collections.abc import Sequence

from magicjax.options import check_options, documented, options_of, setting


@documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Keys, names and limits of a server.

    {attributes}

    Raises:
      ValueError, TypeError: a value of another type or outside its range.
    """

    api_key: str | None = setting(
        None, "the key that requests to /v1/ must have; None for a server without one"
    )
    allowed_hosts: Sequence[str] = setting(
        (),
        "names of the server, in addition to localhost and all IP addresses: requests to others "
        "are refused, because a web page can let its own name resolve to this server; * for any",
    )
    cors_origins: Sequence[str] = setting(
        (),
        "origins of web pages that may use the server, such as https://app.example; * for any",
    )
    max_body_bytes: int = setting(4 * 2**20, "the most bytes of a request's body", ge=1)
    body_s: float = setting(30.0, "seconds in which the body of a request must arrive", gt=0)
    max_requests_per_client: int = setting(
        256, "open requests from one address; others get 429", ge=1
    )
    stall_s: float = setting(
        120.0,
        "seconds after which /health fails if requests wait and no step of the engine has ended",
        gt=0,
    )
    drain_s: float = setting(
        30.0,
        "seconds that running requests may take after SIGTERM or Ctrl-C; a second signal ends the "
        "server at once",
        ge=0,
    )
    keep_alive_s: int = setting(
        10, "seconds after which a connection without a request is closed", ge=1
    )
    max_connections: int = setting(  # many systems allow a process 1,024 files
        1000, "the most open connections; requests on others get 503", ge=1
    )

    def __post_init__(self):
        check_options(self, options_of(type(self)).values())
