"""What an experiment file may contain: strict, typed, every field documented.

A setting comes from the defaults here, then the YAML file that `base` names, then the file itself,
then the command line; the last one wins. Paths in a file are relative to its folder, those on the
command line to the working directory.
"""

import contextlib
import functools
import io
import math
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import pydantic
import tyro
import yaml
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

import magicjax
from experiments import prompts
from experiments.schema import axes, paths
from experiments.schema.fields import (
    ConfigError,
    Many,
    Positive,
    Strict,
    config_error,
    read_mapping,
    validated,
)
from experiments.schema.method import AUTO, Method
from experiments.schema.settings import declared, setting
from magicjax.options import options_of
from models import parse_weights
from sharding import MeshSize, parse_mesh

PARAMETERS = options_of(magicjax.SamplingParams)
BUNDLED = pathlib.Path(__file__).parents[1] / "zoo" / "target"
Fraction = Annotated[float, Field(gt=0, le=1)]
Kind = Annotated[str, AfterValidator(prompts.known_kind)]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Settings without effect on an engine: its slots are the batch.
NOT_SERVED = ("batch", "micro_batches", "candidates", "agreement_tokens", "phases", "profile")


def _mesh(text: str) -> str:
    if text:
        parse_mesh(text)
    return text


def _weights(text: str) -> str:
    return str(parse_weights(text)) if text else ""


def _offload(value: Any) -> Any:
    """Returns "yes" or "" for a YAML boolean, and other values unchanged."""
    return ("yes" if value else "") if isinstance(value, bool) else value


def _worker(text: str) -> str:
    if text and not (
        (match := re.fullmatch(r"(\d+)/(\d+)", text)) and int(match[1]) < int(match[2])
    ):
        raise ValueError("give I/N, with I from 0 to N - 1")
    return text


def _rate(value: Any) -> Any:
    """Returns infinity for the text "inf", which YAML writes .inf, and other values unchanged."""
    return math.inf if value == "inf" else value


def _arrivals(text: str) -> str:
    if not re.fullmatch(r"poisson|burst:[1-9]\d*", text):
        raise ValueError("give poisson, or burst:n for n requests at a time")
    return text


