"""`magicjax serve`: an HTTP server with OpenAI's API."""

import argparse
import dataclasses
import functools
import ipaddress
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import magicjax
from magicjax.checks import OptionError, check_number, counted
from magicjax.cli import arg_utils, drafting, model_options
from magicjax.decoding import memory, program_cache
from magicjax.decoding.request import Request
from magicjax.drafters.spec import Drafters, Trees, resolve
from magicjax.engine import memory_check
from magicjax.engine.setup import validated_row
from magicjax.model import DTYPES, Model
from magicjax.options import token_count
from magicjax.server.config import ServerConfig
from magicjax.sources import Source
from magicjax.verification.logprobs import MAX_ALTERNATIVES
from sharding import parse_mesh

# Settings of the engine that other options, or none, decide.
SET = ("sampling", "adaptive", "grammars", "logits_processors", "logprobs")
API_KEY = "MAGICJAX_API_KEY"
# Those of the extra `serve`.
PACKAGES = {"starlette", "uvicorn", "prometheus_client", "pydantic", "pydantic_core", "llguidance"}
TOOL_FORMATS = ("hermes", "llama3")


def add(commands: Any) -> None:
    """Adds the subcommand to those of `magicjax`."""
    parser = commands.add_parser(
        "serve",
        description="Serves /v1/completions and /v1/chat/completions on an engine, a status page "
        "at / and metrics at /metrics.",
        epilog=drafting.drafters_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--verbose", action="store_true", help="log compilations and the size of the caches"
    )
    _add_model(parser)
    _add_engine(parser.add_argument_group("engine"))
    _add_server(parser.add_argument_group("server"))
    parser.set_defaults(run=run)


def _add_model(parser: Any) -> None:
    parser.add_argument(
        "--target",
        required=True,
        help="model directory, GGUF file, or name that `magicjax fetch` lists",
    )
    parser.add_argument("--served-model-name", help="for clients; default: the name of --target")
    parser.add_argument("--tokenizer", help="tokenizer directory, if --target has no tokenizer")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of all models; default: as stored; on a CPU bfloat16 with the native kernels "
        "or with instructions for it, else float32",
    )
    model_options.add_backend(parser)
    parser.add_argument(
        "--mesh",
        metavar="data=1,model=8",
        help="shard the target's heads, MLP and vocabulary (model) and the slots (data)",
    )
    model_options.add_weights(parser)
    model_options.add_activations(parser)
    parser.add_argument(
        "--tool-format",
        choices=TOOL_FORMATS,
        help="format of tool calls; default: that of the chat template, if it is one of these",
    )
    drafting.add_adaptive_speculation(parser)


def _add_engine(group: Any) -> None:
    group.add_argument(
        "--greedy",
        action="store_true",
        help="decode all requests greedily, which is faster; default: requests sample, with "
        "temperature 1 unless they give another; 0 is greedy",
    )
    arg_utils.add_settings(
        group,
        magicjax.EngineConfig,
        ("eos_token_id", *SET, "verifier", "backend"),
        slots=dict(
            help=f"requests decoded at once; default: {magicjax.EngineConfig.slots}, or without "
            "--mesh fewer if the caches are larger than the weights and 1 GB"
        ),
        capacity=dict(type=token_count, metavar="TOKENS"),
        max_tokens=dict(
            type=token_count,
            help="limit of the new tokens of any request; default: the rest of --capacity",
        ),
    )


def _add_server(group: Any) -> None:
    group.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    group.add_argument("--port", type=int, default=8000, help="default: 8000; 0: a free one")
    group.add_argument(
        "--api-key-file", type=pathlib.Path, metavar="FILE", help="a file with the key alone"
    )
    arg_utils.add_settings(
        group,
        ServerConfig,
        api_key=dict(
            metavar="KEY",
            help=f"the key that requests must have; default: ${API_KEY}, which other users of the "
            "machine cannot read; without one, no key is needed",
        ),
        allowed_hosts=dict(type=names, metavar="NAME,NAME"),
        cors_origins=dict(type=names, metavar="ORIGIN,ORIGIN"),
    )


def names(text: str) -> tuple[str, ...]:
    """Returns the names of a list with commas: "a, b" is ("a", "b")."""
    items = tuple(name.strip() for name in text.split(","))
    if not all(items):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name: separate names by commas")
    return items


