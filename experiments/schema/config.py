"""What an experiment file may say: strict, typed, every field documented.

A setting comes from the defaults here, then from the YAML file that `base` names, then from the
file itself, then from the command line; the later one wins.
"""

import difflib
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import tyro
import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from experiments import prompts
from experiments.schema import axes
from experiments.schema.fields import STRICT, ConfigError, Positive, checked, read_mapping
from experiments.schema.method import Method
from sharding import parse_mesh
from sharding.processes import SECONDS as JOIN_SECONDS

Fraction = Annotated[float, Field(gt=0, le=1)]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _mesh(text: str) -> str:
    if text:
        parse_mesh(text)
    return text


def _kind_of_prompts(name: str) -> str:
    if name not in prompts.KINDS:
        near = difflib.get_close_matches(name, prompts.KINDS, n=1, cutoff=0.5)
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"no such prompts; {guess}(there are {', '.join(prompts.KINDS)})")
    return name


def _yes_or_no(value: Any) -> Any:
    """Returns what YAML makes a truth value of as it was written."""
    return {True: "yes", False: ""}.get(value, value) if isinstance(value, bool) else value


class Slurm(BaseModel):
    """What a cell's job asks SLURM for; what is not given is the cluster's default."""

    model_config = STRICT

    cluster: Literal["slurm", "local", "debug"] = Field(
        "slurm",
        description="slurm; or, to try it without, submitit's local (processes) or debug.",
    )
    partition: str = Field("", description="Queue.")
    account: str = Field("", description="Who pays.")
    gpus: Annotated[int, Field(ge=0)] = Field(1, description="GPUs of a job.")
    cpus: Positive | None = Field(None, description="CPU cores of a job.")
    memory_gb: Amount | None = Field(None, description="Main memory of a job.")
    minutes: Positive = Field(120, description="Time limit of a job.")
    at_once: Positive = Field(16, description="Jobs that run at the same time, at most.")
    setup: list[str] = Field([], description="Shell commands before a job, e.g. module load cuda.")


