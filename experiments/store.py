"""Results on disk: one JSON for each finished cell, written whole or not at all.

A file is written beside its place and renamed, so a kill never leaves half a result, and a re-run
takes what is there and measures the rest.
"""

import csv
import io
import json
import math
import os
import pathlib
from typing import Any

COLUMNS = (
    *("target", "draft", "policy", "kv_budget", "tree", "gamma", "nodes", "dtype", "device"),
    *("batch", "context", "new_tokens", "repeat", "status", "error", "tau", "acceptance_rate"),
    *("decode_tok_s", "ar_decode_tok_s", "speedup", "exact_match", "prefill_s", "decode_s"),
    *("compile_s", "kv_mb_target", "kv_mb_draft"),
    # beyond the columns that every run of the project shares
    *("speedup_low", "speedup_high", "ties", "repeated_8grams", "agreement", "rounds"),
    *("ar_gbs", "read_gbs", "bandwidth_share", "method", "draft_model", "sinks"),
    *("attention_backend", "verifier", "draw", "temperature", "top_k", "top_p", "seed"),
    *("tau_by_request", "nodes_per_round", "prompts", "refresh_every", "kv_dtype"),
    *("sink_positions", "recent", "steps", "round_ms", "chosen"),
)


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file whole: to a temporary name in the same folder, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_record(directory: pathlib.Path, key: str, record: dict[str, Any]) -> None:
    """Writes one cell's record as `cells/<key>.json`; numbers that are not are null."""
    clean = json.dumps(_finite(record), indent=1, allow_nan=False)
    write_text(directory / "cells" / f"{key}.json", clean + "\n")


def read_record(directory: pathlib.Path, key: str) -> dict[str, Any] | None:
    """Returns the record of a cell that finished well, or None if it is still to be measured."""
    path = directory / "cells" / f"{key}.json"
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    return record if record["row"]["status"] == "ok" else None


def write_summary(directory: pathlib.Path, rows: list[dict[str, Any]]) -> pathlib.Path:
    """Returns the path of `summary.csv`, written with one line for each row."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(_finite(rows))
    path = directory / "summary.csv"
    write_text(path, buffer.getvalue())
    return path


def _finite(value: Any) -> Any:
    """Returns the value with NaN and infinity as None, which JSON and CSV can say."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
