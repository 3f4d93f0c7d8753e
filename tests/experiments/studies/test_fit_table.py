"""The table of `magicjax fit`, from the stored reports."""

import pytest

from experiments.studies import fit_table


@pytest.mark.parametrize("workload", fit_table.WORKLOADS, ids=lambda each: "-".join(map(str, each)))
def test_a_stored_report_has_the_row_of_its_workload(workload, monkeypatch):
    def estimate(workload, *options):
        assert options == ("--analytic",)  # nothing is compiled
        return {"bytes on each device": {"total": 10**9}}

    monkeypatch.setattr(fit_table, "_fit", estimate)
    row = fit_table._row(fit_table._report(fit_table.OUT, workload))
    assert len(row) == len(fit_table.HEADER)
    target, batch, context, *_ = workload
    assert row[0].startswith(target) and row[0].endswith(f"{batch} x {context}")
    table = (fit_table.OUT / "table.md").read_text().splitlines()
    stored = [tuple(cell.strip() for cell in line[1:-1].split("|")) for line in table]
    assert stored[0] == fit_table.HEADER
    estimated = fit_table.HEADER.index("estimate")
    without = [cells[:estimated] + cells[estimated + 1 :] for cells in stored]
    assert row[:estimated] + row[estimated + 1 :] in without
