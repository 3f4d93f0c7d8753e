"""Acceptance by policy: rows of finished groups are kept, and found by all that they depend on."""

import pandas as pd
import pytest

from experiments.studies import policy_acceptance

CONFIG = """
results: {0}
new_tokens: 16
candidates: 1
repeats: 0
methods:
- {{drafter: self, policy: [streaming, snapkv], budget: 64, tree: chain:3}}
"""


@pytest.fixture
def main(tmp_path, scripted, monkeypatch):
    """Runs the command; returns the cells that ran, and the stored rows."""
    path = tmp_path / "mine.yaml"
    path.write_text(CONFIG.format(tmp_path))

    def run(*options):
        bench = scripted()
        monkeypatch.setattr(policy_acceptance, "Bench", lambda: bench)
        assert policy_acceptance.main([str(path), *options]) == 0
        return bench.ran, pd.read_csv(tmp_path / "mine.csv")

    return run


@pytest.mark.slow
def test_finished_groups_are_kept_and_not_run_again(main, capsys, monkeypatch):
    main("--context", "128")
    ran, rows = main("--grid.context", "96", "128")
    assert {cell.context for cell in ran} == {96}
    assert sorted(rows.context) == [96, 96, 128, 128]
    capsys.readouterr()
    ran, rows = main("--context", "96")
    assert not ran and len(rows) == 4
    assert "128" not in capsys.readouterr().out  # only the rows of this grid are printed
    monkeypatch.setattr(policy_acceptance.provenance, "code", lambda: "changed")
    assert main("--context", "96")[0]
