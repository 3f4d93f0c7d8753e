"""A method of speculation, as an experiment file describes it: drafter, tree, verifier."""

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar

import tyro
from pydantic import Field, model_validator

import magicjax
from experiments.schema.fields import Many, Strict
from magicjax.drafters import spec
from magicjax.options import names_by_owner, options_of
from magicjax.suggest import did_you_mean
from magicjax.verification.verify import VERIFIERS

AUTO = "auto"
SAMPLING_VERIFIERS = tuple(name for name in VERIFIERS if name != "greedy")
VERIFIER = "mss"  # under sampling
TREE = "chain:4"

# Options of the package's drafters, which are columns; those of other drafters are further columns.
OPTIONS = tuple(
    dict.fromkeys(
        [*(n for kind in spec.DRAFTERS.values() for n in options_of(kind)), "policy_options"]
    )
)
# The fields of a cell that a method gives, with their values in plain decoding.
PLAIN: dict[str, Any] = {
    **{"drafter": "none", "drafters": (), "profile": "", "tree": "", "verifier": ""},
    "adaptive": False,
}


class Method(Strict):
    """A method of speculation; lists make one cell of each combination."""

    further_keys: ClassVar = OPTIONS
    drafter: Annotated[list[str], Many] = Field(["self"], examples=["self:streaming:256"])
    """The drafter, as in commands: self:streaming:256 (the target on a sparse cache), small:PATH (a
    small model), prompt-lookup:4, or the name of an installed drafter; several joined by " + " are
    an ensemble, whose trees are merged; "prompt-lookup:4 -> self:streaming:256" is a cascade. auto:
    the fastest after a short trial, plain decoding if none is faster. Options such as policy and
    budget are written in this text, or as keys of the method, which may have lists of values."""
    drafters: list[str] = Field([])
    """With drafter=auto, the drafters to try. If not set: several caches of the target, prompt
    lookup and suffix lookup."""
    profile: str = ""
    """With drafter=auto, the device: a file of `magicjax calibrate` or a preset. If not set: the
    file that calibrate writes."""
    tree: Annotated[list[str], Many] = Field([], examples=["chain:4"])
    """What a round proposes: chain:n, expansion:k1,...,km, parents:-1,... or
    dynamic:nodes,depth,width with an optional min_prob; for an ensemble one tree, or one for each
    member joined by " + "; for a cascade that of its first drafter, or "chain:4 -> chain:8": its
    tree, and the chain that the target verifies. With drafter=auto, the tree of the trials. If not
    set: chain:4, with drafter=auto chain:8."""
    verifier: Annotated[list[str], Many] = Field(
        [],
        description=f"Verification under sampling: {', '.join(SAMPLING_VERIFIERS)}. If not set: "
        f"{VERIFIER}, which follows the draw.",
    )
    adaptive: Annotated[list[bool], Many] = Field([False])
    """With slots, choose while decoding what has the highest expected throughput: plain decoding,
    or a drafter with a depth of up to that of its tree."""
    options: Annotated[dict[str, list[Any]], tyro.conf.Suppress] = Field({})
    """Options of the drafter: the keys of the method that are none of the above."""

    @model_validator(mode="before")
    @classmethod
    def _collect_options(cls, raw: Any) -> Any:
        """Moves the keys that are no fields to `options`."""
        if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
            return raw
        fields = {name: value for name, value in raw.items() if name in cls.model_fields}
        options = {
            name: value if isinstance(value, list) else [value]
            for name, value in raw.items()
            if name not in cls.model_fields
        }
        return fields | {"options": raw.get("options", {}) | options}

    @model_validator(mode="after")
    def _check(self) -> "Method":
        if AUTO in self.drafter:
            self._check_auto()
        elif stray := [name for name in ("drafters", "profile") if getattr(self, name)]:
            raise ValueError(f"{', '.join(stray)} has no effect without drafter=auto: remove it")
        for name in self.verifier:
            if name not in SAMPLING_VERIFIERS:
                known = ", ".join(SAMPLING_VERIFIERS)
                hint = did_you_mean(name, SAMPLING_VERIFIERS)
                raise ValueError(
                    f"verifier={name!r} does not verify sampled tokens{hint} (verifiers: {known}; "
                    "omit it in greedy decoding)"
                )
        for name, values in self.options.items():
            if not values or any(isinstance(value, dict | list) for value in values):
                raise ValueError(f"{name}={values!r}: give a value, or a list of values")
        for drafter, tree in itertools.product(self._made(sampled=True), self._trees):
            resolve(drafter, tree, named)
        return self

    def _check_auto(self) -> None:
        if len(self.drafter) > 1:
            raise ValueError("drafter=auto excludes other drafters: list them with drafters")
        if self.options:
            names = ", ".join(self.options)
            raise ValueError(f"{names} has no effect with drafter=auto: write it in drafters")
        candidates = [spec.make_drafter(text, named) for text in self.drafters]
        for tree in self._trees:
            make_auto(candidates, self.profile, tree)

    def needing(self, setting: str) -> list[str]:
        """Returns the keys that have no effect without a setting of the experiment."""
        is_set_by: dict[str, dict[str, Any]] = {
            "temperature": {"verifier": self.verifier, "draw": "draw" in self.options},
            "slots": {"adaptive": any(self.adaptive)},
        }
        return [name for name, is_set in is_set_by[setting].items() if is_set]

    @functools.cached_property
    def _parsed(self) -> list[spec.Drafters]:
        return [spec.parse(text) for text in self.drafter if text != AUTO]

    @functools.cached_property
    def _trees(self) -> list[spec.Trees]:
        return [*map(spec.parse_trees, self.tree or ["chain:8" if AUTO in self.drafter else TREE])]

    def _made(self, sampled: bool) -> list[magicjax.Drafter]:
        """Returns the drafters with each combination of options, [] for "auto".

        They have stand-ins for models. Raises as `cells`.
        """
        options = {n: values for n, values in self.options.items() if sampled or n != "draw"}
        combinations = itertools.product(self._parsed, *options.values())
        return [
            _with_options(parsed, dict(zip(options, values))) for parsed, *values in combinations
        ]

    def cells(self, sampled: bool) -> list[dict[str, Any]]:
        """Returns the method's fields of each cell; `sampled`: under sampling.

        Raises:
          ValueError: an unknown drafter, or options that do not fit together.
        """
        drafters = [AUTO] if AUTO in self.drafter else map(spec.text_of, self._made(sampled))
        verifiers = (self.verifier or [VERIFIER]) if sampled else [""]
        fixed = {"drafters": tuple(self.drafters), "profile": self.profile}
        return [
            {"drafter": drafter, "tree": tree.text, "verifier": verifier, "adaptive": adaptive}
            | fixed
            for drafter, tree, verifier, adaptive in itertools.product(
                drafters, self._trees, verifiers, self.adaptive
            )
        ]


