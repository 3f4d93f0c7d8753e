"""The columns of summary.csv: the settings of a cell, and what was measured.

The report shows the columns with a meaning; the others are in the summary only.
"""

from typing import Any, NamedTuple

from experiments.schema.config import Experiment
from experiments.schema.method import OPTIONS
from experiments.schema.settings import columns_of, declared


class Column(NamedTuple):
    """The format and the meaning of a column in the report."""

    format: str = ""
    meaning: str = ""


# How a cell ended, and where.
STATUS = dict.fromkeys(("device", "status", "error", "wall_s", "key"), Column())
# Medians of the timed runs.
TIMES = {
    "decode_tok_s": Column(
        "{:.0f}",
        "decoded tokens per second of the whole batch, without prefill (median run); with slots, "
        "new tokens over the time from the first arrival to the last end, prefill included",
    ),
    "ar_decode_tok_s": Column(
        "{:.0f}", "decode_tok_s of the interleaved runs of plain decoding (median run)"
    ),
    "decode_tok_s_user": Column("{:.1f}", "decode_tok_s of one row"),
    "decode_tok_s_device": Column("{:.0f}", "decode_tok_s of one device"),
    "speedup": Column(
        "{:.2f}",
        "decode_tok_s over that of plain decoding at the same batch, context and dtype, whose runs "
        "are interleaved with this method's in one process",
    ),
    "ttft_s": Column(
        "{:.3f}", "time to first token: seconds of prefill; timed runs share the target's pass"
    ),
    "tpot_ms_p50": Column(
        "{:.2f}",
        "time per output token after the first, in ms, median over requests and runs; a row that "
        "needs fewer rounds finishes earlier",
    ),
    "tpot_ms_p99": Column("{:.2f}", "the 99th percentile of these times"),
    **dict.fromkeys(("prefill_s", "decode_s", "round_ms"), Column()),
    **dict.fromkeys(("ar_gbs", "read_gbs", "bandwidth_share"), Column()),
}
# Latencies of requests that arrive over time (slots), over requests and runs.
SERVING = {
    "goodput": Column(
        "{:.2f}",
        "requests per second whose time to first token is at most ttft_limit_s and whose time per "
        "output token is at most tpot_limit_ms (median run)",
    ),
    "ar_goodput": Column("{:.2f}", "goodput of the interleaved runs of plain decoding"),
    "ttft_s_p50": Column("{:.3f}", "time to first token from the arrival, in s, median"),
    "ttft_s_p95": Column("{:.3f}", "the 95th percentile of these times"),
    "tpot_ms_p95": Column("{:.2f}", "the 95th percentile of the times per output token"),
    "e2e_s_p50": Column("{:.3f}", "end-to-end latency: from the arrival to the end, in s, median"),
    "e2e_s_p95": Column("{:.3f}", "the 95th percentile of these times"),
    "rounds_by_arm": Column("{}", "rounds of the loop by drafter and depth, with adaptive"),
}
# How many drafted tokens the target accepts, and how the text compares with plain decoding's.
DECODING = {
    "tau": Column(
        "{:.2f}",
        "τ, mean acceptance length: tokens emitted per target pass, the bonus token included; "
        "every pass has the same weight",
    ),
    "tau_by_request": Column("{:.2f}", "mean of the rows' τ: every request has the same weight"),
    "block_efficiency": Column(
        "{:.2f}", "1 + accepted tokens per round: τ without the truncation at the end of a row"
    ),
    "acceptance_rate": Column("{:.3f}", "accepted tokens / (depth × rounds)"),
    **dict.fromkeys(("nodes_per_round", "target_passes", "rounds"), Column()),
    "repeated_8grams": Column(),
    "agreement": Column(
        "{:.3f}",
        "how often draft and target predict the same token on the second half of the prompts, of "
        "at most agreement_tokens tokens; empty for drafts whose cache depends on the text",
    ),
    "score": Column("{:.2f}", "share of the correct answers that occur in the text"),
    **dict.fromkeys(("chosen", "templated"), Column()),
    "exact_match": Column(
        "{:.3f}",
        "share of rows with plain decoding's tokens; a tie decided by rounding counts as equal: "
        "two tokens whose logits in float32 differ by less than 1e-5 of the largest, or, for a "
        "16-bit target, than twice its measured rounding there",
    ),
    "noise_match": Column("{:.3f}", "share of rows that are equal in all runs of plain decoding"),
    "ties": Column("{}", "rows that diverge from plain decoding at such a tie"),
    "first_divergence": Column("{}", "first new token at which a row diverges"),
    "top2_margin": Column(
        "{:.1e}",
        "difference of the best logit and the lower of the two tokens' logits there, relative to "
        "the largest logit",
    ),
}
# Seconds of each phase of the traced rounds, and why there are none.
PHASES = dict.fromkeys(
    ("draft_s", "score_s", "verify_s", "commit_s", "rest_s", "host_s", "phases_error"), Column()
)
RESOURCES = {
    **dict.fromkeys(("compile_s", "kv_mb_target", "kv_mb_draft"), Column()),
    "memory_mb": Column(
        "{:.0f}",
        "peak memory: of the GPU, or of the cell's process on a CPU; includes plain decoding, "
        "which runs in the same process, and the comparison of texts",
    ),
    "attention_backend": Column(),
}
MEASURED = TIMES | SERVING | DECODING | PHASES | RESOURCES | STATUS

# Settings that a grid can vary, and the columns of all settings.
AXES = tuple(declared(Experiment))
SETTINGS = (
    *("method", "draft", "draft_model"),
    *columns_of(Experiment).values(),
    *OPTIONS,
    *("drafters", "profile", "tree", "verifier", "adaptive", "gamma", "nodes"),
)
# The first columns, in an order that scripts rely on.
_FIRST = (
    *("target", "draft", "policy", "budget", "tree", "gamma", "nodes", "dtype", "device"),
    *("batch", "context", "new_tokens", "repeat", "status", "error", "tau", "acceptance_rate"),
    *("decode_tok_s", "ar_decode_tok_s", "speedup", "exact_match", "prefill_s", "decode_s"),
    *("compile_s", "kv_mb_target", "kv_mb_draft"),
)
_LAST = ("wall_s", "key")
_OTHERS = (name for name in (*MEASURED, *SETTINGS) if name not in _LAST)
COLUMNS = tuple(dict.fromkeys([*_FIRST, *_OTHERS, *_LAST]))
RESERVED = {*COLUMNS} - {*OPTIONS}  # not names of options


def complete(settings: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of the summary from a cell's settings and results, with None for the others.

    Raises:
      ValueError: a result is not declared.
    """
    if unknown := measured.keys() - MEASURED.keys():
        raise ValueError(f"not columns of the summary: {', '.join(sorted(unknown))}")
    return dict.fromkeys(COLUMNS) | settings | measured


def names_of(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the columns of some rows: `COLUMNS`, then the options of drafters beside those."""
    return list(dict.fromkeys([*COLUMNS, *(name for row in rows for name in row)]))
