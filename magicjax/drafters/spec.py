"""Drafters as text, in Python, commands, configs and tables: self:streaming:256.

    NAME[:PATH][:VALUE ...][:OPTION=VALUE ...]

PATH is the model of a drafter that has one; that of mtp can be omitted. Values without a name are
those of the positional options, in order. An option may also be one of the policy's:
self:streaming:256:sinks=4. Drafters and policies of other files are import paths:
self:my_file.MyPolicy:256. Several drafters joined by " + " are an ensemble. A drafter or an
ensemble, " -> " and a drafter that runs the target are a cascade.
"""

import dataclasses
import functools
import itertools
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import isabstract
from typing import Any

from magicjax import hub, options, plugins
from magicjax.drafters.base import REQUIRED, Drafter
from magicjax.drafters.cascade import Cascade
from magicjax.drafters.eagle import Eagle
from magicjax.drafters.ensemble import Ensemble
from magicjax.drafters.forced_tokens import ForcedTokens
from magicjax.drafters.full_cache_speculation import FullCacheSpeculation
from magicjax.drafters.mtp import MTP
from magicjax.drafters.page_retrieval import PageRetrieval
from magicjax.drafters.prompt_lookup import PromptLookup
from magicjax.drafters.self_speculation import SelfSpeculation
from magicjax.drafters.small_model import FULL, SmallModel
from magicjax.drafters.suffix_lookup import SuffixLookup
from magicjax.options import Option
from magicjax.policies import Policy
from magicjax.policies.registry import get_policy, policy_name
from magicjax.suggest import did_you_mean
from magicjax.trees.token_tree import Tree, parse_tree

DRAFTERS: dict[str, type[Drafter]] = {
    "self": SelfSpeculation,
    "quest": PageRetrieval,
    "full": FullCacheSpeculation,
    "small": SmallModel,
    "eagle": Eagle,
    "mtp": MTP,
    "prompt-lookup": PromptLookup,
    "suffix": SuffixLookup,
    "forced": ForcedTokens,
}
GROUP = "magicjax.drafters"  # of entry points
LOAD_OPTIONS = ("weights", "draft_vocab")  # options with which a drafter's model is loaded
DRAFTER_SYNTAX = (
    "self:streaming:256 (policy and budget), quest:512 (pages of the target's cache), "
    "full:weights=int8 (a quantized copy), full:layers=0-9,20-29 (some of its layers), "
    "small:PATH (a model directory, GGUF file or preset), small:PATH:streaming:256, eagle:PATH (an "
    "EAGLE-3 head), mtp (the target's own head for multi-token prediction), prompt-lookup:4 (how "
    "many of the newest tokens to look for), suffix:8 (the same, also in other texts), forced (the "
    "tokens that a grammar forces), the name of an installed drafter, or an import path, "
    "my_file.MyDrafter; options as self:snapkv:256:refresh_every=8; a cascade as "
    "'prompt-lookup:4 -> self:streaming:256'"
)
_JOIN, _CASCADE = " + ", " -> "
_HEADS = (
    "of the heads that read the target's hidden states, EAGLE-3 (eagle:PATH) and those for "
    "multi-token prediction (mtp) are supported (docs/learned_heads.md)"
)
# Drafters of vLLM, and what is written here.
FOREIGN = {
    "ngram": "write prompt-lookup:4, how many of the newest tokens to look for",
    "draft_model": "write small:PATH",
    "eagle3": "write eagle:PATH",
    **dict.fromkeys(("medusa", "mlp_speculator"), _HEADS),
}


def get_drafter(name: str) -> type[Drafter]:
    """Returns the class of a name.

    A name is one of `DRAFTERS`, an entry point of the group "magicjax.drafters" of an installed
    package, or the import path of a class, such as my_file.MyDrafter.

    Raises:
      ValueError: an unknown name, or one of something else than a class of drafters.
    """
    loaded = plugins.find(name, DRAFTERS, GROUP)
    if loaded is None and name in FOREIGN:
        raise ValueError(f"{name!r} is not a drafter: {FOREIGN[name]}")
    if loaded is None:
        known = sorted({*DRAFTERS, *plugins.installed(GROUP)})
        raise ValueError(
            f"{name!r} is not a drafter{did_you_mean(name, known)} (drafters: {', '.join(known)}, "
            "or the import path of a class, such as my_file.MyDrafter)"
        )
    if not (isinstance(loaded, type) and issubclass(loaded, Drafter)) or isabstract(loaded):
        raise ValueError(
            f"{name!r} is not a class of drafters: it must be a subclass of magicjax.Drafter with "
            f"the methods {', '.join(REQUIRED)}"
        )
    return loaded