class Experiment(BaseModel):
    """Speculative decoding against plain decoding; one cell, or a grid of them."""

    model_config = STRICT

    name: Annotated[str, Field(pattern=r"^[\w-][\w.-]*$")] = Field(
        "experiment",
        description="Folder of the results; a file that gives none lends its own name.",
    )
    results: str = Field("results", description="Where the folders of results lie.")
    target: str = Field("experiments/zoo/target", description="Directory or preset of the target.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Of weights, activations and caches; exactness is shown in float32."
    )
    offload: Annotated[Literal["", "yes", "int8"], BeforeValidator(_yes_or_no)] = Field(
        "",
        description="yes: the target's weights are streamed from host memory, layer by layer; "
        "int8: quantized there. If not given they are on the device.",
    )
    mesh: Annotated[str, AfterValidator(_mesh)] = Field(
        "",
        description="Devices, such as data=2,model=4: rows are divided among groups of them, and "
        "models among those of a group; with stage=2 also the target's layers; one device if not "
        "given.",
    )
    micro_batches: Positive | None = Field(
        None,
        description="Of a mesh with stages: in how many parts the rows of a group of devices go "
        "through them; as many as make a pass fastest if not given.",
    )
    batch: Positive = Field(1, description="Rows decoded together.")
    context: Positive = Field(2048, description="Tokens of each prompt.")
    methods: list[Method] = Field(
        [], description="What is compared; plain decoding is always measured beside it."
    )
    new_tokens: Annotated[int, Field(ge=8)] = Field(
        128, description="Tokens generated for each row, at least 8: text is judged by 8-grams."
    )
    do_sample: bool = Field(
        False, description="Draw tokens from the target's distribution; if not, greedy decoding."
    )
    temperature: Amount | None = Field(
        None, description="With do_sample, what logits are divided by; 1 if not given."
    )
    top_k: Positive | None = Field(
        None, description="With do_sample, how many tokens can be drawn; all if not given."
    )
    top_p: Fraction | None = Field(
        None,
        description="With do_sample, the probability that the drawable tokens must reach; 1 if "
        "not given.",
    )
    seed: int | None = Field(
        None, description="With do_sample, of the random numbers; 0 if not given."
    )
    repeats: Annotated[int, Field(ge=0)] = Field(
        3,
        description="Timed runs of each cell; the median is reported. 0: one run, not timed, for "
        "what does not depend on the machine, such as acceptance.",
    )
    prompts: Annotated[str, AfterValidator(_kind_of_prompts)] = Field(
        "stdlib",
        description="stdlib: modules of Python's library that no embedded model was trained on; "
        "files, pg19, longbench: from prompt_path; random: tokens drawn evenly, for models without "
        f"weights; or a task in the manner of RULER. All: {', '.join(prompts.KINDS)}.",
    )
    prompt_path: str = Field(
        "",
        description="With prompts=files, a text, a .jsonl or a folder of them; with pg19, "
        "longbench and qa the local copy; with other tasks the text around them, stdlib's if "
        "not given.",
    )
    prompt_seed: Annotated[int, Field(ge=0)] = Field(
        0, description="Of the prompts; the same for every method."
    )
    candidates: Positive | None = Field(
        None,
        description="With prompts=stdlib, files or pg19, places tried for each row; the rows are "
        "those whose plain continuation repeats itself least. 4 if not given; 1: no choice.",
    )
    agreement_tokens: Annotated[int, Field(ge=0)] = Field(
        8192,
        description="Tokens of the prompts on which target and draft are compared, at most; the "
        "second half of each counts. 0: none.",
    )
    phases: bool = Field(
        True,
        description="Trace one more run of each timed cell, to see how its time divides into "
        "draft, target, verification and commit.",
    )

    grid: Annotated[dict[str, list[Any]], tyro.conf.Suppress] = Field(
        {}, description="Axes: names of settings above, each with its values; every combination."
    )
    zip: Annotated[list[dict[str, list[Any]]], tyro.conf.Suppress] = Field(
        [], description="Axes that go together: lists of one length, the first with the first, ..."
    )
    exclude: Annotated[list[dict[str, Any]], tyro.conf.Suppress] = Field(
        [],
        description="Cells that are left out: those in which every named setting has the value, or "
        "one of the values; also draft, policy, kv_budget, tree and what else a cell has.",
    )

    coordinator: str = Field(
        "",
        description="HOST:PORT of rank 0, where many processes, on one host or several, run every "
        "cell together; each starts this launcher. Told by srun and, on one host, mpirun.",
    )
    processes: Positive | None = Field(
        None, description="How many they are. Told by srun and mpirun."
    )
    rank: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Which of them this is, from 0, which alone writes results. Told by srun, "
        "mpirun and Kubernetes.",
    )

    join_seconds: Amount = Field(
        JOIN_SECONDS, description="For which many processes wait for each other."
    )

    launcher: Literal["local", "slurm", "ray"] = Field(
        "local", description="Where cells run: on this machine, as SLURM jobs, or on a Ray cluster."
    )
    slurm: Slurm = Field(Slurm(), description="Of launcher=slurm.")
    ray_address: str = Field(
        "",
        description="Of launcher=ray: the cluster's; one on this machine is started if not given.",
    )
    jobs: Positive | None = Field(
        None,
        description="Cells that run at once, with launcher=local or ray; one for each GPU if not "
        "given, and without a GPU one. Cells that run beside others on a CPU are slower.",
    )
    memory_limit_gb: Amount | None = Field(
        None,
        description="Main memory of a cell's process; one that takes more is ended and recorded as "
        "failed. No limit if not given.",
    )
    timeout_minutes: Amount | None = Field(
        None, description="Time of a cell; then it is ended and recorded as failed."
    )
    stale: Literal["refuse", "redo", "keep"] = Field(
        "refuse",
        description="What becomes of finished cells that other code, versions or weights made.",
    )
    impossible: Literal["refuse", "record"] = Field(
        "refuse",
        description="Where it can be known that some cells cannot run: refuse the whole grid, or "
        "record them as failed and run the others.",
    )
    retry_failed: bool = Field(False, description="Try failed cells again.")
    fresh: bool = Field(False, description="Measure every cell anew, also those that are finished.")
    dry_run: bool = Field(
        False, description="List the cells, with memory and time as estimated, and run none."
    )
    limit: Positive | None = Field(None, description="Run so many cells at most.")
    fraction: Fraction | None = Field(
        None, description="Run this share of the cells, evenly spaced, for a first look."
    )
    profile: bool = Field(
        False,
        description="Keep a Perfetto trace of each cell that runs (ui.perfetto.dev opens it).",
    )
    track: list[Literal["wandb", "tensorboard"]] = Field(
        [], description="Also tell results to wandb or TensorBoard, while the grid runs."
    )

    @model_validator(mode="before")
    @classmethod
    def _several_values_are_an_axis(cls, given: Any) -> Any:
        for name in axes.VARIED:
            if isinstance(given, dict) and isinstance(given.get(name), list):
                raise ValueError(f"{name}: several values are an axis: grid: {{{name}: [...]}}")
        return given

    @model_validator(mode="after")
    def _there_is_a_choice_of_prompts(self) -> "Experiment":
        if self.candidates is not None and self.prompts not in prompts.TEXTS:
            raise ValueError(
                f"candidates has no meaning with prompts={self.prompts}, whose rows are taken as "
                "they come: remove it"
            )
        if self.prompts == prompts.RANDOM and self.agreement_tokens and self.methods:
            raise ValueError(
                "agreement_tokens has no meaning with prompts=random, no text: set it to 0"
            )
        return self

    @model_validator(mode="after")
    def _sampling_is_asked_for(self) -> "Experiment":
        """Refuses settings of sampling in greedy decoding, where they would be ignored."""
        names = ("temperature", "top_k", "top_p", "seed")
        stray = [n for n in names if getattr(self, n) is not None]
        for i, method in enumerate(self.methods):
            stray += [f"methods.{i}.{n}" for n in ("draw", "verifier") if getattr(method, n)]
        sampled = self.do_sample or "do_sample" in axes.names(self.grid, self.zip)
        if stray and not sampled:
            raise ValueError(
                f"{', '.join(stray)} has no meaning in greedy decoding: set do_sample, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _launcher_uses_what_is_set(self) -> "Experiment":
        stray = []
        if self.launcher != "slurm" and self.slurm != Slurm():
            stray.append("slurm")
        if self.launcher != "ray" and self.ray_address:
            stray.append("ray_address")
        if self.launcher == "slurm" and self.jobs is not None:
            stray.append("jobs")
        if self.slurm.cluster != "slurm":
            of_jobs = ("partition", "account", "cpus", "memory_gb", "setup")
            given = [f"slurm.{name}" for name in of_jobs if getattr(self.slurm, name)]
            if given:
                raise ValueError(
                    f"{', '.join(given)} has no meaning with slurm.cluster={self.slurm.cluster}: "
                    "remove it"
                )
        if stray:
            raise ValueError(
                f"{', '.join(stray)} has no meaning with launcher={self.launcher}: remove it"
                + (", or set slurm.at_once" if stray == ["jobs"] else "")
            )
        return self


def read(path: pathlib.Path) -> Experiment:
    """Returns the experiment that a YAML file describes, on top of the file that its `base` names.

    Raises:
      ConfigError: a file cannot be read, is no YAML or no mapping, has a key that does not exist,
        or a value out of range; or is its own base.
    """
    raw = _with_base(path, ())
    raw.setdefault("name", path.stem)
    return checked(Experiment, raw, str(path))


def _with_base(path: pathlib.Path, above: tuple[pathlib.Path, ...]) -> dict[str, Any]:
    """Returns a file's keys and values; its base, beside it, gives those that it lacks."""
    if path.resolve() in above:
        raise ConfigError(f"{path}: is its own base, by way of {above[-1].name}: remove one `base`")
    if above and not path.exists():
        raise ConfigError(f"{above[-1].name}: base={path}: there is no such file")
    raw = read_mapping(path)
    base = raw.pop("base", None)
    if base is None:
        return raw
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base={base!r}: give the path of one file")
    under = _with_base(path.parent / base, (*above, path.resolve()))
    under.pop("name", None)  # a name is a folder's, which two experiments cannot share
    return under | raw


def from_command_line(arguments: Sequence[str], prog: str) -> tuple[Experiment, str]:
    """Returns (the experiment of `[FILE] [--key value ...]`, the file).

    What the command line sets wins over the file: `--grid.batch 1 2` over the file's axis, and
    `--batch 1` over both.
    """
    arguments = list(arguments)
    base, source = Experiment(), ""
    usage = (
        "Settings below override those of FILE.  --grid.AXIS VALUE [VALUE ...] gives an axis of "
        f"the grid values.\n\nusage: {prog} FILE [OPTIONS]"
    )
    if arguments and not arguments[0].startswith("-"):
        source = arguments.pop(0)
        base = read(pathlib.Path(source))
    elif "-h" not in arguments and "--help" not in arguments:
        files = [a for a in arguments if pathlib.Path(a).is_file()]
        if files:
            others = " ".join(a for a in arguments if a != files[0])
            raise ConfigError(f"the file must come first: {prog} {files[0]} {others}")
        raise ConfigError(f"no experiment file given: {prog} experiments/configs/demo.yaml")
    grid, rest = _axes(arguments)
    base = _with_axes(base, grid, rest)
    experiment = tyro.cli(  # names what is wrong in an override, and exits with status 2
        Experiment,
        default=base,
        args=rest,
        prog=f"{prog} FILE",
        description=f"{Experiment.__doc__}\n\n{usage}",
    )
    return experiment, source


def _axes(arguments: list[str]) -> tuple[dict[str, list[Any]], list[str]]:
    """Returns (the axes that a command line gives, the other arguments)."""
    grid: dict[str, list[Any]] = {}
    rest: list[str] = []
    open_axis = None
    for argument in arguments:
        if argument.startswith("--grid."):
            name, _, value = argument.removeprefix("--grid.").partition("=")
            open_axis = name.replace("-", "_")
            grid[open_axis] = [_value(open_axis, value)] if value else []
        elif open_axis is None or argument.startswith("--"):
            open_axis = None
            rest.append(argument)
        else:
            grid[open_axis].append(_value(open_axis, argument))
    return grid, rest


def _value(axis: str, text: str) -> Any:
    """Returns a value as YAML reads it; raises ConfigError if it is none."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--grid.{axis} {text}: no value as YAML has them") from error


def _with_axes(base: Experiment, grid: dict[str, list[Any]], rest: list[str]) -> Experiment:
    """Returns the file's experiment, its axes replaced by those of the command line.

    An axis whose setting the command line gives one value is none any more.
    """
    options = [a.split("=")[0].removeprefix("--") for a in rest if a.startswith("--")]
    fixed = {option.removeprefix("no-").replace("-", "_") for option in options}
    if twice := sorted(fixed & grid.keys()):
        raise ConfigError(f"--{twice[0]} and --grid.{twice[0]} are both given: remove one")
    gone = fixed | grid.keys()
    axes_left = {name: values for name, values in base.grid.items() if name not in fixed} | grid
    zips = [{n: values for n, values in axes.items() if n not in gone} for axes in base.zip]
    changes = {"grid": axes_left, "zip": [axes for axes in zips if axes]}
    if changes == {"grid": base.grid, "zip": base.zip}:
        return base
    given = {name: getattr(base, name) for name in base.model_fields_set}
    return checked(Experiment, given | changes, "command line")
