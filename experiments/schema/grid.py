"""From an experiment to its cells: what is measured once, and the key its result is kept under.

Cells that differ in the method alone form a group: they share prompts, and plain decoding opens it.
"""

import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, Literal

from jax.sharding import Mesh

import magicjax
from experiments.prompts import TEXTS
from experiments.schema import axes, cache_settings, store
from experiments.schema.cache_settings import CacheSettings
from experiments.schema.config import Experiment
from experiments.schema.fields import ConfigError
from experiments.schema.method import LOOK_UP, Method, parse_trees
from magicjax.drafters import spec
from magicjax.drafters.spec import parts
from magicjax.trees.token_tree import ROOT_ONLY, Shape
from sharding import parse_mesh

CANDIDATES = 4
VERIFIER = "mss"  # of sampled cells, where none is given


@dataclasses.dataclass(frozen=True)
class Cell:
    """One row of the results, every setting resolved.

    Attributes:
      target: directory or preset.
      draft: "none" (plain decoding), "self", "small", "look_up", "ensemble" or "auto".
      models: directory of the small model, an ensemble's members, or the small models that "auto"
        tries; else none.
      drafters, profile: what "auto" tries, as commands write it, and its device; as given.
      cache: what the draft keeps.
      tree: its name, or those of an ensemble's members joined by +; else "".
      draw: as given, "" for the draft's own way.
      verifier: of sampled cells, else "".
      dtype, mesh, batch, context, new_tokens, repeats, agreement_tokens, phases: as given.
      micro_batches: as given; 0: as many as are fastest.
      prompts, prompt_path, prompt_seed: as given.
      candidates: places of the text tried for each row; 1 of prompts that are taken as they come.
      do_sample: whether tokens are drawn; the next four are 0 if not.
      temperature, top_k, top_p, seed: of sampling.
    """

    target: str
    draft: str
    models: tuple[str, ...]
    drafters: tuple[str, ...]
    profile: str
    cache: CacheSettings
    tree: str
    draw: str
    verifier: str
    dtype: str
    offload: str
    mesh: str
    micro_batches: int
    batch: int
    context: int
    new_tokens: int
    repeats: int
    prompts: str
    prompt_path: str
    prompt_seed: int
    candidates: int
    agreement_tokens: int
    phases: bool
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int

    @property
    def model(self) -> str:
        """The drafts' directories as one text."""
        return " + ".join(self.models)

    @property
    def shape(self) -> Shape:
        """The bounds of what is proposed in a round."""
        if self.draft == "none":
            return ROOT_ONLY.shape
        tree = parse_trees(self.tree)[0]
        if self.draft == "auto":
            return tree.shape
        return make_drafter(self).shape(tree)

    @property
    def gamma(self) -> int:
        return self.shape.depth

    @property
    def nodes(self) -> int:
        return self.shape.num_nodes

    @property
    def drawings(self) -> str:
        """How children are drawn, "" in greedy decoding."""
        if self.draft in ("none", "auto") or not self.do_sample:
            return ""
        return " + ".join(sorted(make_drafter(self).drawings(parse_trees(self.tree)[0])))

    @property
    def sampling(self) -> dict[str, Any]:
        """The arguments of `generate` that say how tokens are chosen; none in greedy decoding."""
        if not self.do_sample:
            return {}
        names = ("do_sample", "temperature", "top_k", "top_p", "seed")
        return {name: getattr(self, name) for name in names}

    @property
    def offloaded(self) -> bool | Literal["int8"]:
        """Where the target's weights are, as `magicjax.load` takes it."""
        return "int8" if self.offload == "int8" else self.offload == "yes"

    @property
    def devices(self) -> Mesh | None:
        """The mesh; None: one device."""
        return magicjax.make_mesh(*parse_mesh(self.mesh)) if self.mesh else None

    @property
    def method(self) -> str:
        """The method's name in tables and plots."""
        who = " + ".join(pathlib.PurePath(m).name for m in self.models)
        names = {"self": "self", "look_up": "look-up", "auto": "auto"}
        who = names.get(self.draft, who)
        if self.draft == "self" or self.cache.kv_budget:
            who = f"{who} {self.cache.label}"
        said = [who, self.tree, self.draw.replace("_", " "), self.verifier]
        return "plain" if self.draft == "none" else ", ".join(filter(None, said))

    @property
    def label(self) -> str:
        """The cell's name in messages."""
        return f"batch {self.batch}, context {self.context}: {self.method}"