def drafter_name(drafter_class: type[Drafter]) -> str:
    """Returns the name of a class of drafters; its import path if it is not registered."""
    return plugins.name_of(drafter_class, DRAFTERS, GROUP)


@dataclasses.dataclass(frozen=True)
class Parsed[Part]:
    """A text of drafters, or of trees, parsed.

    Attributes:
      text: as it was given.
      stages: the parts of each stage of a cascade, several of an ensemble: "a + b -> c" has
        ((a, b), (c,)). Without a cascade there is one stage.
    """

    text: str
    stages: tuple[tuple[Part, ...], ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of all stages."""
        return tuple(itertools.chain.from_iterable(self.stages))

    @property
    def is_cascade(self) -> bool:
        """Whether there are several stages."""
        return len(self.stages) > 1


def joined[Part](texts: Iterable[Parsed[Part]]) -> Parsed[Part]:
    """Returns what the texts joined by " + " are: the parts of an ensemble."""

    def join(left: Parsed[Part], right: Parsed[Part]) -> Parsed[Part]:
        middle = left.stages[-1] + right.stages[0]
        stages = (*left.stages[:-1], middle, *right.stages[1:])
        return Parsed(left.text + _JOIN + right.text, stages)

    return functools.reduce(join, texts)


@dataclasses.dataclass(frozen=True)
class Spec:
    """The text of one drafter, parsed.

    Attributes:
      text: as it was given.
      name: the drafter's name; the same for all policies.
      path: path of its model, "" if it has none.
      values: options of the name that the text sets.
      policy_values: options of its policy that the text sets.
    """

    text: str
    name: str
    path: str
    values: Mapping[str, Any]
    policy_values: Mapping[str, Any]


Drafters = Parsed[Spec]
Trees = Parsed[Tree]


def has_model(drafter_class: type[Drafter]) -> bool:
    """Returns whether a class of drafters has a model, whose path its text can contain."""
    return any(field.name == "model" for field in dataclasses.fields(drafter_class))  # type: ignore[arg-type]


def needs_model(drafter_class: type[Drafter]) -> bool:
    """Returns whether the text of such a drafter must contain a path."""
    has_default = hasattr(drafter_class, "model")  # a default is an attribute
    return has_model(drafter_class) and not has_default


def parse(text: str) -> Drafters:
    """Returns the drafters of a text: one, an ensemble, or a cascade.

    Raises:
      ValueError: as `parse_one`.
    """
    stages = [stage.split(_JOIN) for stage in text.split(_CASCADE)]
    try:
        return Parsed(text, tuple(tuple(parse_one(x.strip()) for x in stage) for stage in stages))
    except ValueError:
        wrong = re.compile(rf"([,+&]|->)\s*({'|'.join(DRAFTERS)})(:|$)")
        if not any(wrong.search(part) for stage in stages for part in stage):
            raise
    raise ValueError(
        f"drafter {text!r}: the members of an ensemble are joined by ' + ', as in "
        "'self:streaming:256 + prompt-lookup:4', and those of a cascade by ' -> '"
    )


def parse_one(text: str) -> Spec:
    """Returns the drafter of a text that has one.

    The shortest path is taken after which the other parts are values: a directory whose name ends
    as a policy needs one, small:a:streaming:full. A GGUF file of the Hugging Face Hub is one path.

    Raises:
      ValueError: an unknown drafter, option or policy, or a wrong value.
    """
    name, *parts = text.split(":")
    try:
        drafter_class = get_drafter(name)
    except ValueError as error:
        raise ValueError(f"drafter {text!r}: {error}") from error
    declared = options.options_of(drafter_class)
    positional = [option for option in declared.values() if option.positional]
    named: list[re.Match] = []
    _join_groups(parts)
    while len(parts) > needs_model(drafter_class) and (
        match := re.fullmatch(r"(\w+)=(.*)", parts[-1])
    ):
        named.insert(0, match)
        parts.pop()
    path = ""
    if has_model(drafter_class):
        if needs_model(drafter_class) and not any(parts):
            raise ValueError(f"drafter {text!r} needs a model: write {name}:PATH")
        shortest = 2 if hub.is_gguf(":".join(parts[:2])) else int(needs_model(drafter_class))
        length = next(n for n in range(shortest, len(parts) + 1) if _fit(positional, parts[n:]))
        path, parts = ":".join(parts[:length]), parts[length:]
    if named_part := next((part for part in parts if "=" in part), None):
        raise ValueError(f"drafter {text!r}: write values without a name before {named_part}")
    if len(parts) > len(positional):
        raise ValueError(
            f"drafter {text!r} has {len(parts)} values, and {name} takes at most "
            f"{len(positional)} without a name; write {DRAFTER_SYNTAX}"
        )
    values = {
        option.name: _parse_value(option, part, text)
        for option, part in zip(positional, parts, strict=False)
    }
    policy = next((match[2] for match in named if match[1] == "policy"), values.get("policy"))
    known = declared | _policy_options(name, policy, path and text)
    parsed = Spec(text, name, path, values, {})
    for match in named:
        parsed = _with_option(parsed, options.find(match[1], known, text), match[2])
    return parsed


def _join_groups(parts: list[str]) -> None:
    """Joins the parts of a format of weights that has a group: weights=int4 and 32."""
    for i in range(len(parts) - 1):
        if re.fullmatch(r"weights=int\d+", parts[i]) and parts[i + 1].isdecimal():
            parts[i : i + 2] = [":".join(parts[i : i + 2])]
            return


def _with_option(spec: Spec, option: Option, value: str) -> Spec:
    """Returns the drafter with one more option.

    Raises:
      ValueError: a wrong value, or the option is already set.
    """
    if option.name in {**spec.values, **spec.policy_values}:
        raise ValueError(f"drafter {spec.text!r} sets {option.name} twice: remove one")
    added = {option.name: _parse_value(option, value, spec.text)}
    if option.name in options.options_of(get_drafter(spec.name)):
        return dataclasses.replace(spec, values={**spec.values, **added})
    return dataclasses.replace(spec, policy_values={**spec.policy_values, **added})


def known_options(spec: Spec, policy: str | None = None) -> dict[str, Option]:
    """Returns the options of a drafter, and those of its policy, or of another `policy`."""
    declared = options.options_of(get_drafter(spec.name))
    return declared | _policy_options(spec.name, policy or spec.values.get("policy"), "")


def with_options(spec: Spec, values: Mapping[str, Any]) -> Spec:
    """Returns the drafter with further options; its text stays.

    Raises:
      ValueError: an unknown option or policy, a wrong value, or an option that is already set.
    """
    known = known_options(spec, values.get("policy"))
    for name, value in values.items():
        spec = _with_option(spec, options.find(name, known, spec.text), str(value))
    return spec


def with_paths(parsed: Drafters, change: Callable[[str], str]) -> str:
    """Returns the text of drafters with other paths of their models."""

    def changed(spec: Spec) -> str:
        path = spec.path and change(spec.path)
        return spec.text.replace(f":{spec.path}", f":{path}", 1)

    return _CASCADE.join(_JOIN.join(map(changed, stage)) for stage in parsed.stages)


def _fit(positional: Sequence[Option], parts: Sequence[str]) -> bool:
    """Returns whether the parts can be values of positional options, rather than of a path."""
    try:
        for option, part in zip(positional, parts, strict=False):
            options.parse(option, part)
    except ValueError:
        return False
    return len(parts) <= len(positional) and all(re.fullmatch(r"[\w.-]+", part) for part in parts)


def _parse_value(option: Option, value: str, text: str) -> Any:
    try:
        return options.parse(option, value)
    except ValueError as error:
        raise ValueError(f"drafter {text!r}: {error}") from error


def _policy_options(name: str, policy: str | None, of_path: str) -> dict[str, Option]:
    """Returns the options of a drafter's policy, None for the default; {} without a policy."""
    declared = options.options_of(get_drafter(name))
    if "policy" not in declared or Policy not in typing.get_args(declared["policy"].annotation):
        return {}
    default = declared["policy"].default
    policy = policy or default
    if policy == default == FULL:
        return {}
    try:
        instance = get_policy(policy)
    except ValueError as error:
        hint = f"; write {policy} instead of {name}:{policy}" if policy in DRAFTERS else ""
        if of_path:
            hint = f" (a directory of that name needs {of_path}:full)"
        raise ValueError(f"{error}{hint}") from error
    return options.fields_of(type(instance), policy_name(instance))


def make_drafter(drafter: str | Drafters, load: Callable[..., Any]) -> Drafter:
    """Returns the drafter of a text, an `Ensemble` of several joined by " + ", or a `Cascade`.

    Args:
      drafter: such as self:snapkv:256, small:PATH:streaming:256, prompt-lookup:4, or
        "prompt-lookup:4 -> self:streaming:256"; a text, or parsed.
      load: returns the model of a path; its keywords are the drafter's options `LOAD_OPTIONS`.

    Raises:
      ValueError, FileNotFoundError: the text is not a drafter, an unknown policy or model, or
        options that cannot be combined.
    """
    parsed = parse(drafter) if isinstance(drafter, str) else drafter
    stages: list[Any] = []
    for stage in parsed.stages:
        members = tuple(make_one(spec, load) for spec in stage)
        stages.append(members[0] if len(members) == 1 else Ensemble(members))
    return functools.reduce(Cascade, stages)  # which checks that the last one runs the target


def make_one(spec: Spec, load: Callable[..., Any]) -> Drafter:
    """Returns one drafter; see `make_drafter`."""
    drafter_class: Any = get_drafter(spec.name)
    values = dict(spec.values)
    if spec.policy_values:
        default = options.options_of(drafter_class)["policy"].default
        default_policy: Any = get_policy(values.get("policy", default))
        values["policy"] = dataclasses.replace(default_policy, **spec.policy_values)
    if not spec.path:
        return drafter_class(**values)
    load_options = {name: values[name] for name in LOAD_OPTIONS if values.get(name) is not None}
    return drafter_class(load(spec.path, **load_options), **values)


def text_of(drafter: Drafter) -> str:
    """Returns the text of a drafter: its positional options, and others that are not defaults.

    A model is written as its `name`.
    """
    if isinstance(drafter, Ensemble):
        return _JOIN.join(map(text_of, drafter.drafters))
    if isinstance(drafter, Cascade):
        return _CASCADE.join(map(text_of, (drafter.first, drafter.middle)))
    drafter_class: Any = type(drafter)
    parts = [drafter_name(drafter_class)]
    name = getattr(getattr(drafter, "model", None), "name", "")
    if needs_model(drafter_class) or (has_model(drafter_class) and name):
        parts.append(name)
    declared, values = options.options_of(drafter_class), values_of(drafter)
    for option in declared.values():
        if option.positional:
            if values[option.name] is None:
                break  # later ones would take its place
            parts.append(_format_value(values.pop(option.name)))
    defaults = {name: option.default for name, option in declared.items()}
    named = (
        f"{name}={_format_value(value)}"
        for name, value in values.items()
        if name not in defaults or value != defaults[name]
    )
    return ":".join([*parts, *named])


def values_of(drafter: Drafter) -> dict[str, Any]:
    """Returns the options of a drafter with their values, and the policy's that are not defaults.

    The policy is its name. Ensembles and cascades have no options.
    """
    values = {name: getattr(drafter, name) for name in options.options_of(type(drafter))}
    policy = values.get("policy")
    if not isinstance(policy, Policy):
        return values
    policy_values = {
        name: getattr(policy, name)
        for name, option in options.fields_of(type(policy)).items()
        if getattr(policy, name) != option.default
    }
    return values | {"policy": policy_name(policy)} | policy_values


def _format_value(value: Any) -> str:
    """Returns the text of an option's value.

    Raises:
      ValueError: the text would not be read as this value.
    """
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if (":" in text and not re.fullmatch(r"int\d+:\d+", text)) or _JOIN in text or _CASCADE in text:
        raise ValueError(
            f"an option has the value {text!r}, which must not contain ':', ' + ' or ' -> '"
        )
    return text


def parse_trees(text: str) -> Trees:
    """Returns the trees of "chain:3", "expansion:2,1 + chain:3" or "chain:4 -> chain:8".

    They are those of all drafters, of each member of an ensemble, or of a cascade.
    """
    stages = [stage.split("+") for stage in text.split("->")]
    return Parsed(text, tuple(tuple(parse_tree(x.strip()) for x in stage) for stage in stages))


def resolve(
    drafter: Any, tree: Tree | str | Trees | None, load: Callable[..., Any]
) -> tuple[Any, Tree | None]:
    """Returns (drafter, tree), made from their texts if they are texts, or parsed ones.

    Raises:
      ValueError, FileNotFoundError: as `make_drafter`; trees that are not one for all drafters, one
        for each member of an ensemble, or two of a cascade.
    """
    if isinstance(drafter, str | Parsed):
        drafter = make_drafter(drafter, load)
    if not isinstance(tree, str | Parsed):
        return drafter, tree
    trees = parse_trees(tree) if isinstance(tree, str) else tree
    if len(trees.parts) == 1:
        return drafter, trees.parts[0]
    if isinstance(drafter, Cascade) or trees.is_cascade:
        return _with_first_tree(drafter, trees)
    members = drafter.members() if hasattr(drafter, "members") else ()
    if len(trees.parts) != len(members):
        raise ValueError(
            f"tree={trees.text!r} has {len(trees.parts)} trees for {len(members)} drafters: give "
            "one for all, or one for each"
        )
    return Ensemble(members, trees.parts), None


def _with_first_tree(drafter: Any, trees: Trees) -> tuple[Cascade, Tree]:
    """Returns the cascade with the first of two trees, and the other, which the target verifies."""
    if not isinstance(drafter, Cascade) or [*map(len, trees.stages)] != [1, 1]:
        raise ValueError(
            f"tree={trees.text!r} does not fit the drafter: use one tree, or for a cascade those "
            "of its first drafter and of the target, as in 'chain:4 -> chain:8'"
        )
    first_tree, target_tree = trees.parts
    return dataclasses.replace(drafter, first_tree=first_tree), target_tree
