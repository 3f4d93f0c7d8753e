"""Runs cells: models, text and prompts, made once for all cells of a process."""

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

import magicjax
from experiments import prompts
from experiments.prompts import RANDOM, TEXTS, Prompt, metrics
from experiments.runner import teacher
from experiments.runner.provenance import code
from experiments.schema import store
from experiments.schema.grid import Cell, fingerprint, options, plain_of
from magicjax import cost_model
from magicjax.generation import config_of
from magicjax.parallel import offloading
from sharding import processes

ROOM = 0.7  # of a device's memory, for a model that reads a text


class Bench:
    """Models, text and prompts, each made once, when a cell first asks for it.

    Attributes:
      chosen: a folder for the prompts that were chosen among candidates, which other processes need
        not choose again; None: they are not kept.
      choosing_s: seconds spent compiling plain decoding to choose prompts.
    """

    def __init__(self, chosen: pathlib.Path | None = None):
        self.chosen, self.choosing_s = chosen, 0.0
        self._made: dict[tuple, Any] = {}

    def _once(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def model(
        self,
        directory: str,
        dtype: str,
        mesh: Mesh | None = None,
        offload: bool | Literal["int8"] = False,
        stages: int | None = None,
    ) -> Any:
        """Returns the loaded model."""
        return self._once(
            ("model", directory, dtype, mesh, offload, stages),
            lambda: magicjax.load(
                directory, dtype=dtype, mesh=mesh, offload=offload, stages=stages
            ),
        )

    def draft(self, directory: str, cell: Cell) -> Any:
        """Returns a small model of a cell, of which every stage has all layers."""
        return self.model(directory, cell.dtype, cell.devices, stages=1 if cell.devices else None)

    def target_of(self, cell: Cell) -> Any:
        """Returns the cell's target."""
        return self.model(cell.target, cell.dtype, cell.devices, cell.offloaded)

    def read_by(self, directory: str, cell: Cell) -> Any:
        """Returns a model that reads a text in one pass: the cell's target, or a small one.

        Where the cell's is divided over stages or processes, it is one on a device of this
        process's own; None if it does not fit there.
        """
        devices = cell.devices
        if devices and (devices.shape["stage"] > 1 or jax.process_count() > 1):
            sizes = cost_model.sizes_of(config_of(directory), cell.dtype)
            weights = sizes.weight_bytes + sizes.itemsize * sizes.tables
            room = offloading.device_memory() or offloading.free_host_memory() or math.inf
            return self.model(directory, cell.dtype) if weights < ROOM * room else None
        return self.target_of(cell) if directory == cell.target else self.draft(directory, cell)

    def prompts(self, cell: Cell) -> np.ndarray:
        """Returns int32 [batch, context], the same for all cells of a group."""
        key = (
            *(cell.target, cell.dtype, cell.offload, *_asked(cell)),
            *(cell.new_tokens, *cell.sampling.values()),
        )
        return self._once(("prompts", *key), lambda: self._choose(cell))

    def tasks(self, cell: Cell) -> list[Prompt]:
        """Returns each row's prompt with its right answer; none of text that asks nothing."""
        if cell.prompts in (*TEXTS, RANDOM):
            return []
        return self._candidates(cell)

    def _choose(self, cell: Cell) -> np.ndarray:
        """Returns the prompts, from the folder where they were chosen before."""
        if cell.candidates == 1:
            return np.stack([prompt.tokens for prompt in self._candidates(cell)])
        plain = dataclasses.asdict(dataclasses.replace(plain_of(cell), repeats=0))
        text = prompts.fingerprint(cell.prompts, cell.prompt_path)
        source = [plain, fingerprint(cell.target), text, sys.version_info[:2], code()]
        name = store.digest(json.dumps(source))
        if self.chosen is None:
            return self._least_repetitive(cell)
        path = self.chosen / f"{name}.json"
        if jax.process_count() > 1:
            return self._choose_together(cell, path)
        with store.locked(self.chosen / f"{name}.lock"):  # of cells at once, one chooses
            if not path.exists():
                store.write_text(path, json.dumps(self._least_repetitive(cell).tolist()) + "\n")
        return np.array(json.loads(path.read_text()), np.int32)

    def _choose_together(self, cell: Cell, path: pathlib.Path) -> np.ndarray:
        """Returns the prompts that all processes choose, or rank 0 knows of; it alone writes."""
        first = jax.process_index() == 0
        known = json.loads(path.read_text()) if first and path.exists() else None
        known = processes.of_first(known)
        if known is None:
            known = processes.of_first(self._least_repetitive(cell).tolist())
            if first:
                store.write_text(path, json.dumps(known) + "\n")
        return np.array(known, np.int32)

    def _least_repetitive(self, cell: Cell) -> np.ndarray:
        """Returns the prompts whose plain continuation repeats itself least."""
        target = self.target_of(cell)

        def continue_plainly(rows: np.ndarray) -> np.ndarray:
            out = magicjax.generate(
                target,
                list(rows),
                max_new_tokens=cell.new_tokens,
                eos_token_id=[],
                mesh=cell.devices,
                **cell.sampling,
            )
            self.choosing_s += out.stats.compile_s
            return out.tokens

        candidates = np.stack([prompt.tokens for prompt in self._candidates(cell)])
        return prompts.least_repetitive(candidates, cell.batch, continue_plainly)

    def _candidates(self, cell: Cell) -> list[Prompt]:
        """Returns the prompts of which a cell's are chosen."""
        model = self.target_of(cell)
        many = cell.batch * cell.candidates, cell.context, cell.prompt_seed

        def make() -> list[Prompt]:
            if cell.prompts == RANDOM:
                return prompts.random(model.config.vocab_size, *many)
            return prompts.make(cell.prompts, model.tokenizer, cell.prompt_path, *many)

        return self._once(("candidates", cell.target, *_asked(cell)), make)

    def run(self, cell: Cell, rows: np.ndarray | None = None) -> Any:
        """Returns the output of one call of `generate` as the cell describes it.

        `rows` are prompts instead of those that the cell's group shares.
        """
        target, text, given = self.call(cell, rows)
        return magicjax.generate(target, text, **given)

    def call(
        self, cell: Cell, rows: np.ndarray | None = None
    ) -> tuple[Any, list[np.ndarray], dict[str, Any]]:
        """Returns (target, prompts, options) of the cell's call of `generate`; `rows` as before."""
        target = self.target_of(cell)
        text = list(self.prompts(cell) if rows is None else rows)
        given = options(cell, lambda directory: self.draft(directory, cell))
        if cell.draft == "auto":
            given["drafter"] = self.choice(cell, target, text, given)
        return target, text, given

    def choice(
        self, cell: Cell, target: Any, text: list[np.ndarray], given: dict[str, Any]
    ) -> magicjax.Choice:
        """Returns what "auto" chose in a cell, once for all its runs."""
        return self._once(("choice", cell), lambda: magicjax.choose_drafter(target, text, **given))

    def agreement(self, cell: Cell) -> float | None:
        """Returns how often target and draft agree on the prompts' text.

        None if not asked for, if there is no single model that drafts, if what it sees of the text
        is not known before the text (that of full and streaming caches is), or if the target lies
        on several stages or processes and does not fit one device.
        """
        view = _view(cell)
        if not cell.agreement_tokens or view is None:
            return None
        rows = max(1, cell.agreement_tokens // cell.context)
        text = self.prompts(cell)[:rows]
        if self.read_by(cell.target, cell) is None:
            return None
        wanted = self._greedy(cell, "", text)
        drafted = self._greedy(cell, cell.model, text, **view)
        return metrics.agreement(wanted, drafted)

    def _greedy(self, cell: Cell, small: str, text: np.ndarray, **view: int) -> np.ndarray:
        """Returns the best tokens of a model on a group's text; cells of the group share them.

        `small` is the model's directory; "": the target.
        """
        model = self.read_by(small or cell.target, cell)
        key = (small or cell.target, cell.dtype, cell.offload, *_asked(cell), text.shape)
        return self._once(
            ("greedy", *key, *view.items()),
            lambda: np.asarray(teacher.greedy_tokens(model, text, **view)),
        )


def _view(cell: Cell) -> dict[str, int] | None:
    """Returns what a cell's draft sees of a text, as `teacher.greedy_tokens` asks; None: unknown.

    Also unknown where entries or positions are not those of the text: quantized, or sinks that
    move.
    """
    cache = cell.cache
    if cell.draft not in ("self", "small") or cache.kv_dtype or cache.sink_positions == "in_cache":
        return None
    if cache.policy == "streaming":
        return {"sinks": cache.sinks, "window": cache.kv_budget - cache.sinks}
    return {} if cache.policy in ("", "full") else None


def _asked(cell: Cell) -> tuple:
    """Returns the settings that say which prompts a cell asks for."""
    where = cell.prompts, cell.prompt_path, cell.prompt_seed
    return *where, cell.batch, cell.context, cell.candidates