def groups(experiment: Experiment) -> list[list[Cell]]:
    """Returns the cells, a group for each combination of the axes, plain decoding first.

    Raises:
      ConfigError: the axes are wrong, two cells are the same, `exclude` names what a cell does not
        have, matches none or leaves none.
    """
    found = [_group(one) for one in axes.expand(experiment)]
    every = [cell for group in found for cell in group]
    twice = next((cell for i, cell in enumerate(every) if cell in every[:i]), None)
    if twice is not None:
        raise ConfigError(f"{twice.label}: two combinations of the grid are this cell: remove one")
    left_out = {cell for where in experiment.exclude for cell in _excluded(where, every)}
    found = [[cell for cell in group if cell not in left_out] for group in found]
    if not any(found):
        raise ConfigError("exclude leaves no cell of the grid: remove a line of it")
    return [group for group in found if group]


def _excluded(where: dict[str, Any], cells: Iterable[Cell]) -> list[Cell]:
    """Returns the cells that a line of `exclude` means.

    Raises:
      ConfigError: it names what no cell has, or no cell is so.
    """
    known = sorted({*facts(next(iter(cells)))})
    for name in where:
        if name not in known:
            raise ConfigError(f"exclude: {axes.unknown(name, known)}")
    wanted = {n: value if isinstance(value, list) else [value] for n, value in where.items()}
    out = [c for c in cells if all(facts(c)[name] in values for name, values in wanted.items())]
    if not out:
        raise ConfigError(
            f"exclude: no cell has {where}: remove the line, mend a value, or, if it is a base's, "
            "write exclude: [] to drop what that leaves out"
        )
    return out


def facts(cell: Cell) -> dict[str, Any]:
    """Returns a cell's settings by name, those of the draft's cache among them, and its method."""
    settings = {f.name: getattr(cell, f.name) for f in dataclasses.fields(cell)}
    cache = dataclasses.asdict(settings.pop("cache"))
    for name in ("models", "drafters"):  # lists, which values of an axis cannot be told from
        del settings[name]
    return settings | cache | {"model": cell.model, "method": cell.method}


def resolved(cell: Cell) -> dict[str, Any]:
    """Returns what `restored` makes the cell of again: plain values, as YAML and JSON have them."""
    return json.loads(json.dumps(dataclasses.asdict(cell)))


def restored(settings: dict[str, Any]) -> Cell:
    """Returns the cell of `resolved` settings."""
    lists = {name: tuple(settings[name]) for name in ("models", "drafters")}
    return Cell(**settings | lists | {"cache": CacheSettings(**settings["cache"])})


def plain_of(cell: Cell) -> Cell:
    """Returns plain decoding of the same prompts."""
    none = {"draft": "none", "models": (), "drafters": (), "profile": "", "cache": CacheSettings()}
    return dataclasses.replace(cell, **none, tree="", draw="", verifier="")


def columns(cell: Cell) -> dict[str, Any]:
    """Returns the columns that say what was measured."""
    return {
        "method": cell.method,
        "target": cell.target,
        "draft": cell.draft,
        "draft_model": cell.model,
        "policy": cell.cache.policy,
        "draw": cell.drawings,
        "verifier": cell.verifier or ("" if cell.draft == "none" else "greedy"),
        "temperature": cell.temperature or None,
        "top_k": cell.top_k or None,
        "top_p": cell.top_p or None,
        "seed": cell.seed if cell.do_sample else None,
        "kv_budget": cell.cache.kv_budget or None,
        "sinks": cell.cache.sinks or None,
        "recent": cell.cache.recent or None,
        "refresh_every": cell.cache.refresh_every or None,
        "kv_dtype": cell.cache.kv_dtype,
        "sink_positions": cell.cache.sink_positions,
        "tree": cell.tree,
        "gamma": cell.gamma,
        "nodes": cell.nodes,
        "dtype": cell.dtype,
        "offload": cell.offload,
        "batch": cell.batch,
        "context": cell.context,
        "prompts": cell.prompts,
        "prompt_path": cell.prompt_path,
        "candidates": cell.candidates,
        "agreement_tokens": cell.agreement_tokens,
        "phases": cell.phases,
        "drafters": " ".join(cell.drafters),
        "profile": cell.profile,
        "prompt_seed": cell.prompt_seed,
        "mesh": cell.mesh,
        "micro_batches": cell.micro_batches or None,
        "new_tokens": cell.new_tokens,
        "repeat": cell.repeats,
    }