class Experiment(Strict):
    """Speculative decoding against plain decoding; one cell, or a grid of them."""

    name: Annotated[str, Field(pattern=r"^[\w-][\w.-]*$")] = "experiment"
    """Folder of the results. If not set: the name of the file."""
    results: str = "results"
    """Parent of the folders of results."""
    target: str = setting("experiments/zoo/target")
    """The target: a directory, OWNER/NAME or OWNER/NAME:Q4_K_M on the Hugging Face Hub, a GGUF
    file, a name that `magicjax fetch` lists, or a preset."""
    dtype: Literal["float32", "bfloat16"] = setting("float32")
    """Type of weights, activations and caches, unless they are quantized; exactness is guaranteed
    in float32."""
    target_weights: Annotated[str, AfterValidator(_weights)] = setting("")
    """Quantize the target's matrices: int8 with a scale per output, int4 or int4:32 with one per
    group of 128 or 32 inputs, Q4_0 or Q8_0 on a CPU. If not set: as stored."""
    activations: Literal["int8", "float"] = setting("int8")
    """int8: on a CPU, matrices of GGUF files stay in the file's types, and products round
    activations to 8 bits. float: as on other devices, they do not."""
    target_kv_dtype: Literal["", "int8"] = setting("")
    """Type of the target's KV cache: int8 with a scale per token and head. If not set: dtype."""
    offload: Annotated[Literal["", "yes"], BeforeValidator(_offload)] = setting("")
    """yes: stream the target's weights from host memory, layer by layer.
    If not set: the weights are on the device."""
    mesh: Annotated[str, AfterValidator(_mesh)] = setting("")
    """Devices, such as data=2,model=4: data shards rows, model shards models; stage=2 also divides
    the target's layers into two stages. If not set: one device."""
    micro_batches: Positive | None = setting(None)
    """With a mesh of stages, into how many micro-batches the rows are divided. If not set: the
    fastest number."""
    batch: Positive = setting(1)
    """Rows decoded in one batch."""
    requests: Positive | None = setting(None)
    """Prompts of a cell, a multiple of batch. The batches are decoded one after the other, and
    their counts and times are added. With slots, any number. If not set: one batch."""
    slots: Positive | None = setting(None)
    """Serve requests as they arrive, with an engine of this many slots. If not set: batches."""
    rate: Annotated[float, Field(gt=0), BeforeValidator(_rate)] | None = setting(
        None, default=math.inf, needs="slots"
    )
    """With slots, mean requests per second. If not set: inf, all arrive at once."""
    arrivals: Annotated[str, AfterValidator(_arrivals)] | None = setting(
        None, default="poisson", needs="slots"
    )
    """With slots, poisson: independent arrivals; burst:n: n requests at a time, at equal intervals.
    If not set: poisson."""
    min_context: Positive | None = setting(None, needs="slots")
    """With slots, prompts have from this many to context tokens, uniform in the logarithm. If not
    set: all have context."""
    min_new_tokens: Annotated[int, Field(ge=2)] | None = setting(None, needs="slots")
    """With slots, requests generate from this many, at least 2, to new_tokens, n with a probability
    proportional to 1/n (Zipf). If not set: all generate new_tokens."""
    ttft_limit_s: Amount | None = setting(None, default=1.0, needs="slots")
    """With slots, the time to first token up to which a request counts for goodput. If not set: 1.
    """
    tpot_limit_ms: Amount | None = setting(None, default=50.0, needs="slots")
    """With slots, the time per output token up to which a request counts for goodput. If not set:
    50."""
    context: Positive = setting(2048)
    """Tokens of each prompt."""
    methods: list[Method] = Field([], examples=["[{drafter: self:streaming:256}]"])
    """Methods to compare, each beside plain decoding; []: plain decoding alone."""
    new_tokens: Annotated[int, Field(ge=8)] = setting(128)
    """Tokens generated for each row, at least 8: repetition is measured on 8-grams."""
    temperature: Annotated[float, Field(allow_inf_nan=False)] = setting(
        0.0, limits=PARAMETERS["temperature"].limits
    )
    """Divides the logits; 0: greedy decoding."""
    top_k: Positive | None = setting(None, needs="temperature")
    """With a temperature, sample from the k most likely tokens. If not set: all."""
    top_p: float | None = setting(
        None, default=1.0, needs="temperature", limits=PARAMETERS["top_p"].limits
    )
    """With a temperature, sample from the most likely tokens whose probabilities reach p. If not
    set: 1."""
    seed: int | None = setting(
        None, default=0, needs="temperature", limits=PARAMETERS["seed"].limits
    )
    """With a temperature, the random seed. If not set: 0."""
    repeats: Annotated[int, Field(ge=0)] = setting(3, column="repeat")
    """Timed runs of each cell; the median is reported. 0: one run without timing, for quantities
    that do not depend on the machine, such as acceptance."""
    prompts: Kind = setting(
        "stdlib",
        help="stdlib: held-out modules of Python's standard library; files, pg19, longbench: "
        "texts of prompt_path; docs: tasks about Python's documentation; chat: questions in eight "
        "categories; dataset: a benchmark's file; random: uniform tokens, for models without "
        f"weights; or a task like those of RULER. All: {', '.join(prompts.KINDS)}.",
    )
    prompt_path: str = setting("")
    """With prompts=files, a text, a .jsonl file or a folder of them; with pg19, longbench, dataset
    and qa the local copy; with other tasks the text around them. If not set: stdlib's."""
    prompt_seed: Annotated[int, Field(ge=0)] = setting(0)
    """Seed of the prompts, the same for every method."""
    chat_template: bool | None = setting(None)
    """Ask questions and tasks as a conversation by the target's chat template. If not set: if it
    has one."""
    candidates: Positive | None = setting(None, default=4)
    """Prompts made for each one that is used: those whose plain continuation repeats itself least.
    1: no selection. If not set: 4 with prompts=stdlib, files or pg19, else 1."""
    agreement_tokens: Annotated[int, Field(ge=0)] = setting(8192)
    """Maximum number of prompt tokens on which target and draft are compared; the second half of
    each prompt counts. 0: no comparison."""
    phases: bool = setting(True)
    """Trace one more run of each timed cell, to divide its time into draft, target, verification
    and commit."""

    grid: Annotated[dict[str, Annotated[list[Any], Many]], tyro.conf.Suppress] = Field({})
    """Axes: names of settings above with their values, or one value; all combinations run."""
    zip: Annotated[list[dict[str, list[Any]]], tyro.conf.Suppress] = Field([])
    """Axes that vary jointly: lists of one length, combined element by element."""
    exclude: Annotated[list[dict[str, Any]], tyro.conf.Suppress] = Field([])
    """Cells to remove: those in which every named setting has the value, or one of the values;
    drafter, tree, and options such as policy and budget also work."""

    distributed: bool = False
    """Many processes, on one host or several, run every cell jointly; each starts this launcher."""
    coordinator: str = ""
    """With distributed, HOST:PORT of rank 0. If not set: JAX detects it, such as under srun."""
    processes: Positive | None = None
    """With distributed, the number of processes. If not set: JAX detects it."""
    rank: Annotated[int, Field(ge=0)] | None = None
    """With distributed, the rank of this process, from 0; rank 0 writes the results. If not set:
    JAX detects it."""

    launcher: Literal["local", "in_process", "ray"] = "local"
    """Where cells run: on this machine, each in a process of its own; in this process, where they
    share models, prompts and programs, and a crash ends the run; or on a Ray cluster: that of
    $RAY_ADDRESS or of this machine, else one is started here."""
    worker: Annotated[str, AfterValidator(_worker)] = ""
    """I/N: run only share I of the cells, 0 to N - 1, while other workers run the other shares,
    such as the jobs of a SLURM array. The command without it then writes the report."""
    jobs: Positive | None = None
    """With launcher=local, cells that run at the same time. If not set: one per GPU, without GPUs
    one. Concurrent cells on a CPU slow each other down."""
    memory_limit_gb: Amount | None = None
    """Main memory of a cell's process; a process above it is killed and recorded as failed. If not
    set: no limit."""
    timeout_minutes: Amount | None = None
    """Time limit of a cell; a cell above it is killed and recorded as failed."""
    stale: Literal["refuse", "redo", "keep"] = "refuse"
    """Finished cells that were measured with other code, versions or weights: refuse to run,
    measure them again, or keep them."""
    impossible: Literal["refuse", "record"] = "refuse"
    """If some cells are known to fail: refuse the whole grid, or record them as failed and run the
    others."""
    retry_failed: bool = False
    """Run failed cells again."""
    fresh: bool = False
    """Measure every cell again, including finished ones."""
    dry_run: bool = False
    """List the cells with estimated memory and time, and run none."""
    limit: Positive | None = None
    """Maximum number of cells to run."""
    fraction: Fraction | None = None
    """Run this share of the cells, evenly spaced, for a first look."""
    profile: bool = False
    """Keep a Perfetto trace of each cell that runs (see ui.perfetto.dev)."""

    @model_validator(mode="before")
    @classmethod
    def _lists_are_axes(cls, raw: Any) -> Any:
        for name in declared(cls):
            if isinstance(raw, dict) and isinstance(raw.get(name), list):
                raise ValueError(f"{name}: several values are an axis: grid: {{{name}: [...]}}")
        return raw

    @model_validator(mode="after")
    def _check_prompts(self) -> "Experiment":
        if self.candidates is not None and self.prompts == prompts.RANDOM:
            raise ValueError(
                "candidates has no effect with prompts=random, which are not selected: remove it"
            )
        if self.chat_template is not None and self.prompts in (*prompts.TEXTS, prompts.RANDOM):
            raise ValueError(
                f"chat_template has no effect with prompts={self.prompts}, which asks nothing: "
                "remove it, or choose another kind such as docs or chat"
            )
        compared = self.agreement_tokens and self.methods and not self._varies_or_sets("slots")
        if self.prompts == prompts.RANDOM and compared:
            raise ValueError(
                "agreement_tokens has no effect with prompts=random, which is not text: set it to 0"
            )
        return self

    @model_validator(mode="after")
    def _check_requests(self) -> "Experiment":
        if self.requests is None or self._varies_or_sets("slots"):
            return self
        if self.requests % self.batch:
            raise ValueError(
                f"requests={self.requests} is not a multiple of batch={self.batch}: change one"
            )
        if any(AUTO in method.drafter for method in self.methods):
            raise ValueError(
                "requests is not supported with drafter=auto, whose choice depends on the batch: "
                "remove one"
            )
        return self

    @model_validator(mode="after")
    def _check_needed(self) -> "Experiment":
        """Refuses settings of sampling in greedy decoding, and of serving without an engine."""
        settings = declared(type(self)).items()
        for needed, where in {
            "temperature": "in greedy decoding",
            "slots": "without slots",
        }.items():
            stray = [
                name
                for name, setting in settings
                if setting.needs == needed and getattr(self, name) is not None
            ]
            for i, method in enumerate(self.methods):
                stray += [f"methods.{i}.{name}" for name in method.needing(needed)]
            if stray and not self._varies_or_sets(needed):
                raise ValueError(
                    f"{', '.join(stray)} has no effect {where}: set {needed}, or remove it"
                )
        return self

    @model_validator(mode="after")
    def _check_serving(self) -> "Experiment":
        if self.slots is None:
            return self
        fields = type(self).model_fields
        if stray := [n for n in NOT_SERVED if getattr(self, n) != fields[n].default]:
            raise ValueError(f"{', '.join(stray)} has no effect with slots: remove it")
        if any(AUTO in method.drafter for method in self.methods):
            raise ValueError("drafter=auto is not supported with slots: name a drafter")
        for i, method in enumerate(self.methods):
            if self.temperature and any(method.adaptive) and method.verifier != ["naive"]:
                raise ValueError(
                    f"methods.{i}: adaptive with a temperature changes texts unless the "
                    "verifier is naive: set verifier: naive"
                )
        mesh = parse_mesh(self.mesh) if self.mesh else MeshSize()
        if mesh.stage > 1:
            raise ValueError(f"mesh={self.mesh} with slots: remove stage, or omit slots")
        if self.slots % mesh.data:
            raise ValueError(
                f"slots={self.slots} is not a multiple of data={mesh.data} of the mesh: change one"
            )
        if self.min_context and self.prompts not in (*prompts.TEXTS, prompts.RANDOM):
            raise ValueError(
                f"min_context shortens texts, not prompts={self.prompts}: remove it, or choose "
                f"{', '.join(prompts.TEXTS)} or {prompts.RANDOM}"
            )
        for minimum, maximum in (("min_context", "context"), ("min_new_tokens", "new_tokens")):
            value, limit = getattr(self, minimum), getattr(self, maximum)
            if value is not None and value > limit and not self._varies(maximum):
                raise ValueError(f"{minimum}={value} is larger than {maximum}={limit}: change one")
        return self

    def _varies(self, name: str) -> bool:
        """Returns whether a setting is an axis of the grid."""
        return name in axes.names(self.grid, self.zip)

    def _varies_or_sets(self, name: str) -> bool:
        return bool(getattr(self, name)) or self._varies(name)

    @model_validator(mode="after")
    def _check_launcher(self) -> "Experiment":
        position = self.coordinator or None, self.processes, self.rank
        if not self.distributed and position != (None, None, None):
            raise ValueError("coordinator, processes and rank have no effect without distributed")
        if self.launcher == "ray" and self.jobs is not None:
            raise ValueError(
                "jobs has no effect with launcher=ray, which runs what the cluster holds: remove it"
            )
        limits = ("jobs", "memory_limit_gb", "timeout_minutes")
        if self.launcher == "in_process" and (given := [x for x in limits if getattr(self, x)]):
            raise ValueError(
                f"{', '.join(given)}: no effect with launcher=in_process, where cells have no "
                "process of their own: remove it, or use launcher=local"
            )
        if self.launcher == "ray" and self.worker:
            raise ValueError("worker divides the cells that Ray distributes: remove it")
        return self