def _with_options(parsed: spec.Drafters, options: dict[str, Any]) -> magicjax.Drafter:
    """Returns a drafter with all of its options, with stand-ins for models.

    Raises:
      ValueError: keys that are not options of the drafter, or options that do not fit together.
    """
    # "" and None mean that an option is not set.
    chosen = {name: value for name, value in options.items() if value not in ("", None)}
    if not chosen:
        return spec.make_drafter(parsed, named)
    if len(parsed.parts) > 1:
        raise ValueError(
            f"{', '.join(chosen)} could belong to any member of {parsed.text!r}: write it in the "
            "text of one"
        )
    (draft,) = parsed.parts
    known = spec.known_options(draft, chosen.get("policy"))
    for name in chosen:
        if name not in known:
            keys = [key for key in Method.model_fields if key not in {*known, "options"}]
            hint = did_you_mean(name, [*keys, *known])
            raise ValueError(
                f"{name}: no such key with drafter={draft.text}{hint} "
                f"(keys: {', '.join(keys)}, {names_by_owner(known.values())})"
            )
    return spec.make_one(spec.with_options(draft, chosen), named)


def named(path: str, **options: Any) -> magicjax.Model:
    """Returns a stand-in for the model of a path, which suffices for a drafter's text and trees."""
    return magicjax.Model(module=None, params=None, name=path)  # type: ignore[arg-type]


def resolve(drafter: Any, trees: spec.Trees, load: Callable) -> tuple[Any, Any]:
    """Returns (drafter, tree), as arguments of `magicjax.generate`.

    Args:
      drafter: made, or parsed.
      trees: one per member.
      load: returns the model of a path.

    Raises:
      ValueError: the trees do not fit the drafter.
    """
    drafter, tree = spec.resolve(drafter, trees, load)
    drafter.draw_methods(tree)  # raises if it cannot draw the children of such a tree
    return drafter, tree


def make_auto(
    candidates: Iterable[magicjax.Drafter], profile: str, trees: spec.Trees
) -> magicjax.Auto:
    """Returns the choice among drafters, with the tree of the trials."""
    return magicjax.Auto([*candidates] or None, magicjax.parse_tree(trees.text), profile or None)


def short_name(drafter: spec.Drafters) -> str:
    """Returns the text of a drafter with the names of models instead of their paths."""

    def load(path: str, **options: Any) -> magicjax.Model:
        return named(pathlib.PurePath(path).name, **options)

    return spec.text_of(spec.make_drafter(drafter, load))
