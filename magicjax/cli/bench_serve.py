"""`magicjax bench-serve`: latency and throughput of servers with OpenAI's API under load."""

import argparse
import asyncio
import math
import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from magicjax.cli import INTERRUPTED
from magicjax.cli.serve import API_KEY
from magicjax.options import token_count

if TYPE_CHECKING:
    from magicjax.benchmarks.http_load.client import Request, Sample
    from magicjax.benchmarks.http_load.load import Level, Run
    from magicjax.benchmarks.http_load.summary import Targets

URL = "http://127.0.0.1:8000"
CONCURRENCY = (1, 4, 16)
FAILED = 1  # exit code
CALIBRATION = 4000  # characters of the prompt that shows how long tokens are


def add(commands: Any) -> None:
    """Adds the subcommand to those of `magicjax`."""
    parser = commands.add_parser(
        "bench-serve",
        description="Sends requests to one or more servers with OpenAI's API, level by level, and "
        "reports tokens/s, time to first token (TTFT), time per output token (TPOT), end-to-end "
        "latency, goodput and the acceptance length. Exit code 1: a request failed with a status "
        "other than 429.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--url",
        action="append",
        metavar="[LABEL=]URL",
        help="server, such as on=http://127.0.0.1:8001; repeat it to compare servers, the last of "
        f"which is the baseline; default: {URL}",
    )
    parser.add_argument("--model", help="name for the servers; default: the one that each has")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"of all servers; default: ${API_KEY}, which other users of the machine cannot read",
    )
    _add_load(parser.add_argument_group("load"))
    _add_requests(parser.add_argument_group("requests"))
    group = parser.add_argument_group("report")
    group.add_argument(
        "--max-ttft", type=float, metavar="S", help="seconds, for goodput; default: no limit"
    )
    group.add_argument(
        "--max-tpot", type=float, metavar="MS", help="milliseconds, for goodput; default: no limit"
    )
    group.add_argument(
        "--output",
        default="bench-serve",
        metavar="DIR",
        help="for levels.csv, requests.csv and report.html, which are overwritten; default: "
        "bench-serve",
    )
    parser.set_defaults(run=run)


def _add_load(group: Any) -> None:
    levels = group.add_mutually_exclusive_group()
    levels.add_argument(
        "--concurrency",
        type=_numbers(int),
        metavar="N,...",
        help="levels: requests in flight, of users who wait for their answers; default: "
        + ",".join(map(str, CONCURRENCY)),
    )
    levels.add_argument(
        "--rates",
        type=_numbers(float),
        metavar="R,...",
        help="levels: requests per second, which arrive as a Poisson process",
    )
    group.add_argument(
        "--requests", type=int, default=32, help="of a level on a server; default: 32"
    )
    group.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="after which a level on a server sends no more requests; default: 120",
    )
    group.add_argument("--repeats", type=int, default=1, help="of all levels; default: 1")
    group.add_argument(
        "--timeout", type=float, default=300.0, help="seconds without data; default: 300"
    )


def _add_requests(group: Any) -> None:
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help='JSON lines with "messages", "prompt" or "turns", of which the first one is sent, and '
        'optionally "category"; used cyclically; default: bundled messages',
    )
    group.add_argument(
        "--prompt-tokens",
        type=token_count,
        metavar="N",
        help="put source code of Python's standard library before each prompt, so that it has "
        "about N tokens; default: prompts as they are",
    )
    group.add_argument(
        "--api",
        choices=("chat", "completions"),
        help="send all lines to this API; default: messages to chat, prompts to completions",
    )
    group.add_argument(
        "--max-tokens", type=token_count, default=128, help="of an answer; default: 128"
    )
    group.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    group.add_argument(
        "--seed", type=int, default=0, help="of arrivals, and of the first request; default: 0"
    )


