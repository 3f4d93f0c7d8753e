"""Results on disk, written whole or not at all: a kill never leaves half a file.

    results/NAME/experiment.yaml        what was asked for, and the format of the folder
                 summary.csv            a line for each cell
                 cells/KEY/config.yaml  the cell, every setting resolved; KEY is its hash
                           env.json     device, versions, code: what else the result depends on
                           requests.jsonl   a line for each row: tokens, acceptance, answer
                           metrics.json     the line of the summary, single runs; written last
                           failure.json     instead of the two: why there is no result
                           worker.log       what the cell's process said

A cell is finished when its `metrics.json` is there. Folders of several machines are merged by
copying their `cells` together: a cell has the same key everywhere.
"""

import contextlib
import csv
import hashlib
import io
import json
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from experiments.schema.fields import ConfigError

FORMAT = 2  # of a folder of results
METRICS, FAILURE = "metrics.json", "failure.json"

COLUMNS = (
    *("target", "draft", "policy", "kv_budget", "tree", "gamma", "nodes", "dtype", "device"),
    *("batch", "context", "new_tokens", "repeat", "status", "error", "tau", "acceptance_rate"),
    *("decode_tok_s", "ar_decode_tok_s", "speedup", "exact_match", "prefill_s", "decode_s"),
    *("compile_s", "kv_mb_target", "kv_mb_draft"),
    # beyond the columns that every run of the project shares
    *("speedup_low", "speedup_high", "noise_match", "ties", "first_divergence", "top2_margin"),
    *("ttft_s", "tpot_ms_p50", "tpot_ms_p99", "decode_tok_s_user", "decode_tok_s_device"),
    *("draft_s", "score_s", "verify_s", "commit_s", "rest_s", "host_s", "memory_mb"),
    *("tau_by_request", "block_efficiency", "nodes_per_round", "rounds", "steps", "round_ms"),
    *("repeated_8grams", "agreement", "score", "ar_gbs", "read_gbs", "bandwidth_share"),
    *(
        "method",
        "draft_model",
        "mesh",
        "micro_batches",
        "offload",
        "sinks",
        "recent",
        "refresh_every",
        "kv_dtype",
    ),
    *("sink_positions", "verifier", "draw", "temperature", "top_k", "top_p", "seed"),
    *("prompts", "prompt_path", "prompt_seed", "candidates", "agreement_tokens", "phases"),
    *("drafters", "profile", "attention_backend", "chosen", "wall_s", "key"),
)


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file whole: to a temporary name in the same folder, then renamed."""
    write_bytes(path, text.encode())


def write_bytes(path: pathlib.Path, content: bytes) -> None:
    """Writes a file whole, as `write_text` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file whole; numbers that are not are null."""
    write_text(path, json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


def cell_folder(directory: pathlib.Path, key: str) -> pathlib.Path:
    """Returns a cell's folder."""
    return directory / "cells" / key


def write_cell(folder: pathlib.Path, settings: dict[str, Any]) -> None:
    """Makes a cell's folder, with its settings."""
    write_text(folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False))


def clear(folder: pathlib.Path) -> None:
    """Removes what an earlier measurement of a cell left, its verdict first."""
    for name in (METRICS, FAILURE):
        (folder / name).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.name not in ("config.yaml", "lock", "worker.log"):
            path.unlink()


def write_result(
    folder: pathlib.Path, env: dict[str, Any], metrics: dict[str, Any], requests: Sequence[dict]
) -> None:
    """Writes what a cell gave; its metrics last, which say that it is finished."""
    write_json(folder / "env.json", env)
    lines = [json.dumps(finite(request), allow_nan=False) + "\n" for request in requests]
    write_text(folder / "requests.jsonl", "".join(lines))
    write_json(folder / METRICS, metrics)


def write_failure(
    folder: pathlib.Path, kind: str, error: str, trace: str = "", row: dict | None = None
) -> None:
    """Writes why a cell has no result.

    Args:
      folder: the cell's.
      kind: "memory", "timeout", "crash", "error", or "config" of one that was never begun.
      error: one line.
      trace: the whole of it.
      row: the columns that are known.
    """
    failure = {"kind": kind, "error": " ".join(error.split()), "trace": trace, "row": row or {}}
    write_json(folder / FAILURE, failure)


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns what a JSON file holds, None if there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def write_experiment(directory: pathlib.Path, settings: dict[str, Any], source: str) -> None:
    """Writes what was asked for, beside the format of the folder."""
    known = {"format": FORMAT, "source": source, "config": settings}
    write_text(directory / "experiment.yaml", yaml.safe_dump(known, sort_keys=False))


def check_folder(directory: pathlib.Path, source: str) -> None:
    """Checks that a folder of results can be gone on with.

    Raises:
      ConfigError: it is of another format, or belongs to another experiment file.
    """
    path = directory / "experiment.yaml"
    remedy = "give another --name, or move the folder away"
    if not path.exists():
        if directory.is_dir() and ((directory / "cells").exists() or any(directory.glob("*.csv"))):
            raise ConfigError(
                f"{directory} holds results of another version of magicjax (no experiment.yaml, "
                f"and this one writes format {FORMAT}): {remedy}"
            )
        return
    known = yaml.safe_load(path.read_text())
    found = known.get("format") if isinstance(known, dict) else None
    if found != FORMAT:
        raise ConfigError(
            f"{directory} holds results of another version of magicjax (format {found}, and this "
            f"one writes format {FORMAT}): {remedy}"
        )
    if known["source"] != source:
        raise ConfigError(
            f"{directory} belongs to {known['source'] or 'no file'}, and this is {source}: two "
            f"experiments cannot have one name; {remedy}"
        )


def digest(text: str) -> str:
    """Returns 16 hexadecimal digits that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def locked(path: pathlib.Path, wait: bool = True) -> Iterator[bool]:
    """Keeps other processes out, where the system has such locks; it ends with the process.

    Args:
      path: of the lock's file, whose folder is made.
      wait: for the process that has it.

    Yields:
      Whether it could be had.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield True
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def remove_partials(directory: pathlib.Path) -> None:
    """Removes what killed processes left half written."""
    for partial in directory.rglob(".*.partial"):
        partial.unlink(missing_ok=True)


def write_record(directory: pathlib.Path, key: str, record: dict[str, Any]) -> None:
    """Writes a record of a command that has no cells' folders as `cells/<key>.json`."""
    write_json(directory / "cells" / f"{key}.json", record)


def read_record(directory: pathlib.Path, key: str) -> dict[str, Any] | None:
    """Returns what `write_record` wrote, or None."""
    return read_json(directory / "cells" / f"{key}.json")


def write_summary(directory: pathlib.Path, rows: list[dict[str, Any]]) -> pathlib.Path:
    """Returns the path of `summary.csv`, written with one line for each row."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(finite(rows))
    path = directory / "summary.csv"
    write_text(path, buffer.getvalue())
    return path


def finite(value: Any) -> Any:
    """Returns the value with NaN and infinity as None, which JSON and CSV can say."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
