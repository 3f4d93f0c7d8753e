"""The columns of summary.csv: the settings of a cell, and what was measured.

The report explains columns by their meaning, which is empty for columns of the summary only.
"""

from typing import Any

from experiments.schema.config import Experiment
from experiments.schema.method import OPTIONS
from experiments.schema.settings import columns_of, declared


def interval_columns(name: str) -> tuple[str, str]:
    """Returns the columns with the bounds of the interval of a column."""
    return f"{name}_low", f"{name}_high"


# How a cell ended, and where.
STATUS = dict.fromkeys(("device", "status", "error", "wall_s", "key"), "")
# Medians of the timed runs.
TIMES = {
    "decode_tok_s": (
        "decoded tokens per second of the whole batch, without prefill (median run); with slots, "
        "new tokens over the time from the first arrival to the last end, prefill included"
    ),
    "ar_decode_tok_s": "decode_tok_s of the interleaved runs of plain decoding (median run)",
    "decode_tok_s_user": "decode_tok_s of one row",
    "decode_tok_s_device": "decode_tok_s of one device",
    "speedup": (
        "decode_tok_s over that of plain decoding at the same batch, context and dtype, whose runs "
        "are interleaved with this method's in one process"
    ),
    "ttft_s": "time to first token: seconds of prefill; timed runs share the target's pass",
    "tpot_ms_p50": (
        "time per output token after the first, in ms, median over requests and runs; a row that "
        "needs fewer rounds finishes earlier"
    ),
    "tpot_ms_p99": "the 99th percentile of these times",
    **dict.fromkeys(("prefill_s", "decode_s", "round_ms"), ""),
    **dict.fromkeys(("ar_gbs", "read_gbs", "bandwidth_share"), ""),
}
# 95 % intervals of the speedup, or of τ in rows without times, which the report computes.
INTERVALS = dict.fromkeys((*interval_columns("speedup"), *interval_columns("tau")), "")
# Latencies of requests that arrive over time (slots), over requests and runs.
SERVING = {
    "goodput": (
        "requests per second whose time to first token is at most ttft_limit_s and whose time per "
        "output token is at most tpot_limit_ms (median run)"
    ),
    "ar_goodput": "goodput of the interleaved runs of plain decoding",
    "ttft_s_p50": "time to first token from the arrival, in s, median",
    "ttft_s_p95": "the 95th percentile of these times",
    "tpot_ms_p95": "the 95th percentile of the times per output token",
    "e2e_s_p50": "end-to-end latency: from the arrival to the end, in s, median",
    "e2e_s_p95": "the 95th percentile of these times",
    "rounds_by_arm": "rounds of the loop by drafter and depth, with adaptive",
}
# How many drafted tokens the target accepts, and how the text compares with plain decoding's.
DECODING = {
    "tau": (
        "τ, mean acceptance length: tokens emitted per target pass, the bonus token included; "
        "every pass has the same weight"
    ),
    "tau_by_request": "mean of the rows' τ: every request has the same weight",
    "block_efficiency": "1 + accepted tokens per round: τ without truncation at the end of a row",
    "acceptance_rate": "accepted tokens / (depth × rounds)",
    **dict.fromkeys(("nodes_per_round", "target_passes", "rounds"), ""),
    "repeated_8grams": "",
    "agreement": (
        "how often draft and target predict the same token on the second half of the prompts, of "
        "at most agreement_tokens tokens; empty for drafts whose cache depends on the text"
    ),
    "score": "share of the correct answers that occur in the text",
    **dict.fromkeys(("chosen", "templated"), ""),
    "exact_match": (
        "share of rows with plain decoding's tokens; a tie decided by rounding counts as equal: "
        "two tokens whose logits in float32 differ by less than 1e-5 of the largest, or, for a "
        "16-bit target, than twice its measured rounding there"
    ),
    "noise_match": "share of rows that are equal in all runs of plain decoding",
    "ties": "rows that diverge from plain decoding at such a tie",
    "first_divergence": "first new token at which a row diverges",
    "top2_margin": (
        "difference of the best logit and the lower of the two tokens' logits there, relative to "
        "the largest logit"
    ),
}
# Seconds of each phase of the traced rounds, and why there are none.
PHASES = dict.fromkeys(
    ("draft_s", "score_s", "verify_s", "commit_s", "rest_s", "host_s", "phases_error"), ""
)
RESOURCES = {
    **dict.fromkeys(("compile_s", "kv_mb_target", "kv_mb_draft"), ""),
    "memory_mb": (
        "peak memory: of the GPU, or of the cell's process on a CPU; includes plain decoding, "
        "which runs in the same process, and the comparison of texts"
    ),
    "attention_backend": "",
}
MEASURED = TIMES | INTERVALS | SERVING | DECODING | PHASES | RESOURCES | STATUS

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