def read(path: pathlib.Path) -> Experiment:
    """Returns the experiment of a YAML file, on top of the file that its `base` names.

    Raises:
      ConfigError: a file cannot be read, is not a YAML mapping, has an unknown key or a value out
        of range, or is its own base.
    """
    raw = _with_base(path, ())
    raw.setdefault("name", path.stem)
    raw.setdefault("target", os.path.relpath(BUNDLED))
    experiment = validated(Experiment, raw, str(path))  # errors of settings come first
    if "methods" not in raw:
        raise ConfigError(
            f"{path}: methods is missing: list what to compare, such as methods: [{{drafter: "
            "self:streaming:256}], or [] for plain decoding alone"
        )
    return experiment


def _with_base(path: pathlib.Path, above: tuple[pathlib.Path, ...]) -> dict[str, Any]:
    """Returns a file's keys and values; its base provides missing ones except name and exclude."""
    if path.resolve() in above:
        raise ConfigError(f"{path} is its own base, through {above[-1].name}: remove one `base`")
    if above and not path.exists():
        raise ConfigError(f"{above[-1].name}: base={path}: no such file")
    raw = paths.from_working_directory(read_mapping(path), path.parent)
    base = raw.pop("base", None)
    if base is None:
        return raw
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base={base!r} must be the path of one file")
    under = _with_base(path.parent / base, (*above, path.resolve()))
    # The folder of the results, which experiments cannot share, and cells of the base's own grid.
    return {key: value for key, value in under.items() if key not in ("name", "exclude")} | raw


