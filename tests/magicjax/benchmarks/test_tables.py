"""Markdown tables."""

from magicjax.benchmarks.tables import markdown_table, record_table


def test_cells_are_aligned_and_floats_rounded():
    assert markdown_table(("part", "ms"), [("draft", 0.123456), ("verify", None)]) == (
        "| part   | ms     |\n| ------ | ------ |\n| draft  | 0.1235 |\n| verify | –      |"
    )


def test_records_may_lack_columns():
    table = record_table([{"a": 1}, {"b": "x", "a": 2}])
    assert table.splitlines()[2:] == ["| 1   | –   |", "| 2   | x   |"]