def _group(experiment: Experiment) -> list[Cell]:
    plain = Cell(
        target=experiment.target,
        draft="none",
        models=(),
        drafters=(),
        profile="",
        cache=CacheSettings(),
        tree="",
        draw="",
        verifier="",
        dtype=experiment.dtype,
        offload=experiment.offload,
        mesh=experiment.mesh,
        micro_batches=experiment.micro_batches or 0,
        batch=experiment.batch,
        context=experiment.context,
        new_tokens=experiment.new_tokens,
        repeats=experiment.repeats,
        prompts=experiment.prompts,
        prompt_path=experiment.prompt_path,
        prompt_seed=experiment.prompt_seed,
        candidates=(experiment.candidates or CANDIDATES) if experiment.prompts in TEXTS else 1,
        agreement_tokens=experiment.agreement_tokens,
        phases=experiment.phases,
        **_sampling(experiment),
    )
    cells = [plain]
    for method in experiment.methods:
        for cell in _cells(plain, method):
            if cell in cells:
                raise ConfigError(f"methods name {cell.method!r} twice: remove one")
            if cell.method in [other.method for other in cells]:
                raise ConfigError(
                    f"two methods are called {cell.method!r} in tables and pictures: give their "
                    "models' folders different names, or each an experiment of its own"
                )
            cells.append(cell)
    return cells


def _sampling(experiment: Experiment) -> dict[str, Any]:
    """Returns the cells' settings of sampling, what was not given resolved."""
    sampled = experiment.do_sample
    return {
        "do_sample": sampled,
        "temperature": float((experiment.temperature or 1.0) if sampled else 0.0),
        "top_k": experiment.top_k or 0,
        "top_p": float((experiment.top_p or 1.0) if sampled else 0.0),
        "seed": experiment.seed or 0,
    }


def _cells(plain: Cell, method: Method) -> list[Cell]:
    """Returns a method's cells beside those of plain decoding."""
    verifiers = (method.verifier or [VERIFIER]) if plain.do_sample else [""]
    models = (method.model,) if method.model else tuple(method.models)
    tried = (parts(text)["path"] for text in method.drafters)
    return [
        dataclasses.replace(
            plain,
            draft=method.draft,
            models=models or tuple(dict.fromkeys(path for path in tried if path)),
            drafters=tuple(method.drafters),
            profile=method.profile,
            cache=cache,
            tree=spec,
            draw=method.draw,
            verifier=verifier,
        )
        for spec, cache, verifier in itertools.product(method.trees, method.caches(), verifiers)
    ]


def make_drafter(cell: Cell, load: Callable[[str], Any] = lambda directory: None) -> Any:
    """Returns who drafts in a cell, None in plain decoding; of "auto" how to choose.

    Args:
      cell: its settings.
      load: gives the model of a directory. Without it, the drafter can only be asked for the
        shape and the drawings of its trees.
    """
    draw = cell.draw or None
    if cell.draft == "none":
        return None
    if cell.draft in cache_settings.POLICY:
        model = load(cell.model) if cell.models else None
        return cache_settings.drafter(cell.draft, cell.cache, model, draw)
    if cell.draft == "look_up":
        return magicjax.LookUp()
    if cell.draft == "auto":
        tried = [spec.make_drafter(text, load) for text in cell.drafters]
        tree = parse_trees(cell.tree)[0]
        return magicjax.Auto(tried or None, cell.profile or None, tree=tree)
    members = [
        magicjax.LookUp() if member == LOOK_UP else magicjax.SmallModel(load(member), draw=draw)
        for member in cell.models
    ]
    trees = parse_trees(cell.tree)
    return magicjax.Ensemble(tuple(members), trees if len(trees) > 1 else None)


def options(cell: Cell, load: Callable[[str], Any]) -> dict[str, Any]:
    """Returns the options of `magicjax.generate` that a cell describes; `load` as before."""
    trees = parse_trees(cell.tree) if cell.tree else ()
    return {
        "drafter": make_drafter(cell, load),
        # Several are the ensemble's own, and "auto" has it.
        "tree": trees[0] if len(trees) == 1 and cell.draft != "auto" else None,
        "max_new_tokens": cell.new_tokens,
        "verifier": cell.verifier or None,
        "eos_token_id": [],  # every row runs to the end, so all methods emit as much
        "mesh": cell.devices,
        "micro_batches": cell.micro_batches or None,
        **cell.sampling,
    }


def key(cell: Cell, surroundings: dict[str, str] | None = None) -> str:
    """Returns 16 hexadecimal digits that name the cell's result.

    `surroundings` is what else a result depends on (device, versions, weights), where results of
    others are kept under other names.
    """
    known = json.dumps([resolved(cell), surroundings], sort_keys=True)
    return store.digest(known)


def fingerprint(directory: str) -> str:
    """Returns a hash of a model directory's files, or "" of a preset, whose weights are random."""
    root = pathlib.Path(directory)
    if not root.is_dir():
        return ""
    digest = hashlib.sha256()
    for path in sorted(root.iterdir()):
        if path.suffix in (".json", ".safetensors"):
            digest.update(path.name.encode() + b"\0")
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