def from_command_line(arguments: Sequence[str], prog: str) -> Experiment:
    """Returns the experiment of the arguments `FILE [--key value ...]`.

    The command line overrides the file: `--grid.batch 1 2` replaces the file's axis, and
    `--batch 1` replaces both.

    Raises:
      ConfigError: wrong settings, or no file before the options.
    """
    arguments = list(arguments)
    base, defaults = Experiment(), "settings without a file"
    helps = bool({"-h", "--help"} & {*arguments})
    if arguments and not arguments[0].startswith("-"):
        path = pathlib.Path(arguments.pop(0))
        try:
            base, defaults = read(path), f"values of {path}"
        except ConfigError:
            if not helps:
                raise  # else the help, which needs no valid file
    elif not helps:
        if files := [a for a in arguments if pathlib.Path(a).is_file()]:
            others = " ".join(a for a in arguments if a != files[0])
            raise ConfigError(f"the file must come first: {prog} {files[0]} {others}")
        raise ConfigError(f"no experiment file: run {prog} experiments/configs/demo.yaml")
    grid, overrides = _axes(arguments)
    base = _with_axes(base, grid, overrides)
    usage = (
        "Settings below override those of FILE.  --grid.AXIS VALUE [VALUE ...] sets an axis of "
        f"the grid.  Defaults are the {defaults}.\n\nusage: {prog} FILE [OPTIONS]"
    )
    described = f"{Experiment.__doc__}\n\n{usage}"
    parse = functools.partial(
        tyro.cli,
        Experiment,
        default=base,
        args=overrides,
        prog=f"{prog} FILE",
        description=described,
    )
    return _with_config_errors(parse)


