"""The columns of summary.csv: the settings of a cell, and what was measured, in typed groups.

A field's help appears in the report; a field without help appears in the summary only.
"""

import dataclasses
from typing import Any

from experiments.schema.config import Experiment
from experiments.schema.method import Method
from experiments.schema.settings import columns_of, declared


def _column(format: str = "", help: str = "") -> Any:
    """Returns a field of a group; None means that it was not measured."""
    return dataclasses.field(default=None, metadata={"format": format, "help": help})


@dataclasses.dataclass(frozen=True)
class Status:
    """How a cell ended, and where."""

    device: str | None = _column()
    status: str | None = _column()
    error: str | None = _column()
    wall_s: float | None = _column()
    key: str | None = _column()


@dataclasses.dataclass(frozen=True)
class Times:
    """Medians of the timed runs."""

    decode_tok_s: float | None = _column(
        "{:.0f}", "decoded tokens per second of the whole batch, without prefill (median run)"
    )
    decode_tok_s_user: float | None = _column("{:.1f}", "decode_tok_s of one row")
    decode_tok_s_device: float | None = _column("{:.0f}", "decode_tok_s of one device")
    ar_decode_tok_s: float | None = _column()
    speedup: float | None = _column(
        "{:.2f}",
        "decode_tok_s over that of plain decoding at the same batch, context and dtype, whose runs "
        "are interleaved with this method's in one process",
    )
    speedup_low: float | None = _column(
        "{:.2f}", "the lowest speedup of a run over the plain run next to it"
    )
    speedup_high: float | None = _column("{:.2f}", "the highest of these speedups")
    ttft_s: float | None = _column("{:.3f}", "time to first token: seconds of prefill")
    tpot_ms_p50: float | None = _column(
        "{:.2f}",
        "time per output token after the first, in ms, median over requests and runs; a row that "
        "needs fewer rounds finishes earlier",
    )
    tpot_ms_p99: float | None = _column("{:.2f}", "the 99th percentile of these times")
    prefill_s: float | None = _column()
    decode_s: float | None = _column()
    round_ms: float | None = _column()
    ar_gbs: float | None = _column()
    read_gbs: float | None = _column()
    bandwidth_share: float | None = _column()


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """How many drafted tokens the target accepts."""

    tau: float | None = _column(
        "{:.2f}",
        "τ, mean acceptance length: tokens emitted per target pass, the bonus token included; "
        "every pass has the same weight",
    )
    tau_by_request: float | None = _column(
        "{:.2f}", "mean of the rows' τ: every request has the same weight"
    )
    block_efficiency: float | None = _column(
        "{:.2f}",
        "1 + accepted tokens per round: τ without the truncation at the end of a row",
    )
    acceptance_rate: float | None = _column("{:.3f}", "accepted tokens / (depth × rounds)")
    nodes_per_round: float | None = _column()
    rounds: int | None = _column()
    steps: int | None = _column()
    repeated_8grams: float | None = _column()
    agreement: float | None = _column()
    score: float | None = _column("{:.2f}", "share of the correct answers that occur in the text")
    chosen: str | None = _column()


@dataclasses.dataclass(frozen=True)
class Exactness:
    """How the tokens compare with plain decoding's."""

    exact_match: float | None = _column(
        "{:.3f}",
        "share of rows with plain decoding's tokens; a tie decided by rounding counts as equal",
    )
    noise_match: float | None = _column(
        "{:.3f}", "share of rows that are equal in all runs of plain decoding"
    )
    ties: int | None = _column("{}", "rows that diverge from plain decoding at such a tie")
    first_divergence: int | None = _column("{}", "first new token at which a row diverges")
    top2_margin: float | None = _column(
        "{:.1e}",
        "difference of the best logit and the lower of the two tokens' logits there, relative to "
        "the largest logit",
    )


@dataclasses.dataclass(frozen=True)
class Phases:
    """Seconds of each phase of the traced rounds."""

    draft_s: float | None = _column()
    score_s: float | None = _column()
    verify_s: float | None = _column()
    commit_s: float | None = _column()
    rest_s: float | None = _column()
    host_s: float | None = _column()


@dataclasses.dataclass(frozen=True)
class Resources:
    """Compilation, memory, and kernels."""

    compile_s: float | None = _column()
    kv_mb_target: float | None = _column()
    kv_mb_draft: float | None = _column()
    memory_mb: float | None = _column(
        "{:.0f}",
        "peak memory: of the GPU, or of the cell's process on a CPU; includes plain decoding, "
        "which runs in the same process, and the comparison of texts",
    )
    attention_backend: str | None = _column()


MEASURED = (Times, Acceptance, Exactness, Phases, Resources)
FIELDS = {f.name: f for group in (*MEASURED, Status) for f in dataclasses.fields(group)}  # type: ignore[arg-type]

# Settings that a grid can vary, and the columns of all settings.
AXES = tuple(declared(Experiment))
SETTINGS = (
    "method",
    *dict.fromkeys([*columns_of(Experiment).values(), "draft", *columns_of(Method).values()]),
    *("gamma", "nodes"),
)
# The first columns, in an order that scripts rely on.
_FIRST = (
    *("target", "draft", "policy", "budget", "tree", "gamma", "nodes", "dtype", "device"),
    *("batch", "context", "new_tokens", "repeat", "status", "error", "tau", "acceptance_rate"),
    *("decode_tok_s", "ar_decode_tok_s", "speedup", "exact_match", "prefill_s", "decode_s"),
    *("compile_s", "kv_mb_target", "kv_mb_draft"),
)
_LAST = ("wall_s", "key")
_OTHERS = (name for name in (*FIELDS, *SETTINGS) if name not in _LAST)
COLUMNS = tuple(dict.fromkeys([*_FIRST, *_OTHERS, *_LAST]))


def row_of(*groups: Any) -> dict[str, Any]:
    """Returns the columns of measured groups."""
    return {name: value for group in groups for name, value in dataclasses.asdict(group).items()}
