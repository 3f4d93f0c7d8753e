"""Acceptance as users give it: read as written, between contexts, and refused where it is none."""

import json

import numpy as np
import pytest

from magicjax.planner.acceptance import Measured, at_context, from_text, read_table


def write(path, rows):
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines))
    return path


def test_a_number_and_one_for_each_rank():
    assert from_text("0.8", "self") == Measured("self", None, ((0.8,),))
    assert from_text("0.6,0.2", "self") == Measured("self", None, ((0.6, 0.2),))
    table, source = at_context([from_text("0.6, 0.2", "self")], 77)["self"]
    assert table.tolist() == [[0.6, 0.2]] and source == "as given"


@pytest.mark.parametrize("text", ["1.2", "-0.1", "nan", "often", "", "0.7,0.6"])
def test_what_is_no_probability_is_refused_and_the_error_says_how_to_give_it(text):
    with pytest.raises(ValueError, match="acceptance.*magicjax generate"):
        from_text(text, "self")


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_tables_of_both_kinds_say_the_same(suffix, tmp_path):
    rows = [
        {"policy": "streaming", "budget": 512, "context": 4000, "acceptance": 0.8},
        {"policy": "snapkv", "budget": 256, "context": 4000, "acceptance": 0.7},
    ]
    path = write(tmp_path / f"table{suffix}", rows)
    assert read_table(path, "any") == [
        Measured("self:streaming:512", 4000, ((0.8,),)),
        Measured("self:snapkv:256", 4000, ((0.7,),)),
    ]


def test_a_row_may_name_its_drafter_its_target_and_several_ranks(tmp_path):
    rows = [
        {"model": "ours", "drafter": "small:d:full", "context": 9, "acceptance": "0.5 0.25"},
        {"model": "other", "drafter": "self", "context": 9, "acceptance": "0.5"},
    ]
    found = read_table(write(tmp_path / "a.csv", rows), "OURS")
    assert found == [Measured("small:d:full", 9, ((0.5, 0.25),))]
    deep = [{"drafter": "look-up", "context": 9, "acceptance": [[0.5, 0.2], [0.4, 0.1]]}]
    found = read_table(write(tmp_path / "b.json", deep), "ours")
    assert found == [Measured("look-up", 9, ((0.5, 0.2), (0.4, 0.1)))]
    published = [{"draft": "self+snapkv", "budget": 9, "context": 9, "acceptance": 0.5}]
    found = read_table(write(tmp_path / "c.csv", published), "ours")
    assert found[0].drafter == "self:snapkv:9"


def test_between_contexts_it_is_linear_in_the_logarithm_and_beyond_them_the_nearest():
    rows = [Measured("d", 1000, ((0.8,),)), Measured("d", 4000, ((0.6, 0.2), (0.5, 0.1)))]
    at = {context: at_context(rows, context)["d"] for context in (500, 1000, 2000, 4000, 9000)}
    assert at[500][0].tolist() == at[1000][0].tolist() == [[0.8, 0.0], [0.8, 0.0]]
    np.testing.assert_allclose(at[2000][0], [[0.7, 0.1], [0.65, 0.05]])
    assert at[4000][0].tolist() == at[9000][0].tolist() == [[0.6, 0.2], [0.5, 0.1]]
    assert at[500][1] == "not measured at 500: that of 1000"
    assert at[1000][1] == "measured at 1000"
    assert at[2000][1] == "between those measured at 1000 and 4000"
    assert at[9000][1] == "not measured at 9000: that of 4000"


GOOD = {"policy": "streaming", "budget": 512, "context": 4000, "acceptance": 0.8}
REFUSED = {
    "another target": ([GOOD | {"model": "other"}], "no row of ours, only of other"),
    "twice the same": ([GOOD, GOOD], "two rows for self:streaming:512 at context 4000: keep one"),
    "no acceptance": ([GOOD | {"acceptance": ""}], "row 1: acceptance missing"),
    "no budget": (
        [{k: v for k, v in GOOD.items() if k != "budget"}],
        "row 1: budget missing; columns are policy, context, acceptance",
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
def test_wrong_tables_are_refused(what, tmp_path):
    rows, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        read_table(write(tmp_path / "table.csv", rows), "ours")


def test_wrong_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.csv does not exist: give a number"):
        read_table(tmp_path / "none.csv", "ours")
    for name, text, message in (
        ("a.txt", "", "must be a .csv or .json"),
        ("a.json", "{", "is not JSON"),
        ("b.json", '{"a": 1}', "a list of objects"),
        ("a.csv", "", "no row of ours, only of nothing"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            read_table(tmp_path / name, "ours")
