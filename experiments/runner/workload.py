"""Runs cells; models, texts and prompts are made once for all cells of a process."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import magicjax
from experiments import prompts
from experiments.prompts import RANDOM, TEXTS, Prompt, metrics
from experiments.runner import teacher
from experiments.runner.provenance import code
from experiments.runner.steps import Steps
from experiments.schema import grid, store
from experiments.schema.grid import Cell, fingerprint, plain_of
from magicjax import generation
from magicjax.benchmarks import profile_phases
from magicjax.decoding import footprint, memory, program_cache
from magicjax.decoding.paired_timing import PrefilledPrompts
from magicjax.decoding.preparation import prepare
from magicjax.decoding.request import Request, RequestOptions
from magicjax.decoding.rounds import Show, exhausted
from magicjax.decoding.stats import summed
from magicjax.decoding.text import NewTokens
from magicjax.files import locked, write_atomically
from magicjax.loading import abstract_model
from magicjax.parallel import offloading
from magicjax.prediction import choosing
from magicjax.sources import Source
from sharding import global_arrays

SHOWN_CHARACTERS = 120  # of a prompt
MEMORY_SHARE = 0.7  # of a device's memory, for the weights of a model that reads a text


class Bench:
    """Models, texts and prompts, each made when a cell first needs it.

    Attributes:
      chosen: a folder for prompts that were chosen among candidates, which processes share; None:
        they are not kept.
      steps: is called as each step begins.
      streams: whether the next cell prints the first text as it is decoded, before timed runs.
      choosing_s: seconds spent compiling plain decoding to choose prompts.
    """

    def __init__(
        self,
        chosen: pathlib.Path | None = None,
        steps: Steps | None = None,
        streams: bool = False,
    ):
        self.chosen, self.choosing_s = chosen, 0.0
        self.steps, self.streams = steps or Steps(), streams
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
        stages: int | None = None,
        **options: Any,
    ) -> Any:
        """Returns the loaded model; the arguments are those of `magicjax.load`."""
        options = {"dtype": dtype, "mesh": mesh, "stages": stages, **options}
        key = ("model", directory, *sorted(options.items()))

        def load() -> Any:
            before = self.steps(f"loading {directory}")
            model = magicjax.load(self._source(directory), **options)
            if before:
                self.steps(before)
            return model

        return self._once(key, load)

    def _source(self, directory: str) -> Source:
        return self._once(("source", directory), lambda: Source(directory))

    def draft(self, directory: str, cell: Cell, **options: Any) -> Any:
        """Returns a small model of a cell; every stage holds all of its layers."""
        stages = 1 if cell.devices else None
        options |= {"activations": cell.activations}
        return self.model(directory, cell.dtype, cell.devices, stages, **options)

    def target_of(self, cell: Cell) -> Any:
        """Returns the cell's target."""
        storage = cell.storage | {"activations": cell.activations}
        return self.model(cell.target, cell.dtype, cell.devices, **storage)

    def read_by(self, directory: str, cell: Cell) -> Any:
        """Returns a model that reads a text in one pass: the cell's target, or a small model.

        If the cell's models are divided over stages or processes, it is a copy on one device of
        this process, or None if it does not fit there.
        """
        devices = cell.devices
        if devices and (devices.shape["stage"] > 1 or jax.process_count() > 1):
            stored_as = cell.storage if directory == cell.target else {}
            weight_format = stored_as.get("weights")
            packed = cell.activations == "int8"
            model = abstract_model(
                self._source(directory), cell.dtype, weights=weight_format, packed=packed
            )
            needed = footprint.of_models(model, None, rows=1, capacity=0).weights
            size = offloading.device_memory() or offloading.free_host_memory() or math.inf
            fits = needed < MEMORY_SHARE * size
            options = {"weights": weight_format, "activations": cell.activations}
            options |= {"kv_dtype": stored_as.get("kv_dtype")}
            return self.model(directory, cell.dtype, **options) if fits else None
        return self.target_of(cell) if directory == cell.target else self.draft(directory, cell)

    def prompts(self, cell: Cell) -> np.ndarray:
        """Returns int32 [requests, context], the same for all cells of a group."""
        return np.stack([prompt.tokens for prompt in self._chosen(cell)])

    def batches(self, cell: Cell) -> list[np.ndarray]:
        """Returns the prompts of a cell, [batch, context] each."""
        return np.split(self.prompts(cell), cell.num_requests // cell.batch)

    def tasks(self, cell: Cell) -> list[Prompt]:
        """Returns each row's prompt with its right answer, [] for prompts without a task."""
        return [] if cell.prompts in (*TEXTS, RANDOM) else self._chosen(cell)

    def templated(self, cell: Cell) -> bool:
        """Returns whether the prompts are conversations by the target's chat template."""
        tokenizer = self.target_of(cell).tokenizer
        return bool(self.tasks(cell)) and prompts.uses_template(tokenizer, cell.chat_template)

    def answer(self, cell: Cell, tokens: Sequence[int]) -> str:
        """Returns the text of a row's new tokens before its end; rows generate more tokens."""
        target = self.target_of(cell)
        text = itertools.takewhile(lambda token: token not in target.eos_token_ids, tokens)
        return target.tokenizer.decode(list(text), skip_special_tokens=True)

    def end_of_prompt(self, cell: Cell) -> str:
        """Returns the last words of a cell's first prompt."""
        tokenizer = self.target_of(cell).tokenizer
        text = tokenizer.decode(self.prompts(cell)[0], skip_special_tokens=True)
        return text[-SHOWN_CHARACTERS:].strip()

    def _chosen(self, cell: Cell) -> list[Prompt]:
        """Returns the prompts of a cell."""
        candidates = self._candidates(cell)
        if cell.candidates == 1:
            return candidates
        target = cell.target, cell.dtype, *cell.storage.values(), cell.activations
        key = ("chosen", *target, *_prompt_settings(cell), cell.params)
        return [candidates[i] for i in self._once(key, lambda: self._choose(cell))]

    def _choose(self, cell: Cell) -> list[int]:
        """Returns the indices of a cell's prompts, read from the folder if it has them.

        All processes choose the same prompts; rank 0 reads and writes the folder.
        """
        if self.chosen is None:
            return self._least_repetitive(cell)
        plain = dataclasses.asdict(dataclasses.replace(plain_of(cell), repeats=0))
        text = prompts.fingerprint(cell.prompts, cell.prompt_path)
        source = [plain, fingerprint(cell.target), text, sys.version_info[:2], code()]
        name = store.digest(json.dumps(source))
        path = self.chosen / f"{name}.json"
        first = jax.process_index() == 0
        lock = locked(self.chosen / f"{name}.lock") if first else contextlib.nullcontext()
        with lock:  # one of several concurrent cells chooses
            indices = json.loads(path.read_text()) if first and path.exists() else None
            indices = global_arrays.broadcast_from_rank0(indices)
            if indices is None:
                indices = global_arrays.broadcast_from_rank0(self._least_repetitive(cell))
                if first:
                    write_atomically(path, json.dumps(indices) + "\n")
        return indices

    def _least_repetitive(self, cell: Cell) -> list[int]:
        """Returns the indices of the prompts whose plain continuation repeats itself least."""
        end_tokens = () if cell.prompts in TEXTS else self.target_of(cell).eos_token_ids

        def continue_plainly(rows: np.ndarray) -> np.ndarray:
            batches = np.split(rows, len(rows) // cell.batch)
            outputs = [self.run(plain_of(cell), batch) for batch in batches]
            self.choosing_s += sum(output.stats.compile_s for output in outputs)
            return np.concatenate([output.tokens for output in outputs])

        rows = np.stack([prompt.tokens for prompt in self._candidates(cell)])
        self.steps(f"decoding {len(rows)} candidates for prompts, to choose among them")
        count = cell.num_requests
        return prompts.least_repetitive(rows, count, continue_plainly, end_tokens).tolist()

    def _candidates(self, cell: Cell) -> list[Prompt]:
        """Returns the prompts that a cell's are chosen from."""
        model = self.target_of(cell)
        count = cell.num_requests * cell.candidates

        def make() -> list[Prompt]:
            if cell.prompts == RANDOM:
                return prompts.random(
                    model.config.vocab_size, count, cell.context, cell.prompt_seed
                )
            return prompts.make(
                cell.prompts,
                model.tokenizer,
                cell.prompt_path,
                count,
                cell.context,
                cell.prompt_seed,
                chat_template=cell.chat_template,
            )

        return self._once(("candidates", cell.target, *_prompt_settings(cell)), make)

    def run(self, cell: Cell, rows: np.ndarray | None = None, show: Show | None = None) -> Any:
        """Returns the output of the cell's call of `generate`, on its group's prompts or `rows`.

        `show` is that of `rounds.exhausted`; the call is then one of `stream`.
        """
        if show:
            return exhausted(generation.run_stream(*self.call(cell, rows)), show)
        return generation.run(*self.call(cell, rows))

    def runs(self, cells: Sequence[Cell], rows: np.ndarray) -> "Runs":
        """Returns the runs of cells of the same target, on one batch of their prompts."""
        return Runs(self, cells, rows)

    def call(
        self, cell: Cell, rows: np.ndarray | None = None
    ) -> tuple[Any, list[np.ndarray], magicjax.SamplingParams, RequestOptions]:
        """Returns (target, prompts, parameters, options) of a call of `generate`; see `run`."""
        target = self.target_of(cell)
        text = list(self.prompts(cell) if rows is None else rows)
        options = grid.options(cell, functools.partial(self.draft, cell=cell))
        if cell.draft == "auto":  # one choice for all runs of the cell

            def choose() -> Any:
                candidates = choosing.validated_candidates(target, text, cell.params, options)
                return choosing.choose(candidates)[0]

            options = dataclasses.replace(options, drafter=self._once(("choice", cell), choose))
        return target, text, cell.params, options

    def agreement(self, cell: Cell) -> float | None:
        """Returns how often target and draft predict the same token on the prompts' text.

        None if it is switched off, if no single model drafts, if the draft's weights are quantized
        or it skips layers, if the entries that it sees depend on the text (full and streaming
        caches are fixed), or if the target is divided over stages or processes and does not fit on
        one device.
        """
        view = _view(cell)
        if not cell.agreement_tokens or view is None or self.read_by(cell.target, cell) is None:
            return None
        text = self.prompts(cell)[: max(1, cell.agreement_tokens // cell.context)]
        expected = self._greedy(cell, cell.target, text)
        drafted = self._greedy(cell, cell.model or cell.target, text, **view)
        return metrics.agreement(expected, drafted)

    def _greedy(self, cell: Cell, directory: str, text: np.ndarray, **view: int) -> np.ndarray:
        """Returns the best tokens of a model on a group's text, shared by the group's cells."""
        model = self.read_by(directory, cell)
        key = (
            directory,
            cell.dtype,
            *cell.storage.values(),
            *_prompt_settings(cell),
            text.shape,
        )
        return self._once(
            ("greedy", *key, *view.items()),
            lambda: np.asarray(teacher.greedy_tokens(model, text, **view)),
        )


class Runs:
    """Runs of cells that share one prefill, if they are timed and their caches have the same size.

    The cache of a finished run is cut back to the prompts for the next run.

    Attributes:
      compile_s: seconds spent compiling the shared prefill.
    """

    def __init__(self, bench: Bench, cells: Sequence[Cell], rows: np.ndarray):
        self.bench, self.rows = bench, rows
        before = program_cache.totals()[1]
        self._requests = self._of_equal_capacity(cells)
        self._prefilled: PrefilledPrompts | None = None
        if self._requests:
            requests = list(self._requests.values())
            drafters = [request.drafter for request in requests if request.drafter is not None]
            # The last request: plain decoding, the first, keeps no attention statistics.
            self._prefilled = PrefilledPrompts.create(requests[-1], drafters)
        self.compile_s = program_cache.totals()[1] - before

    def _of_equal_capacity(self, cells: Sequence[Cell]) -> dict[Cell, Request]:
        """Returns the cells' requests; {} if each run has its own prefill.

        Raises:
          OutOfMemoryError: a cell does not fit the free memory.
        """
        if any(cell.draft == "auto" or not cell.repeats for cell in cells):
            return {}
        requests = {}
        for cell in cells:
            requests[cell] = prepare(*self.bench.call(cell, self.rows))
            memory.check(requests[cell])
        capacities = {request.settings.capacity for request in requests.values()}
        return requests if len(capacities) == 1 else {}

    def run(self, cell: Cell, streams: bool = False) -> Any:
        """Returns the cell's output.

        With `streams` it prints the first row's text as it is decoded, and the times are others.
        """
        texts: list[str] = []

        def show(rows: Sequence[NewTokens]) -> None:
            texts.append(rows[0].text or "")
            if len(texts) == 2:  # the loop compiles after the first piece, that of the prefill
                self.bench.steps.text(texts[0])
            if len(texts) > 1:
                self.bench.steps.text(texts[-1])

        shown = show if streams else None
        if self._prefilled is None:
            return self.bench.run(cell, self.rows, shown)
        output, self._prefilled = self._prefilled.generate(self._requests[cell], shown)
        return output

    def trace(self, cell: Cell, folder: pathlib.Path | None) -> profile_phases.Phases:
        """Returns the phases of one more run, the last one; see `profile_phases.trace`."""
        if self._prefilled is None:
            return profile_phases.trace(*self.bench.call(cell, self.rows), folder=folder)
        return profile_phases.trace_request(self._requests[cell], self._prefilled, folder)


def merge(outputs: Sequence[Any]) -> Any:
    """Returns one output of consecutive runs of a method on batches of the same size.

    Counts and times are sums, and every round has the same weight in rates. The depth of the tree
    is fixed.
    """
    first, all_stats = outputs[0], [output.stats for output in outputs]
    if len(outputs) == 1:
        return first
    names = ("rounds", "compilations", "prefill_s", "decode_s", "compile_s")
    totals = {name: sum(getattr(stats, name) for stats in all_stats) for name in names}
    by_request = tuple(row for stats in all_stats for row in stats.by_request)
    stats = dataclasses.replace(first.stats, **summed(by_request) | totals)
    results = [result for output in outputs for result in output.results]
    tokens = np.concatenate([output.tokens for output in outputs])
    return dataclasses.replace(first, results=results, tokens=tokens, stats=stats)


def _view(cell: Cell) -> dict[str, int] | None:
    """Returns the part of a text that a cell's draft sees, as arguments of `greedy_tokens`.

    None if it depends on the text, if entries or positions are not those of the text (quantized
    entries, sinks that move), if the draft's weights are quantized, or if it skips layers.
    """
    if cell.target_kv_dtype:
        return None
    cheaper = any(cell.options.get(name) for name in ("weights", "layers", "draft_vocab"))
    if cell.draft not in ("self", "full", "small") or cheaper:
        return None
    drafter, _ = cell.speculation
    sparse = getattr(drafter, "sparse", None)
    if sparse is None:
        return {}
    if sparse.kv_dtype or getattr(drafter, "sink_positions", "text") == "in_cache":
        return None
    if isinstance(sparse.policy, magicjax.StreamingLLM):
        sinks = sparse.policy.sinks
        return {"sinks": sinks, "window": sparse.budget - sinks}
    return None


def _prompt_settings(cell: Cell) -> tuple:
    """Returns the settings that the prompts depend on, apart from the target."""
    source = cell.prompts, cell.prompt_path, cell.prompt_seed, cell.chat_template
    return *source, cell.batch, cell.num_requests, cell.context, cell.candidates
