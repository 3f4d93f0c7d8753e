"""Measured acceptance: texts and tables, interpolation between contexts, and errors."""

import json

import numpy as np
import pytest

from magicjax.prediction.planner.acceptance import Measured, at_context, from_text, read_table


def write(path, rows):
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines))
    return path


def test_rates_and_rates_by_rank_are_parsed():
    assert from_text("0.8", "self") == Measured("self", None, ((0.8,),))
    assert from_text("0.6,0.2", "self") == Measured("self", None, ((0.6, 0.2),))
    table, source = at_context([from_text("0.6, 0.2", "self")], 77)["self"]
    assert (
        table.tolist() == [[0.6, 0.2]]
        and source == "assumed with --acceptance, never measured on this device"
    )


@pytest.mark.parametrize("text", ["1.2", "-0.1", "nan", "often", "", "0.7,0.6"])
def test_invalid_probabilities_are_errors_with_the_valid_forms(text):
    with pytest.raises(ValueError, match="acceptance.*magicjax generate"):
        from_text(text, "self")


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_csv_and_json_tables_are_equivalent(suffix, tmp_path):
    rows = [
        {"policy": "streaming", "budget": 512, "context": 4000, "acceptance": 0.8},
        {"policy": "snapkv", "budget": 256, "context": 4000, "acceptance": 0.7},
    ]
    path = write(tmp_path / f"table{suffix}", rows)
    assert read_table(path, "any") == [
        Measured("self:streaming:512", 4000, ((0.8,),)),
        Measured("self:snapkv:256", 4000, ((0.7,),)),
    ]


def test_a_row_may_have_a_drafter_a_target_and_several_ranks(tmp_path):
    rows = [
        {"model": "ours", "drafter": "small:d:full", "context": 9, "acceptance": "0.5 0.25"},
        {"model": "other", "drafter": "self", "context": 9, "acceptance": "0.5"},
    ]
    found = read_table(write(tmp_path / "a.csv", rows), "OURS")
    assert found == [Measured("small:d:full", 9, ((0.5, 0.25),))]
    deep = [{"drafter": "prompt-lookup", "context": 9, "acceptance": [[0.5, 0.2], [0.4, 0.1]]}]
    found = read_table(write(tmp_path / "b.json", deep), "ours")
    assert found == [Measured("prompt-lookup", 9, ((0.5, 0.2), (0.4, 0.1)))]
    published = [{"draft": "self+snapkv", "budget": 9, "context": 9, "acceptance": 0.5}]
    found = read_table(write(tmp_path / "c.csv", published), "ours")
    assert found[0].drafter == "self:snapkv:9"


def test_acceptance_is_interpolated_in_the_logarithm_of_the_context():
    rows = [Measured("d", 1000, ((0.8,),)), Measured("d", 4000, ((0.6, 0.2), (0.5, 0.1)))]
    at = {context: at_context(rows, context)["d"] for context in (500, 1000, 2000, 4000, 9000)}
    assert at[500][0].tolist() == at[1000][0].tolist() == [[0.8, 0.0], [0.8, 0.0]]
    np.testing.assert_allclose(at[2000][0], [[0.7, 0.1], [0.65, 0.05]])
    assert at[4000][0].tolist() == at[9000][0].tolist() == [[0.6, 0.2], [0.5, 0.1]]
    assert at[500][1] == "measured at 1000, the nearest context"
    assert at[1000][1] == "measured at 1000"
    assert at[2000][1] == "interpolated between 1000 and 4000"
    assert at[9000][1] == "measured at 4000, the nearest context"


GOOD = {"policy": "streaming", "budget": 512, "context": 4000, "acceptance": 0.8}
REFUSED = {
    "another target": ([GOOD | {"model": "other"}], r"no row for ours \(it has other\)"),
    "twice the same": ([GOOD, GOOD], "two rows for self:streaming:512 at context 4000: keep one"),
    "no acceptance": ([GOOD | {"acceptance": ""}], "row 1: acceptance missing"),
    "no budget": (
        [{k: v for k, v in GOOD.items() if k != "budget"}],
        "row 1: budget missing; found policy, context, acceptance",
    ),
    "too much": ([GOOD, GOOD | {"context": 1, "acceptance": 1.5}], "row 2: .*is 1.5"),
    "beside another's": (
        [GOOD | {"model": "other"}, GOOD | {"model": "ours", "context": 0}],
        "row 2: context=0",
    ),
    "no policy": ([GOOD | {"policy": "streeming"}], "row 1: .*did you mean 'streaming'"),
    "no context": ([GOOD | {"context": "long"}], "row 1: .*'long'"),
    "context 0": ([GOOD | {"context": 0}], "context=0 must be at least 1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_tables_are_errors(what, tmp_path):
    rows, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        read_table(write(tmp_path / "table.csv", rows), "ours")


def test_invalid_files_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.csv does not exist: pass a rate"):
        read_table(tmp_path / "none.csv", "ours")
    for name, text, message in (
        ("a.txt", "", "must be a .csv or .json"),
        ("a.json", "{", "is not JSON"),
        ("b.json", '{"a": 1}', "a list of objects"),
        ("a.csv", "", r"no row for ours \(it has nothing\)"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            read_table(tmp_path / name, "ours")
