"""A method of speculation, as an experiment file describes it: drafter, tree, cache, verifier."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

import magicjax
from experiments.schema.fields import Many, Positive, Strict
from experiments.schema.settings import Policies, declared, setting
from magicjax import PromptLookup, parse_tree
from magicjax.drafters import spec
from magicjax.drafters.draft_pass import resolve_draw_method
from magicjax.drafters.sparse import BUDGET
from magicjax.policies import POLICIES, Full, StreamingLLM, get_policy
from magicjax.trees.token_tree import Tree
from magicjax.verification.verify import VERIFIERS

PROMPT_LOOKUP = "prompt-lookup"  # a draft, and a member of an ensemble
CACHED = ("self", "small")  # drafts with a cache of their own
DRAFTER_KINDS = (*CACHED, PROMPT_LOOKUP, "ensemble", "auto")
SAMPLING_VERIFIERS = tuple(name for name in VERIFIERS if name != "greedy")
STREAMING = Policies("policy=streaming", lambda name: isinstance(get_policy(name), StreamingLLM))
SPARSE = Policies("policy=streaming", lambda name: not isinstance(get_policy(name), Full))
PINNING = Policies(
    "a policy that chooses its pins",
    lambda name: not isinstance(get_policy(name), Full | StreamingLLM),
)


class Method(Strict):
    """A method of speculation; lists make one cell of each combination."""

    draft: Literal["self", "small", "prompt-lookup", "ensemble", "auto"] = "self"
    """The drafter: the target on a sparse cache (self), a small model, prompt lookup, an ensemble
    of small models and prompt lookup, whose trees are merged, or auto: the fastest after a short
    trial, plain decoding if none is faster."""
    drafters: list[str] = setting([], drafters=("auto",), argument="")
    """With draft=auto, the drafters to try, in the syntax of the command line: self:streaming:256,
    small:DIRECTORY:streaming:256, prompt-lookup:4. If not set: several caches of the target, and
    prompt lookup."""
    profile: str = setting("", drafters=("auto",), argument="")
    """With draft=auto, the device: a file of `magicjax calibrate` or a preset. If not set: the file
    that calibrate writes."""
    tree: Annotated[list[str], Many] = setting(
        "",
        many=True,
        default="chain:4",
        defaults={"auto": "chain:8"},
        drafters=DRAFTER_KINDS,
        argument="",
    )
    """What a round proposes: chain:n, expansion:k1,...,km, parents:-1,... or
    dynamic:nodes,depth,width; for an ensemble one tree, or one for each member joined by +. With
    draft=auto, the tree of the trials. If not set: chain:4, with draft=auto chain:8."""
    model: str = setting("", drafters=("small",), argument="", in_cell=False)
    """Directory of the small model, with draft=small."""
    models: list[str] = setting([], drafters=("ensemble",), argument="", column="draft_model")
    """Members of an ensemble: directories of small models, or prompt-lookup."""
    policy: Annotated[list[str], Many] = setting(
        "",
        many=True,
        default="streaming",
        defaults={"small": "full"},
        drafters=CACHED,
        help=f"What a draft's cache keeps of the prompt: {', '.join(POLICIES)}, or a policy that "
        "another package registers. If not set: streaming, with draft=small full.",
    )
    budget: Annotated[list[Positive], Many] = setting(
        None, many=True, default=BUDGET, drafters=CACHED, policies=SPARSE
    )
    """Slots of a draft's cache for each layer and KV head. If not set: 256, except with
    policy=full."""
    sinks: Positive | None = setting(
        None,
        default=StreamingLLM().sinks,
        drafters=CACHED,
        policies=STREAMING,
        argument="policy",
        label="sinks {}",
    )
    """With policy=streaming, how many of the first tokens are pinned. If not set: 16."""
    recent: Positive | None = setting(
        None, drafters=CACHED, policies=PINNING, argument="policy", label="recent {}"
    )
    """With policies that choose their pins, slots for the newest tokens. If not set: half of the
    budget."""
    refresh_every: Annotated[list[Annotated[int, Field(ge=0)]], Many] = setting(
        None, many=True, drafters=("self",), label="refresh {}"
    )
    """Rounds between two choices of the pins. If not set: 0, the pins are chosen once."""
    kv_dtype: Annotated[list[Literal["", "int8", "int4"]], Many] = setting(
        "", many=True, drafters=CACHED, label="{}"
    )
    """Type of the entries of a draft's cache. If not set: the model's own."""
    sink_positions: Literal["", "text", "in_cache"] = setting(
        "", default="text", drafters=("small",), policies=SPARSE, label="in cache"
    )
    """Positions of a small model's sinks, with policy=streaming: text, as in the prompt, or
    in_cache, directly before the newest tokens. If not set: text."""
    max_ngram: Annotated[list[Positive], Many] = setting(
        None,
        many=True,
        default=PromptLookup().max_ngram,
        drafters=(PROMPT_LOOKUP,),
        label="ngram {}",
    )
    """Newest tokens that prompt lookup searches for, at most. If not set: 4."""
    draw: Literal["", "with_replacement", "without_replacement", "top"] = setting(
        "", drafters=(*CACHED, "ensemble"), sampled=True
    )
    """How children are drawn under sampling. If not set: without_replacement, in a dynamic tree
    top."""
    verifier: Annotated[list[str], Many] = setting(
        "",
        many=True,
        default="mss",
        drafters=DRAFTER_KINDS,
        sampled=True,
        argument="",
        help=f"Verification under sampling: {', '.join(SAMPLING_VERIFIERS)}. If not set: mss, "
        "which follows the draw.",
    )

    @model_validator(mode="after")
    def _check(self) -> "Method":
        stray = [
            name
            for name, known in declared(Method).items()
            if getattr(self, name) and self.draft not in known.drafters
        ]
        if stray:
            raise ValueError(f"{', '.join(stray)} has no effect with draft={self.draft}: remove it")
        if self.draft == "small" and not self.model:
            raise ValueError("draft=small needs the model's directory: set model")
        if self.draft == "ensemble" and len(self.models) < 2:
            raise ValueError(
                f"models lists {len(self.models)} members of an ensemble: list at least 2, or set "
                "draft=small"
            )
        for name in self.verifier:
            if name not in SAMPLING_VERIFIERS:
                known = ", ".join(SAMPLING_VERIFIERS)
                raise ValueError(f"verifier={name!r} does not verify sampled tokens: use {known}")
        self._check_policies()
        for options in self.options(sampled=True):
            self._check_tree(options["tree"])
            if self.draft != "auto":  # which needs the models of its drafters
                make_drafter(self.draft, options)
        return self

    def _check_policies(self) -> None:
        """Raises ValueError if a single value has no effect with any policy of the method."""
        known = declared(Method)
        policies = self.policy or [known["policy"].resolve(None, self.draft)]
        for name, option in known.items():
            suits: Any = option.policies
            if suits is None or option.many or not getattr(self, name):
                continue
            if not any(map(suits.include, policies)):
                raise ValueError(
                    f"{name} has no effect with policy={', '.join(policies)}: remove it, or set "
                    f"{suits.remedy}"
                )

    def _check_tree(self, text: str) -> None:
        """Raises ValueError unless each member, or the only drafter, can draft its tree."""
        members = tuple(self.models) or (self.draft,)
        trees = parse_trees(text)
        if len(trees) not in (1, len(members)):
            raise ValueError(
                f"tree={text!r} has {len(trees)} trees for {len(members)} drafters: give one for "
                "all, or one for each"
            )
        each = trees * len(members) if len(trees) == 1 else trees
        for member, tree in zip(members, each, strict=True):
            if member == "auto":
                magicjax.Auto(tree=tree)
            elif member == PROMPT_LOOKUP:
                PromptLookup().check(None, tree, 0, 0)  # type: ignore[arg-type] # checks the tree
            else:
                resolve_draw_method(self.draw or None, tree)

    def options(self, sampled: bool) -> list[dict[str, Any]]:
        """Returns the resolved options of each cell, by name; `sampled`: under sampling.

        Raises:
          ValueError: an unknown policy or drafter.
        """
        known = declared(Method)
        tried = (spec.match_drafter(text)["path"] for text in self.drafters)
        paths = tuple(dict.fromkeys(path for path in tried if path))
        lists = [
            (getattr(self, name) or [None]) if option.many else [getattr(self, name)]
            for name, option in known.items()
        ]
        cells = []
        for values in itertools.product(*lists):
            chosen = dict(zip(known, values, strict=True))
            policy = known["policy"].resolve(chosen["policy"], self.draft)
            cell = {
                name: known[name].resolve(value, self.draft, policy, sampled)
                for name, value in chosen.items()
            }
            model = cell.pop("model")
            cells.append(cell | {"models": (model,) if model else cell["models"] or paths})
        return cells


def make_drafter(
    draft: str, options: Mapping[str, Any], load: Callable[[str], Any] = lambda directory: None
) -> Any:
    """Returns the drafter of a cell, None for plain decoding, `magicjax.Auto` for "auto".

    `load` returns the model of a directory. The default suffices for the shapes of trees and how
    their children are drawn.

    Raises:
      ValueError: options that do not fit together.
    """

    def arguments(kind: str) -> dict[str, Any]:
        names = [name for name, option in declared(Method).items() if option.argument == kind]
        return {name: options[name] for name in names if options[name] not in (None, "")}

    if draft == "none":
        return None
    taken, trees = arguments("drafter"), parse_trees(options["tree"])
    if draft == "auto":
        tried = [spec.make_drafter(text, load) for text in options["drafters"]]
        return magicjax.Auto(tried or None, options["profile"] or None, tree=trees[0])
    if draft == PROMPT_LOOKUP:
        return PromptLookup(**taken)
    if draft == "ensemble":
        members = tuple(
            PromptLookup() if path == PROMPT_LOOKUP else magicjax.SmallModel(load(path), **taken)
            for path in options["models"]
        )
        return magicjax.Ensemble(members, trees if len(trees) > 1 else None)
    policy: Any = get_policy(taken.pop("policy", "full"))
    taken["policy"] = dataclasses.replace(policy, **arguments("policy"))
    if draft == "self":
        return magicjax.SelfSpeculation(**taken)
    return magicjax.SmallModel(load(options["models"][0]), **taken)


def parse_trees(text: str) -> tuple[Tree, ...]:
    """Returns the trees of `chain:3`, or of `expansion:2,1 + chain:3`, one for each member."""
    return tuple(parse_tree(part.strip()) for part in text.split("+"))
