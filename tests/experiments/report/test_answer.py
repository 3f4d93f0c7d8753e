"""Intervals of speedups, and the answer that opens a report."""

import pytest

from experiments.report import answer, results_folder


def seconds(folder, runs):
    """Returns the rows of one cell whose (plain, method) seconds by batch of each run are given."""
    metrics = {
        name: [{"decode_s": sum(run[i]), "decode_s_by_batch": run[i]} for run in runs]
        for i, name in enumerate(("plain_runs", "runs"))
    }
    row = {"speedup": 2.0, "batch": 1, "requests": len(runs[0][0])}
    return answer.with_intervals([results_folder.CellResult(folder, row, {}, metrics)])[0]


def test_an_interval_is_paired_with_the_interleaved_plain_runs(tmp_path):
    # Runs and requests differ by a factor of 9, in the method as in plain decoding.
    noisy = [([2.0 * run, 6.0 * run], [1.0 * run, 3.0 * run]) for run in (1, 2, 3)]
    row = seconds(tmp_path, noisy)
    assert (row["speedup_low"], row["speedup_high"]) == (pytest.approx(2.0), pytest.approx(2.0))
    assert row["evidence"] == "3 runs of 2 requests: few"


def test_an_interval_covers_runs_and_requests(tmp_path):
    # Speedups of 1, 2, 3 and 4 by request: the total over drawn requests is between 1 and 4.
    by_request = seconds(tmp_path, [([1.0, 2.0, 3.0, 4.0] * 4, [1.0] * 16)] * 2)
    assert 1.8 < by_request["speedup_low"] < 2.2 and 2.8 < by_request["speedup_high"] < 3.2
    assert by_request["evidence"] == "2 runs of 16 requests"
    by_run = seconds(tmp_path, [([float(n)], [1.0]) for n in (1, 2, 3)])
    assert (by_run["speedup_low"], by_run["speedup_high"]) == (1.0, 3.0)
    assert by_run["evidence"] == "3 runs of 1 request: few"


def rows_of(*methods, **columns):
    """Returns rows of one group: (method, speedup, low, high)."""
    common = {"status": "ok", "draft": "self", "batch": 1, "context": 64, "exact_match": 1.0}
    common |= {"ar_decode_tok_s": 100.0, "evidence": "3 runs of 2 requests: few"}
    names = "method", "speedup", "speedup_low", "speedup_high"
    return [common | dict(zip(names, values, strict=True)) | columns for values in methods]


def test_the_best_method_is_exact_and_compared_with_its_interval():
    wrong = rows_of(("wrong", 3.0, 2.9, 3.1), exact_match=0.5)
    (found,) = answer.answers(
        rows_of(("a", 1.5, 1.3, 1.6), ("b", 1.6, 1.5, 1.7), ("c", 1.1, 1.0, 1.2)) + wrong
    )
    assert found.best["method"] == "b"
    assert not found.plain_wins and not found.unclear
    slow = rows_of(("a", 0.9, 0.8, 1.1), ("b", 0.8, 0.7, 0.9))
    (found,) = answer.answers(slow)
    assert found.unclear and not found.plain_wins
    assert answer.sentences(slow) == [
        "No method is shown to be faster than plain decoding.",
        "All 2 texts equal plain decoding's.",
        "Undecided, because the interval contains 1: batch 1, context 64.",
    ]
    assert "6 of 12 texts are NOT equal to plain decoding's." in answer.sentences(
        rows_of(("a", 1.5, 1.4, 1.6), requests=8, exact_match=0.5)
        + rows_of(("b", 1.5, 1.4, 1.6), requests=4, exact_match=0.5)
    )
    (nothing,) = answer.answers(rows_of(("a", None, None, None), status="crash"))
    assert nothing.best is None and not nothing.timed


def test_a_disturbed_machine_comes_before_the_speedups_and_counts_agree_in_number():
    rows = [
        row | {"ar_decode_tok_s": rate}
        for context in (64, 96)
        for row, rate in zip(
            rows_of(("a", 1.6, 1.5, 1.7), ("b", 0.6, 0.5, 0.7), context=context),
            (100.0, 200.0),
            strict=True,
        )
    ]
    warning, fastest, *others = answer.sentences(rows)
    assert warning == (
        "Other work disturbed the machine, so measure again: plain decoding of the same prompts "
        "ran at 100 to 200 tokens/s (batch 1, context 64); 100 to 200 tokens/s (batch 1, context "
        "96)."
    )
    assert fastest.startswith("Fastest: a, 1.60")
    assert others == [
        "All 4 texts equal plain decoding's.",
        "In every batch and context that was timed, at least one method is faster than plain "
        "decoding.",
    ]
    one = rows_of(("a", 1.5, 1.4, 1.6))
    assert "The text equals plain decoding's." in answer.sentences(one)
    wrong = one + rows_of(("b", 1.5, 1.4, 1.6), exact_match=0.0)
    assert "1 of 2 texts is NOT equal to plain decoding's." in answer.sentences(wrong)