def _with_config_errors(parse: Callable[[], Experiment]) -> Experiment:
    """Returns what tyro parses.

    tyro prints invalid settings as pydantic reports them; they raise ConfigError instead. For other
    errors and for help it prints, and exits.
    """
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            return parse()
    except SystemExit as end:
        cause: BaseException | None = end
        while cause is not None and not isinstance(cause, pydantic.ValidationError):
            cause = cause.__context__
    if cause is not None:
        raise config_error(Experiment, cause, "command line")
    return parse()


def _axes(arguments: list[str]) -> tuple[dict[str, list[Any]], list[str]]:
    """Returns (axes, other arguments) of a command line."""
    grid: dict[str, list[Any]] = {}
    others: list[str] = []
    open_axis = None
    for argument in arguments:
        if argument.startswith("--grid."):
            name, _, value = argument.removeprefix("--grid.").partition("=")
            open_axis = name.replace("-", "_")
            grid[open_axis] = [_value(open_axis, value)] if value else []
        elif open_axis is None or argument.startswith("--"):
            open_axis = None
            others.append(argument)
        else:
            grid[open_axis].append(_value(open_axis, argument))
    return grid, others


def _value(axis: str, text: str) -> Any:
    """Returns a value as YAML reads it; raises ConfigError if it is not valid YAML."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--grid.{axis} {text}: not a YAML value") from error


def _with_axes(base: Experiment, grid: dict[str, list[Any]], others: list[str]) -> Experiment:
    """Returns the file's experiment with the command line's axes.

    A single value on the command line removes the axis of that setting.
    """
    options = [a.split("=")[0].removeprefix("--") for a in others if a.startswith("--")]
    single = {option.removeprefix("no-").replace("-", "_") for option in options}
    if twice := sorted(single & grid.keys()):
        raise ConfigError(f"--{twice[0]} and --grid.{twice[0]} are both set: remove one")
    replaced = single | grid.keys()
    axes_left = {name: values for name, values in base.grid.items() if name not in single} | grid
    zips = [{n: values for n, values in axes.items() if n not in replaced} for axes in base.zip]
    changes = {"grid": axes_left, "zip": [axes for axes in zips if axes]}
    if changes == {"grid": base.grid, "zip": base.zip}:
        return base
    settings = {name: getattr(base, name) for name in base.model_fields_set}
    return validated(Experiment, settings | changes, "command line")
