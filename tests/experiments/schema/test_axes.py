"""Grids are products of axes and zipped lists, without excluded cells."""

import pytest

from experiments.schema import config, fields, grid


def cells(**settings):
    groups = grid.groups(fields.validated(config.Experiment, settings, "test"))
    return [cell for group in groups for cell in group]


def test_axes_are_combined_and_zipped_lists_vary_jointly():
    found = cells(
        grid={"batch": [1, 4], "context": [64, 128]},
        zip=[{"new_tokens": [16, 32], "repeats": [1, 2]}],
    )
    assert [(c.batch, c.context, c.new_tokens, c.repeats) for c in found] == [
        (batch, context, new, repeats)
        for batch in (1, 4)
        for context in (64, 128)
        for new, repeats in ((16, 1), (32, 2))
    ]


def test_exclude_removes_cells_also_by_options_of_methods():
    methods = [{"drafter": "self", "budget": [64, 128]}, {"drafter": "prompt-lookup"}]
    where = [{"batch": 4, "drafter": "prompt-lookup"}, {"budget": [128], "context": 64}]
    found = cells(grid={"batch": [1, 4], "context": [64, 96]}, methods=methods, exclude=where)
    named = {(c.batch, c.context, c.draft, c.options.get("budget")) for c in found}
    everything = {
        (batch, context, *draft)
        for batch in (1, 4)
        for context in (64, 96)
        for draft in (("self", 64), ("self", 128), ("prompt-lookup", None))
    }
    gone = {(4, c, "prompt-lookup", None) for c in (64, 96)} | {
        (b, 64, "self", 128) for b in (1, 4)
    }
    assert named == everything - gone


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grid": {"batch": []}}, "the axis batch has no values, so the grid is empty"),
        ({"grid": {"bacth": [1]}}, "'bacth' is not a setting that a grid can vary; did you mean"),
        ({"grid": {"budget": [64]}}, "budget is an option of methods: list its values there"),
        ({"grid": {"batch": [1]}, "zip": [{"batch": [2]}]}, "the axis batch occurs twice"),
        ({"zip": [{"batch": [1, 2], "context": [64]}]}, "batch has 2, context has 1"),
        ({"grid": {"batch": [1, 0]}}, r"grid: with batch=0:\n  batch=0: Input should be greater"),
        ({"exclude": [{"drafter": "none"}]}, "exclude leaves no cell of the grid"),
        ({"batch": [1, 2]}, r"several values are an axis: grid: {batch: \[...\]}"),
    ],
)
def test_wrong_axes_are_refused(settings, message):
    with pytest.raises(fields.ConfigError, match=message):
        cells(**settings)


def test_a_setting_of_sampling_needs_a_temperature_in_every_combination():
    with pytest.raises(fields.ConfigError, match=r"with temperature=0:\n  seed has no effect"):
        cells(grid={"temperature": [0, 1]}, seed=1)
    assert [c.seed for c in cells(temperature=1, grid={"seed": [1, 2]})] == [1, 2]


def test_a_cell_is_restored_from_its_resolved_settings():
    (cell,) = cells(methods=[{"drafter": "auto", "drafters": ["small:a/b", "self:h2o:64"]}])
    assert grid.restored(grid.resolved(cell)) == cell
    assert grid.key(grid.restored(grid.resolved(cell))) == grid.key(cell)
    assert [grid.plain_of(cell)] == cells()


def read(tmp_path, **files):
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return config.read(tmp_path / "top.yaml")


def test_a_base_provides_missing_keys_except_the_name_and_exclude(tmp_path):
    found = read(
        tmp_path,
        top="base: under.yaml\nrepeats: 5",
        under="base: lowest.yaml\nname: under\nbatch: 2\nexclude: [{batch: 2}]",
        lowest="batch: 9\ncontext: 64\nmethods: []\nexclude: [{batch: 9}]",
    )
    assert (found.name, found.batch, found.context, found.repeats) == ("top", 2, 64, 5)
    assert found.exclude == []


def test_the_command_line_overrides_the_axes_of_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "grid: {batch: [1, 2], context: [64, 128]}\nzip: [{seed: [1], repeats: [2]}]\nmethods: []"
    )

    def read_with(*arguments):
        return config.from_command_line([str(path), *arguments], "launch")

    assert read_with().grid == {"batch": [1, 2], "context": [64, 128]}
    assert read_with("--batch", "4").grid == {"context": [64, 128]}
    assert read_with("--batch", "4").batch == 4
    found = read_with("--grid.batch", "8", "16", "--grid.new-tokens=32", "--repeats", "1")
    assert found.grid == {"batch": [8, 16], "context": [64, 128], "new_tokens": [32]}
    assert found.zip == [{"seed": [1]}] and found.repeats == 1
    assert read_with("--name", "context").grid == {"batch": [1, 2], "context": [64, 128]}
    flags = tmp_path / "flags.yaml"
    flags.write_text("grid: {phases: true, batch: [1, 2]}\nmethods: []")
    made = config.from_command_line([str(flags)], "launch")
    assert made.grid == {"phases": [True], "batch": [1, 2]}  # one value is a list of one
    made = config.from_command_line([str(flags), "--no-phases"], "launch")
    assert made.grid == {"batch": [1, 2]}
    with pytest.raises(fields.ConfigError, match=r"--grid.mesh \[: not a YAML value"):
        read_with("--grid.mesh", "[")
    with pytest.raises(fields.ConfigError, match="--batch and --grid.batch are both set"):
        read_with("--batch", "4", "--grid.batch", "1")