def _numbers(kind: Callable[[str], float]) -> Callable[[str], list[float]]:
    """Returns the type of an option that is a list of positive numbers, for `argparse`."""

    def parse(text: str) -> list[float]:
        try:
            numbers = [kind(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if not numbers or not all(0 < number < math.inf for number in numbers):
            raise argparse.ArgumentTypeError(f"{text!r} must be positive numbers, such as 1,4,16")
        return list(dict.fromkeys(numbers))

    return parse


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table and writes the report; returns the exit code.

    An interrupt ends the measurement, and the report has what was measured until then.

    Raises:
      ValueError, OSError: invalid options, a missing package, or a server that does not answer.
    """
    try:
        from magicjax.benchmarks.http_load import report, summary
        from magicjax.benchmarks.http_load.prompts import read_prompts
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        raise ValueError(
            'magicjax bench-serve requires httpx: pip install "magicjax[serve]"'
        ) from error
    urls, targets = _checked(arguments)
    prompts = read_prompts(arguments.prompts, arguments.api)
    folder = pathlib.Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    code = 0
    try:
        asyncio.run(_measure(arguments, urls, prompts, runs))
    except KeyboardInterrupt:
        code = INTERRUPTED
        _note("interrupted: the report has the requests that have ended")
    if not any(run.samples for run in runs):
        return code
    rows, categories = summary.summarize(runs, targets), summary.by_category(runs)
    print(report.terminal_table(rows, categories))
    report.write(folder, runs, rows, categories, _settings(arguments, runs, len(prompts)))
    _note("wrote " + ", ".join(str(folder / name) for name in report.FILES))
    failed = summary.failures(runs)
    if failed:
        count = sum(len(run.samples) for run in runs)
        _note(
            f"{len(failed)} of {count} requests failed; the first: {failed[0].status}: "
            f"{failed[0].error}"
        )
    return code or (FAILED if failed else 0)


def _checked(arguments: argparse.Namespace) -> tuple[dict[str, str], "Targets"]:
    """Returns the URLs by label, and the targets; raises ValueError for invalid options."""
    from magicjax.benchmarks.http_load.summary import Targets

    urls: dict[str, str] = {}
    for text in arguments.url or [URL]:
        found = re.fullmatch(r"(?:([\w .-]+)=)?(https?://[^/?#@\s]+)(?:/v1)?/?", text)
        if not found or not urlsplit(found[2]).hostname:
            raise ValueError(f"url={text}: it must be like {URL} or LABEL={URL}")
        label = found[1] or urlsplit(found[2]).netloc
        if label in urls:
            raise ValueError(f"url={text}: the label {label!r} is used twice: write LABEL=URL")
        urls[label] = found[2]
    for name in ("requests", "repeats", "max_tokens"):
        if (value := getattr(arguments, name)) < 1:
            raise ValueError(f"{name}={value}: it must be at least 1")
    for name in ("seconds", "timeout", "max_ttft", "max_tpot"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value:g}: it must be above 0")
    if not 0 <= arguments.temperature < math.inf:
        raise ValueError(f"temperature={arguments.temperature:g}: it must be 0 or more")
    most = 1 if arguments.rates else max(arguments.concurrency or CONCURRENCY)
    if arguments.requests < most:
        raise ValueError(
            f"requests={arguments.requests} is less than the concurrency {most}: raise --requests"
        )
    tpot_s = None if arguments.max_tpot is None else arguments.max_tpot / 1e3
    return urls, Targets(arguments.max_ttft, tpot_s)


def _requests(arguments: argparse.Namespace, prompts: "Sequence[Request]") -> "list[Request]":
    """Returns the requests of a level."""
    from magicjax.benchmarks.http_load.client import Request

    shared = dict(max_tokens=arguments.max_tokens, temperature=arguments.temperature)
    requests = []
    for n in range(arguments.requests):
        prompt = prompts[n % len(prompts)]
        seed = {"seed": arguments.seed + n} if arguments.temperature else {}
        requests.append(Request(prompt.path, prompt.body | shared | seed, prompt.category))
    return requests


def _lengthened(
    requests: "Sequence[Request]", tokens: int, samples: "Sequence[Sample]", long: "Request"
) -> "list[Request]":
    """Returns the requests with about so many prompt tokens each.

    Args:
      requests: of any length.
      tokens: of a prompt.
      samples: of `long`, whose characters per token are those of the text before each prompt.
      long: a request with mostly that text.
    """
    from magicjax.benchmarks.http_load.prompts import with_text_before

    counts = [sample.prompt_tokens for sample in samples if sample.prompt_tokens]
    if not counts:
        raise ValueError("prompt_tokens: the servers send no usage: omit --prompt-tokens")
    per_token = len(str(long.body)) / max(counts)
    found = []
    for number, request in enumerate(requests):
        missing = int(tokens * per_token) - len(str(request.body))
        found.append(with_text_before(request, max(0, missing), number))
    return found


def _levels(arguments: argparse.Namespace) -> "list[Level]":
    from magicjax.benchmarks.http_load.load import Level

    if arguments.rates:
        return [Level(rate=rate) for rate in arguments.rates]
    return [Level(concurrency=number) for number in arguments.concurrency or CONCURRENCY]


async def _measure(
    arguments: argparse.Namespace,
    urls: dict[str, str],
    prompts: "Sequence[Request]",
    runs: "list[Run]",
) -> None:
    """Appends to `runs`; raises ValueError or OSError for a server that cannot be measured."""
    from magicjax.benchmarks.http_load import client as http
    from magicjax.benchmarks.http_load import load
    from magicjax.benchmarks.http_load.prompts import with_text_before

    key = os.environ.get(API_KEY) if arguments.api_key is None else arguments.api_key
    async with http.make_client(key, arguments.timeout) as client:
        servers = []
        for label, url in urls.items():
            name = arguments.model or await http.find_model(client, url)
            servers.append(http.Server(label, url, name))
        requests = _requests(arguments, prompts)
        first = requests[0]
        if tokens := arguments.prompt_tokens:
            first = with_text_before(first, min(tokens, CALIBRATION), 0)
        samples = await load.warm_up(client, servers, first)
        if tokens:
            requests = _lengthened(requests, tokens, samples, first)
        await load.measure(
            client,
            servers,
            _levels(arguments),
            requests,
            seconds=arguments.seconds,
            seed=arguments.seed,
            repeats=arguments.repeats,
            runs=runs,
            note=_note,
        )


def _settings(arguments: argparse.Namespace, runs: "Sequence[Run]", prompts: int) -> dict[str, str]:
    """Returns what the page says about the load."""
    limits = [f"TTFT {arguments.max_ttft:g} s"] if arguments.max_ttft else []
    limits += [f"TPOT {arguments.max_tpot:g} ms"] if arguments.max_tpot else []
    servers = dict.fromkeys(run.server for run in runs)
    return {
        **{server.label: f"{server.model} at {server.url}" for server in servers},
        "arrivals": f"Poisson, seed {arguments.seed}" if arguments.rates else "closed loop",
        "requests": f"{arguments.requests} for each level and server, sent within "
        f"{arguments.seconds:g} s, repeats: {arguments.repeats}",
        "prompts": f"{prompts} from {arguments.prompts or 'the bundled file'}"
        + (f", of about {arguments.prompt_tokens} tokens" if arguments.prompt_tokens else ""),
        "answers": f"at most {arguments.max_tokens} tokens, temperature {arguments.temperature:g}",
        "limits of goodput": ", ".join(limits) or "none",
    }


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
