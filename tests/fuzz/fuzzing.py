"""Runs random configurations, records them, and repeats single cases.

Each line of `results/fuzz/seed-S.jsonl` is a finished configuration; a rerun continues after them.
A failure is printed with the command that repeats it. Exit code 1: texts, caches or slots differ
from what they must be.
"""

import argparse
import dataclasses
import json
import pathlib
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from magicjax.decoding import program_cache
from tests.eight_devices import limit_memory_maps
from tests.fuzz import batches, schedules
from tests.fuzz.checks import UNIT, Found
from tests.fuzz.configurations import Configuration, configuration

ROOT = pathlib.Path(__file__).parent.parent.parent
RESULTS = ROOT / "results" / "fuzz"
COUNTED = ("rows", "requests", "schedules", "tokens", "caches", "ties")


def check(made: Configuration, case: int | None = None) -> Found:
    """Returns what a configuration's cases give, or one case."""
    module = schedules if made.is_engine else batches
    units = range(module.units(made)) if case is None else [case // UNIT]
    found = module.run_units(made, [*units])
    limit_memory_maps()
    if case is not None:
        found.failures = [failure for failure in found.failures if failure[0] == case]
    return found


def command(made: Configuration, case: int) -> str:
    """Returns the command that repeats a case."""
    return f"python -m tests.fuzz --configuration {made.number} --seed {made.seed} --case {case}"


def report(made: Configuration, found: Found) -> None:
    """Prints each failure with its command."""
    for case, message in found.failures:
        print(f"FAILED {command(made, case)}\n    {message}", flush=True)


def finished(path: pathlib.Path) -> dict[int, dict[str, Any]]:
    """Returns the recorded configurations by number; a killed run can leave half a line."""
    records = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        records[record["configuration"]] = record
    return records


def append(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Appends a record as one line, after half a line on a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(max(0, file.seek(0, 2) - 1))
        separate = file.read() not in (b"", b"\n")
        file.write(b"\n" * separate + json.dumps(record).encode() + b"\n")


def run(made: Configuration) -> dict[str, Any]:
    """Checks a configuration, prints its failures, and returns its record."""
    begun, compiled = time.time(), program_cache.totals()[0]
    found = check(made)
    report(made, found)
    return dict(
        configuration=made.number,
        engine=made.is_engine,
        what=str(made),
        **{name: getattr(found, name) for name in COUNTED},
        ends=dict(found.ends),
        failures=[[command(made, case), message] for case, message in found.failures],
        programs=program_cache.totals()[0] - compiled,
        seconds=round(time.time() - begun, 1),
    )


def fuzz(seed: int, minutes: float, most: int | None, path: pathlib.Path) -> bool:
    """Runs configurations until the time is over; returns whether all that are recorded passed."""
    records, end = finished(path), time.time() + 60 * minutes
    number = 0
    while time.time() < end and (most is None or len(records) < most):
        if number not in records:
            records[number] = record = run(configuration(seed, number))
            append(path, record)
            print(progress(records, number), flush=True)
        number += 1
    print(summary(records))
    return not any(record["failures"] for record in records.values())


def progress(records: dict[int, dict[str, Any]], number: int) -> str:
    """Returns the line of a configuration, and the sums so far."""
    record = records[number]
    total = {name: sum(r[name] for r in records.values()) for name in COUNTED}
    failed = sum(len(r["failures"]) for r in records.values())
    return (
        f"{number}: {record['what']}: {record['rows'] + record['requests']} cases, "
        f"{record['programs']} programs, {record['seconds']:.0f} s | "
        f"{len(records)} configurations, {total['rows'] + total['requests']:,} cases, "
        f"{total['schedules']:,} schedules, "
        f"{total['ties']} ties, {failed} mismatches"
    )


def summary(records: dict[int, dict[str, Any]]) -> str:
    """Returns the table of all records."""
    lines = [
        "",
        "| | configurations | cases | schedules | tokens | caches | ties | mismatches | minutes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    groups = {"generate": [False], "engine": [True], "all": [False, True]}
    for name, kinds in groups.items():
        chosen = [record for record in records.values() if record["engine"] in kinds]
        total = {key: sum(record[key] for record in chosen) for key in COUNTED}
        cells = [len(chosen), total["rows"] + total["requests"]]
        cells += [total[key] for key in ("schedules", "tokens", "caches", "ties")]
        cells += [sum(len(record["failures"]) for record in chosen)]
        minutes = sum(record["seconds"] for record in chosen) / 60
        lines.append(f"| {name} | {' | '.join(f'{n:,}' for n in cells)} | {minutes:.1f} |")
    ends = sum((Counter(record["ends"]) for record in records.values()), Counter())
    lines += ["", "requests: " + ", ".join(f"{n:,} {name}" for name, n in sorted(ends.items()))]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10, help="default: %(default)s")
    parser.add_argument(
        "--most", type=int, help="configurations; default: as many as there is time"
    )
    parser.add_argument("--configuration", type=int, help="run this one only, and record nothing")
    parser.add_argument("--case", type=int, help="of the configuration; default: all")
    chosen = parser.parse_args(arguments)
    if chosen.configuration is None:
        if chosen.case is not None:
            parser.error(f"--case {chosen.case} needs --configuration")
        path = RESULTS / f"seed-{chosen.seed}.jsonl"
        return int(not fuzz(chosen.seed, chosen.minutes, chosen.most, path))
    made = configuration(chosen.seed, chosen.configuration)
    print(f"{made}, on {jax.default_backend()}")
    found = check(made, chosen.case)
    report(made, found)
    counts = dataclasses.asdict(found)
    print(", ".join(f"{counts[name]} {name}" for name in COUNTED))
    print("failed" if found.failures else "passed")
    return int(bool(found.failures))
