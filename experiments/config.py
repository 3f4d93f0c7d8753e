"""What an experiment file may say: strict, typed, every field documented.

A setting comes from the defaults here, then from the YAML file, then from the command line; the
later one wins. A key that does not exist is refused and the nearest one named, because a
misspelt option that is silently ignored makes a wrong result look like a right one.
"""

import dataclasses
import difflib
import itertools
import pathlib
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic
import tyro
import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

import magicjax
from experiments import cache_settings
from experiments.cache_settings import CacheSettings
from magicjax import LookUp, parse_tree
from magicjax.drafters.running import drawing_of
from magicjax.drafters.sparse import BUDGET
from magicjax.drafters.written import parts
from magicjax.policies import POLICIES
from magicjax.tree import Tree
from magicjax.verify import VERIFIERS
from sharding import parse_mesh


class ConfigError(ValueError):
    """An experiment's settings are wrong; the message names the key, the value and the remedy."""


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _mesh(text: str) -> str:
    if text:
        parse_mesh(text)
    return text


Settings = typing.TypeVar("Settings", bound=BaseModel)
Positive = Annotated[int, Field(ge=1)]
Many = BeforeValidator(_listed)  # one value in a file stands for a list of one
STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


class Shapes(BaseModel):
    """Sizes to measure at: every batch with every context."""

    model_config = STRICT

    batch: Annotated[list[Positive], Many] = Field(
        [1], min_length=1, description="Rows decoded together."
    )
    context: Annotated[list[Positive], Many] = Field(
        [2048], min_length=1, description="Tokens of each prompt."
    )


LOOK_UP = "look_up"  # as a member of an ensemble, and as a draft of its own
# What each kind of draft can be told beside its trees.
CACHE = {"policy", "kv_budget", "sinks", "recent", "kv_dtype"}
TOLD = {
    "self": CACHE | {"refresh_every", "draw", "verifier"},
    "small": CACHE | {"sink_positions", "model", "draw", "verifier"},
    "look_up": {"verifier"},
    "ensemble": {"models", "draw", "verifier"},
    "auto": {"drafters", "profile", "verifier"},
}
AUTO_TREE = "chain:8"  # that drafts are tried with, if not given


