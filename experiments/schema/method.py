"""A way to speculate, as an experiment file says it: who drafts, what, on which cache."""

import itertools
from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

import magicjax
from experiments.schema import cache_settings
from experiments.schema.cache_settings import CacheSettings
from experiments.schema.fields import STRICT, Many, Positive
from magicjax import LookUp, parse_tree
from magicjax.drafters.draft_pass import drawing_of
from magicjax.drafters.sparse import BUDGET
from magicjax.drafters.spec import parts
from magicjax.policies import POLICIES
from magicjax.trees.token_tree import Tree
from magicjax.verification.verify import VERIFIERS

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
TREE, AUTO_TREE = "chain:4", "chain:8"  # if not given; the latter is what drafts are tried with


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
        [],
        description="What is proposed at once: chain:n, expansion:k1,...,km, parents:-1,... or "
        "dynamic:nodes,depth,width; of an ensemble also one for each member, joined by +; "
        f"{TREE} if not given. With draft=auto what drafts are tried with, {AUTO_TREE} if not "
        "given.",
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
        for spec in self.trees:
            self._check_tree(spec)
        for text in self.drafters:
            parts(text)
        self.caches()
        return self

    @property
    def trees(self) -> list[str]:
        """What is proposed, one cell for each."""
        return self.tree or [AUTO_TREE if self.draft == "auto" else TREE]

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
