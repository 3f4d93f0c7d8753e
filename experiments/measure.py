"""Measures a group of cells in turns: plain, A, B, C, plain, A, B, C, ...

The first turn compiles and warms up and is not timed; a grid without repeats has no other, and
learns what does not depend on time. A cell that fails is recorded with its error, and the others go
on: one bad setting must not cost a night's grid.
"""

import contextlib
import dataclasses
import os
import statistics
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import magicjax
from experiments import exactness, metrics, prompts, synthetic, teacher
from experiments.grid import Cell, options
from magicjax import costs, placing
from magicjax.plan_command import written_tree
from pallas_kernels import bandwidth
from sharding import factored

PLAIN_FAILED = "plain decoding failed: "  # opens the error of a cell that lacks its comparison


class Bench:
    """Models, text and prompts, each made once, when a cell first asks for it."""

    def __init__(self):
        self._made: dict[tuple, Any] = {}

    def _once(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def model(self, directory: str, dtype: str, mesh: Mesh | None = None) -> Any:
        """Returns the loaded model."""
        return self._once(
            ("model", directory, dtype, mesh),
            lambda: magicjax.load(directory, dtype=dtype, mesh=mesh),
        )

    def prompts(self, cell: Cell) -> np.ndarray:
        """Returns int32 [batch, context], the same for all cells of a group."""
        return self._choice(cell)[0]

    def answers(self, cell: Cell) -> list[tuple[str, ...]]:
        """Returns the right answer to each prompt; none of held-out text, which asks nothing."""
        if cell.prompts == prompts.HELD_OUT:
            return []
        return [prompt.answer for prompt in self._candidates(cell)]

    def compile_s(self, cell: Cell, runs: list) -> float:
        """Returns the seconds spent compiling for a cell, which may have been for its prompts."""
        before = self._choice(cell)[1] if cell.draft == "none" else 0.0
        return before + sum(run.stats.compile_s for run in runs)

    def _choice(self, cell: Cell) -> tuple[np.ndarray, float]:
        """Returns (the prompts, seconds spent compiling plain decoding to choose them)."""
        target = self.model(cell.target, cell.dtype, cell.devices)
        seconds = []

        def continue_plainly(rows: np.ndarray) -> np.ndarray:
            out = magicjax.generate(
                target,
                list(rows),
                max_new_tokens=cell.new_tokens,
                eos_token_id=[],
                mesh=cell.devices,
                **cell.sampling,
            )
            seconds.append(out.stats.compile_s)
            return out.tokens

        def choose() -> tuple[np.ndarray, float]:
            candidates = np.stack([prompt.tokens for prompt in self._candidates(cell)])
            chosen = prompts.least_repetitive(candidates, cell.batch, continue_plainly)
            return chosen, sum(seconds)

        key = (cell.target, cell.dtype, *_asked(cell), cell.new_tokens)
        return self._once(("prompts", *key, *cell.sampling.values()), choose)

    def _candidates(self, cell: Cell) -> list[synthetic.Prompt]:
        """Returns the prompts of which a cell's are chosen."""
        tokenizer = self.model(cell.target, cell.dtype, cell.devices).tokenizer
        stream = self._once(("stream", cell.target), lambda: prompts.held_out_stream(tokenizer))
        count = cell.batch * cell.candidates
        return self._once(
            ("candidates", cell.target, *_asked(cell)),
            lambda: prompts.make(cell.prompts, tokenizer, stream, count, cell.context),
        )

    def run(self, cell: Cell, rows: np.ndarray | None = None) -> Any:
        """Returns the output of one call of `generate` as the cell describes it.

        `rows` are prompts instead of those that the cell's group shares.
        """
        target = self.model(cell.target, cell.dtype, cell.devices)
        text = list(self.prompts(cell) if rows is None else rows)
        given = options(cell, lambda directory: self.model(directory, cell.dtype, cell.devices))
        if cell.draft == "auto":
            given["drafter"] = self.choice(cell, target, text, given)
        return magicjax.generate(target, text, **given)

    def choice(
        self, cell: Cell, target: Any, text: list[np.ndarray], given: dict[str, Any]
    ) -> magicjax.Choice:
        """Returns what "auto" chose in a cell, once for all its runs."""
        return self._once(("choice", cell), lambda: magicjax.choose_drafter(target, text, **given))

    def agreement(self, cell: Cell) -> float | None:
        """Returns how often target and draft agree on the prompts' text.

        None if not asked for, if there is no single model that drafts, or if what it sees of the
        text is not known before the text: that of full and streaming caches is.
        """
        view = _view(cell)
        if not cell.agreement_tokens or view is None:
            return None
        rows = max(1, cell.agreement_tokens // cell.context)
        text = self.prompts(cell)[:rows]
        wanted = self._greedy(cell, cell.target, text)
        drafted = self._greedy(cell, cell.model or cell.target, text, **view)
        return metrics.agreement(wanted, drafted)

    def _greedy(self, cell: Cell, directory: str, text: np.ndarray, **view: int) -> np.ndarray:
        """Returns the best tokens of a model on a group's text; cells of the group share them."""
        model = self.model(directory, cell.dtype, cell.devices)
        key = (directory, cell.dtype, *_asked(cell), text.shape)
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
    return cell.prompts, cell.batch, cell.context, cell.candidates


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a cell has no result: one line for the table, the whole trace for its record."""

    error: str
    trace: str


def measure(
    bench: Bench, group: list[Cell], wanted: list[Cell], tick: Callable[[Cell, int], None]
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Yields (cell, record) of every wanted cell of a group; its first cell is plain decoding.

    A cell is yielded as soon as its last run has ended.

    Args:
      bench: what runs them.
      group: the cells of one batch and context.
      wanted: those of the group to report; plain decoding runs in any case.
      tick: called before each run with the cell and the turn, 0 being the warm-up.
    """
    plain = group[0]
    outputs: dict[Cell, list] = {c: [] for c in group if c == plain or c in wanted}
    failures: dict[Cell, Failure] = {}
    read_gbs = bandwidth.read_bandwidth() / 1e9 if plain.repeats else None
    for turn in range(plain.repeats + 1):
        for cell, runs in outputs.items():
            tick(cell, turn)
            if not {cell, plain} & failures.keys():
                with _recorded(cell, failures):
                    runs.append(bench.run(cell))
            if turn == plain.repeats and cell in wanted:
                yield cell, _finished(bench, cell, outputs, plain, failures, read_gbs)


def _finished(
    bench: Bench,
    cell: Cell,
    outputs: dict[Cell, list],
    plain: Cell,
    failures: dict[Cell, Failure],
    read_gbs: float | None,
) -> dict[str, Any]:
    """Returns the record of a cell whose runs have ended, or why it has none."""
    record: dict[str, Any] = {}
    if plain in failures and cell != plain:
        cause = failures[plain]
        failures[cell] = Failure(PLAIN_FAILED + cause.error, cause.trace)
    if cell not in failures:
        with _recorded(cell, failures):
            record = _record(bench, cell, outputs[cell], outputs[plain], read_gbs)
    return _failed(cell, failures[cell]) if cell in failures else record


@contextlib.contextmanager
def _recorded(cell: Cell, failures: dict[Cell, Failure]) -> Iterator[None]:
    """Turns an exception into the cell's failure; an interrupt by the user passes."""
    try:
        yield
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        failures[cell] = Failure(message, traceback.format_exc())


def device_name() -> str:
    """Returns what the measurements ran on, as the tables name it."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return f"cpu, {os.cpu_count()} cores"
    return device.device_kind


def _settings(cell: Cell) -> dict[str, Any]:
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
        "device": device_name(),
        "batch": cell.batch,
        "context": cell.context,
        "prompts": cell.prompts,
        "new_tokens": cell.new_tokens,
        "repeat": cell.repeats,
    }


def _failed(cell: Cell, failure: Failure) -> dict[str, Any]:
    row = _settings(cell) | {"status": "failed", "error": failure.error}
    return {"row": row, "cell": dataclasses.asdict(cell), "trace": failure.trace}


def _record(
    bench: Bench, cell: Cell, runs: list, plain_runs: list, read_gbs: float | None
) -> dict[str, Any]:
    """Returns the record of a cell: its row of the summary, and every single run."""
    warm_up, *timed = runs
    plain_timed = plain_runs[1:]
    if any(run.stats.compile_s for run in timed + plain_timed):
        raise RuntimeError(f"{cell.label}: a timed run compiled again, so its time means nothing")
    match = _match(bench, cell, runs, plain_runs[0])
    stats = warm_up.stats
    row = _settings(cell) | {
        "status": "ok",
        "error": "",
        "tau": stats.tau,
        "tau_by_request": stats.tau_by_request,
        "nodes_per_round": stats.nodes_per_round,
        "acceptance_rate": None if cell.draft == "none" else stats.acceptance_rate,
        "exact_match": match.exact if match else None,
        "ties": match.ties if match else 0,
        "compile_s": bench.compile_s(cell, runs),
        "kv_mb_target": stats.kv_bytes_target / 1e6,
        "kv_mb_draft": stats.kv_bytes_draft / 1e6,
        "repeated_8grams": metrics.repeated_ngrams(np.asarray(warm_up.tokens)),
        "agreement": bench.agreement(cell),
        "rounds": stats.rounds,
        "steps": stats.steps,
        "chosen": _chosen(warm_up.choice),
        "attention_backend": stats.attention_backend,
    }
    row |= _times(bench, cell, timed, plain_timed, read_gbs)
    return {
        "row": row,
        "cell": dataclasses.asdict(cell),
        "runs": [_run(run) for run in timed],
        "plain_runs": [_run(run) for run in plain_timed],
        "acceptance_by_depth": [float(a) for a in stats.acceptance_by_depth],
        "divergences": [str(d) for d in match.divergences] if match else [],
        "texts": list(warm_up.texts),
        "answers": bench.answers(cell),
    }


def _chosen(choice: magicjax.Choice | None) -> str:
    """Returns what "auto" chose, as the tables name it; "" of other methods."""
    if choice is None:
        return ""
    return choice.name if choice.tree is None else f"{choice.name}, {written_tree(choice.tree)}"


TIMES = (
    *("decode_tok_s", "ar_decode_tok_s", "speedup", "speedup_low", "speedup_high", "prefill_s"),
    *("decode_s", "round_ms", "ar_gbs", "read_gbs", "bandwidth_share"),
)


def _moved(target: Any, cell: Cell) -> float:
    """Returns the bytes that all devices together read in an average step of plain decoding."""
    weights = costs.weight_bytes(target)
    entries = costs.step_bytes(target, cell.batch, cell.context, cell.new_tokens) - weights
    if not cell.devices:
        return weights + entries
    split = placing.split_of(target.config, None, factored(cell.devices))
    # Every group has the weights, and KV heads may be held several times.
    return cell.devices.shape["data"] * weights + entries * split.shards / split.kv_shards


def _times(
    bench: Bench, cell: Cell, timed: list, plain_timed: list, read_gbs: float | None
) -> dict[str, float | None]:
    """Returns the columns that say how long a cell took; None in all if nothing was timed."""
    if read_gbs is None:
        return dict.fromkeys(TIMES)
    median = statistics.median
    rate = median(_rate(run) for run in timed)
    plain_rate = median(_rate(run) for run in plain_timed)
    paired = [_rate(a) / _rate(b) for a, b in zip(timed, plain_timed, strict=True)]
    target = bench.model(cell.target, cell.dtype, cell.devices)
    step_s = median(run.stats.decode_s / run.stats.steps for run in plain_timed)
    moved = _moved(target, cell)
    ar_gbs = moved / step_s / 1e9
    if cell.devices and jax.default_backend() != "cpu":  # devices on a CPU share its memory
        read_gbs *= cell.devices.size
    return {
        "decode_tok_s": rate,
        "ar_decode_tok_s": plain_rate,
        "speedup": rate / plain_rate,
        "speedup_low": min(paired),
        "speedup_high": max(paired),
        "prefill_s": median(run.stats.prefill_s for run in timed),
        "decode_s": median(run.stats.decode_s for run in timed),
        "round_ms": 1e3 * median(run.stats.decode_s / run.stats.steps for run in timed),
        "ar_gbs": ar_gbs,
        "read_gbs": read_gbs,
        "bandwidth_share": ar_gbs / read_gbs,
    }


def _match(bench: Bench, cell: Cell, runs: list, plain: Any) -> exactness.Match | None:
    """Returns how the cell's tokens compare with plain decoding's; every run must say the same.

    None where only the distribution is the same: naive verification samples the very tokens of
    plain sampling, the other rules do not.

    Raises:
      RuntimeError: two runs of the cell differ.
    """
    first = np.asarray(runs[0].tokens)
    if any((np.asarray(run.tokens) != first).any() for run in runs):
        raise RuntimeError(f"{cell.label}: two runs on the same prompts differ")
    if cell.do_sample:
        comparable = cell.draft == "none" or cell.verifier == "naive"
        return exactness.compare_sampled(np.asarray(plain.tokens), first) if comparable else None
    target = bench.model(cell.target, cell.dtype, cell.devices)
    return exactness.compare(target, bench.prompts(cell), np.asarray(plain.tokens), first)


def _rate(run: Any) -> float:
    return run.stats.emitted / run.stats.decode_s


def _run(run: Any) -> dict[str, float]:
    times, counts = ("prefill_s", "decode_s", "tokens_per_s"), ("rounds", "steps", "emitted")
    names = (*times, *counts, "drafted", "accepted")
    return {name: float(getattr(run.stats, name)) for name in names}
