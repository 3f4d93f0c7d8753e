"""Markdown tables."""

from magicjax.benchmarks.tables import markdown_table


def test_cells_are_aligned_and_floats_rounded():
    assert markdown_table(("part", "ms"), [("draft", 0.123456), ("verify", None)]) == (
        "| part   | ms     |\n| ------ | ------ |\n| draft  | 0.1235 |\n| verify | –      |"
    )