class Method(BaseModel):
    """A way to speculate; lists make one cell of each combination."""

    model_config = STRICT

    draft: Literal["self", "small", "look_up", "ensemble", "auto"] = Field(
        "self",
        description="Who drafts: the target itself on a small cache, a small model, the text's own "
        "past, or several of the latter two, their trees merged; auto: whichever pays most after "
        "a trial of some, plain decoding if none does.",
    )
    drafters: list[str] = Field(
        [],
        description="With draft=auto, what is tried, as commands write it: self:streaming:256, "
        "small:DIRECTORY:streaming:256, look-up:4; several caches of the target and a look-up if "
        "not given.",
    )
    profile: str = Field(
        "",
        description="With draft=auto, the device: a file that `magicjax calibrate` wrote, or one "
        "of its presets; where calibrate writes if not given.",
    )
    tree: Annotated[list[str], Many] = Field(
        ["chain:4"],
        min_length=1,
        description="What is proposed at once: chain:n, expansion:k1,...,km, parents:-1,... or "
        "dynamic:nodes,depth,width; of an ensemble also one for each member, joined by +; with "
        f"draft=auto what drafts are tried with, {AUTO_TREE} if not given.",
    )
    model: str = Field("", description="Directory of the small model; only with draft=small.")
    models: list[str] = Field(
        [], description=f"An ensemble's members: directories of small models, or {LOOK_UP}."
    )
    policy: Annotated[list[str], Many] = Field(
        [],
        description=f"What a draft's cache keeps of the prompt: {', '.join(POLICIES)}, or one that "
        "another package registers; streaming if not given, with draft=small full.",
    )
    kv_budget: Annotated[list[Positive], Many] = Field(
        [],
        description="Slots of a draft's cache for each layer and KV head; with another policy than "
        f"full {BUDGET} if not given.",
    )
    sinks: Positive | None = Field(
        None,
        description="With policy=streaming, how many of the first tokens are pinned; "
        f"{cache_settings.SINKS} if not given.",
    )
    recent: Positive | None = Field(
        None,
        description="With policies that choose their pins, slots for the newest tokens; half the "
        "budget if not given.",
    )
    refresh_every: Annotated[list[Annotated[int, Field(ge=0)]], Many] = Field(
        [],
        description="After how many rounds a self-speculating draft chooses its pins again; 0: "
        "never, as if not given.",
    )
    kv_dtype: Annotated[list[Literal["", "int8", "int4"]], Many] = Field(
        [], description="Of the entries of a draft's cache; empty, or not given: the model's own."
    )
    sink_positions: Literal["", "text", "in_cache"] = Field(
        "",
        description="Where the sinks of a small draft stand: where they are in the text, as if not "
        "given, or in_cache, just before the newest tokens; with policy=streaming.",
    )
    draw: Literal["", "with_replacement", "without_replacement", "top"] = Field(
        "",
        description="How children are drawn under sampling; if not given without replacement, and "
        "in a dynamic tree the most likely.",
    )
    verifier: Annotated[list[str], Many] = Field(
        [], description="Who decides under sampling; if not given mss, which follows the draw."
    )

    @model_validator(mode="after")
    def _fits_the_draft(self) -> "Method":
        told = dict.fromkeys(name for names in TOLD.values() for name in sorted(names))
        given = [n for n in told if getattr(self, n) and n not in TOLD[self.draft]]
        if given:
            raise ValueError(
                f"{', '.join(given)} has no meaning with draft={self.draft}: remove it"
            )
        if self.draft == "small" and not self.model:
            raise ValueError("draft=small needs the model's directory: set model")
        if self.draft == "ensemble" and len(self.models) < 2:
            raise ValueError(
                f"an ensemble of {len(self.models)} drafts: list at least 2 in models, or set "
                "draft=small"
            )
        for name in self.verifier:
            known = [known for known in VERIFIERS if known != "greedy"]
            if name not in known:
                raise ValueError(f"verifier={name!r} is none that samples: {', '.join(known)}")
        for spec in self.tree:
            self._check_tree(spec)
        for text in self.drafters:
            parts(text)
        self.caches()
        return self

    @property
    def trees(self) -> list[str]:
        """What is proposed, one cell for each."""
        given = self.draft != "auto" or "tree" in self.model_fields_set
        return self.tree if given else [AUTO_TREE]

    def caches(self) -> list[CacheSettings]:
        """Returns what its draft may keep, one for each combination of the lists.

        Raises:
          ValueError: an unknown policy, or settings that do not fit together.
        """
        if self.draft not in cache_settings.POLICY:
            return [CacheSettings()]
        policies = self.policy or [cache_settings.POLICY[self.draft]]
        cache_settings.check_used(
            policies, sinks=self.sinks, recent=self.recent, sink_positions=self.sink_positions
        )
        budgets, refreshes = self.kv_budget or [0], self.refresh_every or [0]
        given = [
            CacheSettings(
                policy=policy,
                kv_budget=budget,
                sinks=self.sinks or 0,
                recent=self.recent or 0,
                refresh_every=refresh_every,
                kv_dtype=kv_dtype,
                sink_positions=self.sink_positions,
            )
            for policy, budget, refresh_every, kv_dtype in itertools.product(
                policies, budgets, refreshes, self.kv_dtype or [""]
            )
        ]
        return [cache_settings.resolve(self.draft, settings) for settings in given]

    def _check_tree(self, spec: str) -> None:
        """Raises ValueError unless each member, or the only draft, can draft its tree."""
        members = tuple(self.models) or (self.draft,)
        trees = parse_trees(spec)
        if len(trees) not in (1, len(members)):
            raise ValueError(
                f"tree={spec!r} has {len(trees)} trees for {len(members)} drafts: "
                "give one for all, or one for each"
            )
        each = trees * len(members) if len(trees) == 1 else trees
        for member, tree in zip(members, each, strict=True):
            if member == "auto":
                magicjax.Auto(tree=tree)
            elif member == LOOK_UP:
                LookUp().check(None, tree, 0, 0)  # type: ignore[arg-type] # asks the tree alone
            else:
                drawing_of(self.draw or None, tree)


def parse_trees(spec: str) -> tuple[Tree, ...]:
    """Returns the trees of `chain:3`, or of `expansion:2,1 + chain:3`, one for each member."""
    return tuple(parse_tree(part.strip()) for part in spec.split("+"))


