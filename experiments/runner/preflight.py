"""Finds cells that cannot run before the grid starts, from config.json alone, without weights.

A model without weights suffices for the checks that `magicjax.generate` makes of every call.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from experiments import prompts
from experiments.schema import grid
from experiments.schema.fields import ConfigError
from magicjax.decoding import memory
from magicjax.decoding.preparation import PREFILL_TOKENS, validated_request
from magicjax.decoding.request import Request
from magicjax.engine import memory_check
from magicjax.engine.config import EngineConfig
from magicjax.loading import abstract_model
from magicjax.model import Model
from magicjax.prediction import choosing
from magicjax.sources import Source
from sharding import parse_mesh

ROWS = PREFILL_TOKENS // 16  # with more rows of a device, a prefill step is as short

Groups = Sequence[Sequence[grid.Cell]]  # none is empty

_source = functools.cache(Source)


@functools.cache
def unloaded(source: str, dtype: str = "float32", **options: Any) -> Model:
    """Returns the model of a source without weights, given the arguments of `abstract_model`."""
    return abstract_model(_source(source), dtype, **options)


def model_problems(groups: Groups, record: bool = False) -> dict[grid.Cell, str]:
    """Returns the cells with a model that cannot be loaded, with the reasons, if `record`.

    A model is looked for once for each drafter that uses it: it may be a download.

    Raises:
      ConfigError: each problem once, without `record` or if no cell can run.
    """
    uses = {
        cell: [
            ("target", cell.target),
            *((draft.name, draft.path) for draft in cell.drafts if draft.path),
        ]
        for group in groups
        for cell in group
    }
    sources = sorted({source for cell_sources in uses.values() for source in cell_sources})
    problems = {source: _problem(source[0], unloaded, source[1]) for source in sources}
    messages = {
        cell: "\n".join(filter(None, map(problems.get, cell_sources)))
        for cell, cell_sources in uses.items()
    }
    return _recorded({cell: text for cell, text in messages.items() if text}, groups, record)


def cell_problems(groups: Groups, record: bool = False) -> dict[grid.Cell, str]:
    """Returns the cells that cannot run although their models can, with the reasons, if `record`.

    Raises:
      ConfigError: each problem once, without `record` or if no cell can run: texts longer than a
        model's positions, a budget too small for the tree, a different vocabulary, prompts that
        cannot be made.
    """
    failing = {
        cell: text for group in groups if (text := _text_problem(group[0])) for cell in group
    }
    if not failing or record:
        left = [group for group in groups if group[0] not in failing]
        failing |= {cell: text for group in left for cell, text in _group_problems(group).items()}
    return _recorded(failing, groups, record)


def _recorded(failing: dict[grid.Cell, str], groups: Groups, record: bool) -> dict[grid.Cell, str]:
    if failing and not (record and len(failing) < sum(map(len, groups))):
        lines = "\n".join(failing.values()).splitlines()
        raise ConfigError("\n".join(dict.fromkeys(lines)))
    return failing


def _text_problem(cell: grid.Cell) -> str:
    """Returns what its prompts lack, a text or a tokenizer, or ""."""
    missing = _problem("prompts", prompts.check, cell.prompts, cell.prompt_path)
    if not missing and cell.prompts != prompts.RANDOM:
        missing = _problem("target", _check_tokenizer, cell.target)
    return missing


def _problem(where: str, check: Callable, *arguments: Any) -> str:
    """Returns the message of the error that a check raises, "" if it passes."""
    try:
        check(*arguments)
    except (ValueError, OSError) as error:
        return f"{where}: {error}".replace("max_tokens", "new_tokens")  # as in the file
    return ""


def _check_tokenizer(target: str) -> None:
    if _source(target).directory is None:
        raise ValueError(
            f"{target!r} is a preset, which has no tokenizer, and prompts are made from text: set "
            "a directory, or prompts=random"
        )


def _make_prompts(cell: grid.Cell) -> None:
    try:
        prompts.make(
            cell.prompts,
            _source(cell.target).tokenizer,
            cell.prompt_path,
            cell.num_requests * cell.candidates,
            cell.context,
            cell.prompt_seed,
            chat_template=cell.chat_template,
        )
    except ValueError as error:  # its function counts prompts, a config rows
        fewer = "a smaller batch, requests or candidates"
        raise ValueError(str(error).replace("fewer prompts", fewer)) from error


def _group_problems(group: Sequence[grid.Cell]) -> dict[grid.Cell, str]:
    """Returns the cells that cannot run, with the reasons; if plain decoding cannot, all cells."""
    first = group[0]
    where = f"context {first.context}"
    problem = _problem(where, validated_cell, grid.plain_of(first))
    if not problem and first.prompts != prompts.RANDOM:
        problem = _problem(where, _make_prompts, first)
    if problem:
        return dict.fromkeys(group, problem)
    problems = {cell: _problem(cell.method, validated_cell, cell) for cell in group}
    return {cell: problem for cell, problem in problems.items() if problem}


def validated_cell(cell: grid.Cell, rows: int | None = None) -> Request | None:
    """Returns the request of the cell's call of `generate`, without text; None for "auto".

    With `rows` it has as many rows, by default those of the cell's batch, or an engine's slots.

    Raises:
      ValueError: the call would raise it too.
    """
    load = functools.partial(unloaded, dtype=cell.dtype, packed=cell.packed)
    text = [np.zeros(cell.context, np.int32)] * (rows or cell.batch)
    options = grid.options(cell, load)
    target = load(cell.target, **cell.storage)
    if cell.draft == "auto":
        choosing.validated_candidates(target, text, cell.params, options)
        return None
    return validated_request(target, text, cell.params, options)


def too_large(cells: Iterable[grid.Cell], available: float | None = None) -> dict[grid.Cell, str]:
    """Returns the cells whose weights and KV caches do not fit the memory, with the reasons.

    No prompts are made, and no more rows than change the size of a row's cache.

    Args:
      cells: invalid ones are omitted: `cell_problems` reports them.
      available: bytes of each device; None: what is free on this process's devices.
    """
    problems = {}
    for cell in cells:
        rows = parse_mesh(cell.mesh).data if cell.mesh else 1
        rows *= ROWS * (cell.micro_batches or 1)
        try:
            # "auto" skips drafters that do not fit.
            checked = grid.plain_of(cell) if cell.draft == "auto" else cell
            request = validated_cell(checked, min(rows, cell.batch))
            assert request is not None
            if cell.slots:
                plain = validated_cell(grid.plain_of(cell), min(rows, cell.batch))
                assert plain is not None
                _check_engines(cell, request, plain, available)
            else:
                every_row = dataclasses.replace(request, prompts=request.prompts[:1] * cell.batch)
                memory.check(every_row, available)
        except memory.OutOfMemoryError as error:
            problems[cell] = str(error)
        except (ValueError, OSError):
            continue
    return problems


def _check_engines(
    cell: grid.Cell, request: Request, plain: Request, available: float | None
) -> None:
    """Raises OutOfMemoryError if the cell's engine does not fit beside that of plain decoding."""
    row, plain_row = _engine_row(request), _engine_row(plain)
    if available is None:
        available = memory.free_memory(row.target, row.settings.mesh)
    if available is None:
        return
    config = EngineConfig(slots=cell.slots, capacity=cell.context + cell.new_tokens, prefix_bytes=0)
    if not cell.is_plain:
        rows = cell.slots // row.settings.groups + config.prefill_rows
        every_row = dataclasses.replace(plain_row, prompts=plain_row.prompts * rows)
        available -= memory.count(every_row).target_kv
    try:
        memory_check.check(row, config, available)
    except memory.OutOfMemoryError as error:
        context = "" if cell.is_plain else "beside the engine of plain decoding, "
        raise memory.OutOfMemoryError(f"{context}{error}") from error


def _engine_row(request: Request) -> Request:
    """Returns the request of one row, which all groups of devices have."""
    settings = dataclasses.replace(request.settings, replicated_rows=True)
    return dataclasses.replace(request, prompts=request.prompts[:1], settings=settings)