def run(arguments: argparse.Namespace) -> int:
    """Serves until a signal arrives; returns the exit code.

    Raises:
      ValueError, OSError: invalid options, missing packages, or an address that is in use; these
        are checked before weights are loaded.
    """
    try:
        import llguidance  # noqa: F401  (an engine with grammars needs it when it warms up)

        from magicjax.server.app import create_app
        from magicjax.server.protocol import Served
        from magicjax.server.run import bind
        from magicjax.server.run import run as serve
        from magicjax.server.tool_calls import FORMATS
        from magicjax.server.worker import Worker
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        raise ValueError(
            f'magicjax serve requires {error.name}: pip install "magicjax[serve]"'
        ) from error
    server_config, (drafters, trees) = _server_config(arguments), _speculation(arguments)
    name = arguments.served_model_name or pathlib.Path(arguments.target).resolve().name
    engine_arguments, rows = _engine_arguments(arguments, drafters, trees)
    with bind(arguments.host, arguments.port) as bound:
        host, port = bound.getsockname()[:2]
        if server_config.api_key is None and not ipaddress.ip_address(host).is_loopback:
            _note(f"warning: anyone who reaches {host} can use the model: set ${API_KEY}")
        _note(f"loading the weights of {name}")
        start = time.monotonic()
        engine = magicjax.Engine(**engine_arguments)
        worker = Worker(engine)
        loaded, before = time.monotonic(), program_cache.totals()
        _note(
            f"loading took {loaded - start:.1f} s; compiling {engine.num_programs} programs: "
            "seconds to minutes"
        )
        worker.warm_up(_progress(engine.num_programs))
        count, compile_s = program_cache.totals()
        _note(
            f"warm-up took {time.monotonic() - loaded:.1f} s, {compile_s - before[1]:.1f} s of it "
            f"to compile {count - before[0]} programs"
        )
        tool_format = FORMATS.get(arguments.tool_format)
        served = Served(name, engine_arguments["target"], engine.config, tool_format)
        app = create_app(served, worker, server_config)
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        per_device = " on each device" if arguments.mesh else ""
        drafter = drafters.text if drafters else arg_utils.NONE
        _note(
            f"serving {name} at {url} with {counted(engine.config.slots, 'slot')} of "
            f"{engine.config.capacity:,} tokens in {served.target.dtype.name}, drafter "
            f"{drafter}; memory{per_device}: {memory.describe(rows)}"
        )
        return serve(app, worker, bound, server_config)


def _progress(total: int) -> Callable[[], None]:
    """Returns what prints how many of the programs are compiled, if there are more than before."""
    compiled_before, start, shown = program_cache.totals()[0], time.monotonic(), 0

    def report() -> None:
        nonlocal shown
        count = program_cache.totals()[0] - compiled_before
        if count > shown:
            shown = count
            _note(f"compiled {count} of {total} programs ({time.monotonic() - start:.0f} s)")

    return report


def _speculation(arguments: argparse.Namespace) -> tuple[Drafters | None, Trees | None]:
    """Returns (drafters, trees); raises ValueError for invalid options of speculation."""
    arg_utils.check_effects(arguments, [("verifier", not arguments.greedy, "with --greedy")])
    if arguments.verifier == "greedy":
        raise ValueError("--verifier greedy does not sample: use --greedy")
    return drafting.engine_speculation(arguments, not arguments.greedy, "with --greedy")


def _engine_arguments(
    arguments: argparse.Namespace, drafters: Drafters | None, trees: Trees | None
) -> tuple[dict[str, Any], Request]:
    """Returns the engine's arguments, of models without weights, and a request of all its rows.

    Raises:
      ValueError, OSError: invalid options, or a model that cannot be read.
    """
    source = Source(arguments.target, arguments.tokenizer)
    dtype = model_options.default_dtype(arguments.backend)
    mesh = magicjax.make_mesh(*parse_mesh(arguments.mesh)) if arguments.mesh else None
    target = model_options.unloaded_target(arguments, source, dtype)
    load = functools.partial(model_options.unloaded, arguments, dtype)
    drafter, tree = resolve(drafters, trees, load)
    config = engine_config(arguments, target, bool(drafters) and not arguments.no_adaptive)
    config, row = validated_row(target, drafter, tree, config, mesh)
    if arguments.slots is None and mesh is None:
        slots = memory_check.proportionate_slots(row, config)
        config = dataclasses.replace(config, slots=slots)
    engine = dict(target=target, drafter=drafter, tree=tree, config=config, mesh=mesh)
    return engine, memory_check.all_rows(row, config)


def engine_config(
    arguments: argparse.Namespace, target: Model, adaptive: bool
) -> magicjax.EngineConfig:
    """Returns the configuration of the engine that the options describe."""
    features: Any = dict(grammars=True, logits_processors=True, logprobs=MAX_ALTERNATIVES)
    limit = target.config.max_positions  # the engine uses at most capacity - 1
    settings = {"max_tokens": limit} | arg_utils.settings_from(arguments, magicjax.EngineConfig)
    return magicjax.EngineConfig(
        sampling=not arguments.greedy, adaptive=adaptive, **features, **settings
    )


def _server_config(arguments: argparse.Namespace) -> ServerConfig:
    """Returns the configuration of the server; raises ValueError for invalid options."""
    check_number("port", arguments.port, ge=0, le=2**16 - 1)
    config = ServerConfig(**arg_utils.settings_from(arguments, ServerConfig))
    for origin in config.cors_origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise OptionError(
                "{}: an origin has a scheme and no path, such as https://app.example",
                "cors_origins",
                origin,
            )
    hosts = (arguments.host, *config.allowed_hosts)
    return dataclasses.replace(config, api_key=_key(arguments), allowed_hosts=hosts)


def _key(arguments: argparse.Namespace) -> str | None:
    """Returns the API key; raises ValueError for one that no client can send."""
    key, file = arguments.api_key, arguments.api_key_file
    if file is not None and key is not None:
        raise ValueError("--api-key and --api-key-file exclude each other: remove one of them")
    if file is not None:
        key = file.read_text().strip()
        if not key:
            raise OptionError("{}: the file is empty", "api_key_file", file)
    elif key is None:
        key = os.environ.get(API_KEY)
    if key is not None and not key.strip():
        raise ValueError(f"the API key is empty: unset {API_KEY} and omit --api-key for no key")
    if key is not None and (key != key.strip() or not key.isascii()):
        raise ValueError(
            "the API key has spaces at its ends or letters beyond ASCII: no client can send it"
        )
    return key


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