class Experiment(BaseModel):
    """Speculative decoding against plain decoding, over batch and context lengths."""

    model_config = STRICT

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = Field(
        "experiment",
        description="Folder of the results; a file that gives none lends its own name.",
    )
    results: str = Field("results", description="Where the folders of results lie.")
    target: str = Field("experiments/zoo/target", description="Directory or preset of the target.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Of weights, activations and caches; exactness is shown in float32."
    )
    mesh: Annotated[str, AfterValidator(_mesh)] = Field(
        "",
        description="Devices, such as data=2,model=4: rows are divided among groups of them, and "
        "models among those of a group; one device if not given.",
    )
    shapes: list[Shapes] = Field([Shapes()], min_length=1, description="Batch sizes and contexts.")
    methods: list[Method] = Field(
        [], description="What is compared; plain decoding is always measured beside it."
    )
    new_tokens: Annotated[int, Field(ge=8)] = Field(
        128, description="Tokens generated for each row, at least 8: text is judged by 8-grams."
    )
    do_sample: bool = Field(
        False, description="Draw tokens from the target's distribution; if not, greedy decoding."
    )
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="With do_sample, what logits are divided by; 1 if not given."
    )
    top_k: Positive | None = Field(
        None, description="With do_sample, how many tokens can be drawn; all if not given."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
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
    prompts: Literal["held_out", "needle", "variable_tracking", "common_words"] = Field(
        "held_out",
        description="Stretches of modules that no embedded model was trained on; or a task in the "
        "manner of RULER: an assignment to find in them, a chain of assignments to follow, or "
        "words to count; its answers stand beside the texts in each cell's JSON.",
    )
    candidates: Positive | None = Field(
        None,
        description="With prompts=held_out, places of the text tried for each row; the rows are "
        "those whose plain continuation repeats itself least. 4 if not given; 1: no choice.",
    )
    agreement_tokens: Annotated[int, Field(ge=0)] = Field(
        8192, description="Tokens of text on which target and draft are compared; 0 for none."
    )
    fresh: bool = Field(False, description="Measure every cell anew, also those that are finished.")

    @model_validator(mode="after")
    def _there_is_a_choice_of_prompts(self) -> "Experiment":
        if self.candidates is not None and self.prompts != "held_out":
            raise ValueError(
                f"candidates has no meaning with prompts={self.prompts}, whose rows are taken as "
                "they come: remove it"
            )
        return self

    @model_validator(mode="after")
    def _sampling_is_asked_for(self) -> "Experiment":
        """Refuses settings of sampling in greedy decoding, where they would be ignored."""
        names = ("temperature", "top_k", "top_p", "seed")
        stray = [n for n in names if getattr(self, n) is not None]
        for i, method in enumerate(self.methods):
            stray += [f"methods.{i}.{n}" for n in ("draw", "verifier") if getattr(method, n)]
        if stray and not self.do_sample:
            raise ValueError(
                f"{', '.join(stray)} has no meaning in greedy decoding: set do_sample, or remove it"
            )
        return self


def read(path: pathlib.Path) -> Experiment:
    """Returns the experiment that a YAML file describes.

    Raises:
      ConfigError: the file cannot be read, is no YAML or no mapping, has a key that does not
        exist, or a value out of range.
    """
    raw = read_mapping(path)
    raw.setdefault("name", path.stem)
    return validate(raw, str(path))


def read_mapping(path: pathlib.Path) -> dict[str, Any]:
    """Returns the keys and values of a YAML file.

    Raises:
      ConfigError: the file cannot be read, or is no YAML or no mapping.
    """
    try:
        raw = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{path}: {line}{error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from error
    if raw is None:
        raise ConfigError(f"{path}: the file is empty: write `key: value` lines")
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, found {type(raw).__name__}")
    return raw


def validate(raw: dict, source: str) -> Experiment:
    """Returns the checked experiment; `source` opens the message if something is wrong."""
    return checked(Experiment, raw, source)


def checked(kind: type[Settings], raw: dict, source: str) -> Settings:
    """Returns settings of a kind, checked; `source` opens the message if something is wrong."""
    try:
        return kind.model_validate(raw)
    except pydantic.ValidationError as error:
        lines = [_explain(kind, problem) for problem in error.errors()]
        raise ConfigError("\n".join([f"{source}:", *(f"  {line}" for line in lines)])) from error


def from_command_line(arguments: Sequence[str], prog: str) -> Experiment:
    """Returns the experiment of `[FILE] [--key value ...]`, the latter winning over the file."""
    arguments = list(arguments)
    base = Experiment()
    usage = f"Settings below override those of FILE.\n\nusage: {prog} FILE [OPTIONS]"
    if arguments and not arguments[0].startswith("-"):
        base = read(pathlib.Path(arguments.pop(0)))
    elif "-h" not in arguments and "--help" not in arguments:
        files = [a for a in arguments if pathlib.Path(a).is_file()]
        if files:
            rest = " ".join(a for a in arguments if a != files[0])
            raise ConfigError(f"the file must come first: {prog} {files[0]} {rest}")
        raise ConfigError(f"no experiment file given: {prog} experiments/configs/demo.yaml")
    return tyro.cli(  # names what is wrong in an override, and exits with status 2
        Experiment,
        default=base,
        args=arguments,
        prog=f"{prog} FILE",
        description=f"{Experiment.__doc__}\n\n{usage}",
    )


def _explain(kind: type, problem: Any) -> str:
    """Returns one line for one of pydantic's errors: where, what, and the remedy."""
    location = ".".join(str(part) for part in problem["loc"])
    if problem["type"] not in ("extra_forbidden", "unexpected_keyword_argument"):
        whole = isinstance(problem["input"], dict | list)
        value = "" if whole else f"={problem['input']!r}"
        message = problem["msg"].removeprefix("Value error, ")
        return f"{location}{value}: {message}".removeprefix(": ")
    known = sorted(_fields_at(kind, problem["loc"][:-1]))
    nearest = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1, cutoff=0.5)
    guess = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"{location}: no such key; {guess}(keys: {', '.join(known)})"


def _fields_at(kind: type, location: tuple) -> list[str]:
    """Returns the keys that exist where `location` leads to from the settings `kind`."""
    for part in location:
        if isinstance(part, str):
            kind = _settings_in(typing.get_type_hints(kind)[part]) or kind
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(kind.model_fields)  # type: ignore[attr-defined]


def _settings_in(annotation: Any) -> Any:
    """Returns the settings class within an annotation, `list[Shapes]` or the like; None: none."""
    if dataclasses.is_dataclass(annotation) or hasattr(annotation, "model_fields"):
        return annotation
    return next(filter(None, map(_settings_in, typing.get_args(annotation))), None)
