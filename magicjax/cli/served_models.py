"""The models of `magicjax serve`: one that options describe, or those of a file."""

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import magicjax
from magicjax.cli import drafting, options, text
from magicjax.decoding import memory
from magicjax.decoding.request import Request
from magicjax.drafters import Drafter
from magicjax.engine import memory_check
from magicjax.engine.templates import validated
from magicjax.model import Model
from magicjax.suggest import did_you_mean
from magicjax.trees.token_tree import Tree
from magicjax.verification.logprobs import MAX_ALTERNATIVES
from sharding import parse_mesh

DEFAULTS = magicjax.EngineConfig()


@dataclasses.dataclass(frozen=True)
class Described:
    """A model before its weights are loaded.

    Attributes:
      name: for clients.
      arguments: its options.
      target, drafter, tree, config, mesh: of its engine; the target has no weights.
      row: the request of one row, for `memory_check`.
    """

    name: str
    arguments: argparse.Namespace
    target: Model
    drafter: Drafter | None
    tree: Tree | None
    config: magicjax.EngineConfig
    mesh: Any
    row: Request

    @property
    def rows(self) -> Request:
        """A request with all rows of the engine."""
        return memory_check.all_rows(self.row, self.config)

    def __str__(self) -> str:
        """Describes the engine."""
        drafters = " + ".join(drafters_of(self.arguments)) or options.NONE
        return (
            f"{self.config.slots} slots of {self.config.capacity:,} tokens in "
            f"{self.target.dtype.name}, drafter {drafters}; memory"
            f"{'' if self.mesh is None else ' on each device'}: {memory.count(self.rows)}"
        )


def describe(arguments: argparse.Namespace) -> Described:
    """Returns the model of some options.

    Raises:
      ValueError, OSError: invalid options, or a model that cannot be read.
    """
    drafters, tokenizer = drafters_of(arguments), text.tokenizer_of(arguments)
    dtype = options.default_dtype(arguments.backend)
    mesh = magicjax.make_mesh(*parse_mesh(arguments.mesh)) if arguments.mesh else None
    target = text.unloaded_target(arguments, tokenizer, dtype)
    packed = mesh is None and arguments.activations == "int8"
    own: Any = dict(dtype=arguments.dtype or dtype, packed=packed)
    load = functools.partial(text.unloaded, **own)
    drafter, tree = drafting.speculation(drafters, arguments.tree, load)
    config = engine_config(arguments, target, bool(drafters) and not arguments.no_adaptive)
    used, row = validated(target, drafter, tree, config, mesh)
    if arguments.slots is None and mesh is None:
        used = dataclasses.replace(used, slots=memory_check.proportionate_slots(row, used))
    name = arguments.served_model_name or pathlib.Path(arguments.target).resolve().name
    return Described(name, arguments, target, drafter, tree, used, mesh, row)


def drafters_of(arguments: argparse.Namespace) -> list[str]:
    """Returns the texts of the drafters; raises ValueError for invalid options of speculation."""
    options.check_effects(arguments, [("verifier", not arguments.greedy, "with --greedy")])
    if arguments.verifier == "greedy":
        raise ValueError("--verifier greedy does not sample: use --greedy")
    return drafting.engine_drafters(arguments, not arguments.greedy, "with --greedy")


def engine_config(
    arguments: argparse.Namespace, target: Model, adaptive: bool
) -> magicjax.EngineConfig:
    """Returns the configuration of the engine that the options describe."""
    limit = arguments.max_tokens  # the engine uses at most capacity - 1
    return magicjax.EngineConfig(
        slots=DEFAULTS.slots if arguments.slots is None else arguments.slots,
        capacity=arguments.capacity,
        max_tokens=target.config.max_positions if limit is None else limit,
        sampling=not arguments.greedy,
        verifier=arguments.verifier,
        prefill_chunk=arguments.prefill_chunk,
        rounds_per_step=arguments.rounds_per_step,
        adaptive=adaptive,
        max_stall_ms=arguments.max_stall_ms,
        queue_limit=arguments.queue_limit,
        prefix_bytes=arguments.prefix_bytes,
        host_prefix_bytes=arguments.host_prefix_bytes,
        grammar_states=arguments.grammar_states,
        logits_processors=True,
        logprobs=MAX_ALTERNATIVES,
        backend=arguments.backend,
    )


def check_memory(models: Sequence[Described]) -> None:
    """Raises ValueError if the weights and caches of several models do not fit the free memory.

    The engine of each model checks its own when it is created.
    """
    if len(models) < 2:
        return
    free = memory.free_memory(models[0].target, models[0].mesh)
    needed = {model.name: memory.new_bytes(model.rows) for model in models}
    if free is not None and sum(needed.values()) > free:
        parts = ", ".join(f"{name} {x / 1e9:.2f} GB" for name, x in needed.items())
        raise ValueError(
            f"the models need {sum(needed.values()) / 1e9:.2f} GB of memory ({parts}), and "
            f"{free / 1e9:.2f} GB are available: reduce their slots or capacity, or serve fewer"
        )


def read(
    path: str, add_options: Callable[[argparse.ArgumentParser], None]
) -> list[argparse.Namespace]:
    """Returns the options of each model of a YAML file, with its name as `served_model_name`.

    Args:
      path: of a mapping from the names of models to their options, as on the command line.
      add_options: adds the options of a model to a parser.

    Raises:
      ValueError, OSError: the file cannot be read, or has wrong options.
    """
    import yaml  # not a dependency of the other commands

    try:
        content = yaml.safe_load(pathlib.Path(path).read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"models={path} is not YAML: {reason}") from None
    if not isinstance(content, dict) or not content:
        raise ValueError(
            f"models={path}: it must map the name of each model to its options, such as 'small: "
            "{target: smollm2}'"
        )
    return [_parsed(f"models={path}, {name}", str(name), content[name], add_options)
            for name in content]  # fmt: skip


def _parsed(
    where: str, name: str, given: Any, add_options: Callable[[argparse.ArgumentParser], None]
) -> argparse.Namespace:
    """Returns the options of one model."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: options must be a mapping, such as {{target: smollm2}}")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_options(parser)
    known = [
        option.removeprefix("--")
        for action in parser._actions
        for option in action.option_strings
        if action.dest != "served_model_name"
    ]
    words = []
    for key, value in given.items():
        if key not in known:
            raise ValueError(
                f"{where}: unknown option {key!r}{did_you_mean(str(key), known)} (options of the "
                "server are on the command line)"
            )
        if value is not False:
            values = value if isinstance(value, list) else [value]
            words += [f"--{key}" if each is True else f"--{key}={each}" for each in values]
    if "target" not in given:
        raise ValueError(f"{where}: target is missing: give a model directory or GGUF file")
    try:
        return parser.parse_args([*words, f"--served-model-name={name}"])
    except argparse.ArgumentError as error:
        raise ValueError(f"{where}: {error}") from None
