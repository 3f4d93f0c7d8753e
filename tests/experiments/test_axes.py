"""Grids are what their axes say: products, lists that go together, cells left out."""

import pytest

from experiments.schema import axes, config, fields, grid


def cells(**settings):
    groups = grid.groups(fields.checked(config.Experiment, settings, "test"))
    return [cell for group in groups for cell in group]


def test_axes_are_combined_and_zipped_lists_go_together():
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


def test_cells_that_exclude_names_are_left_out_by_settings_of_the_draft_too():
    methods = [{"draft": "self", "kv_budget": [64, 128]}, {"draft": "look_up"}]
    where = [{"batch": 4, "draft": "look_up"}, {"kv_budget": [128], "context": 64}]
    found = cells(grid={"batch": [1, 4], "context": [64, 96]}, methods=methods, exclude=where)
    named = {(c.batch, c.context, c.draft, c.cache.kv_budget) for c in found}
    everything = {
        (batch, context, *draft)
        for batch in (1, 4)
        for context in (64, 96)
        for draft in (("none", 0), ("self", 64), ("self", 128), ("look_up", 0))
    }
    gone = {(4, c, "look_up", 0) for c in (64, 96)} | {(b, 64, "self", 128) for b in (1, 4)}
    assert named == everything - gone


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grid": {"batch": []}}, "the axis batch has no values, so the grid is empty"),
        ({"grid": {"bacth": [1]}}, "'bacth' names no setting that a grid can vary; did you mean"),
        ({"grid": {"kv_budget": [64]}}, "kv_budget is a setting of methods: give its values there"),
        ({"grid": {"name": ["a"]}}, "'name' names no setting that a grid can vary"),
        ({"grid": {"batch": [1, 1]}}, "the axis batch names a value twice"),
        ({"grid": {"batch": [1]}, "zip": [{"batch": [2]}]}, "the axis batch is there twice"),
        ({"zip": [{"batch": [1, 2], "context": [64]}]}, "batch has 2, context has 1"),
        ({"grid": {"batch": [1, 0]}}, "grid: with batch=0: batch: Input should be greater"),
        ({"exclude": [{"batch": 5}]}, "no cell has {'batch': 5}"),
        ({"exclude": [{"bacth": 1}]}, "did you mean 'batch'?"),
        ({"exclude": [{"draft": "none"}]}, "exclude leaves no cell of the grid"),
        ({"batch": [1, 2]}, r"several values are an axis: grid: {batch: \[...\]}"),
    ],
)
def test_axes_that_are_wrong_are_told(settings, message):
    with pytest.raises(fields.ConfigError, match=message):
        cells(**settings)


def test_a_setting_of_sampling_may_be_given_for_the_sampled_half_of_a_grid():
    with pytest.raises(fields.ConfigError, match="with do_sample=False: .*seed has no meaning"):
        cells(grid={"do_sample": [False, True]}, seed=1)
    assert [c.seed for c in cells(do_sample=True, grid={"seed": [1, 2]})] == [1, 2]


def test_a_cell_is_the_same_after_it_was_written_down():
    (plain, cell) = cells(methods=[{"draft": "auto", "drafters": ["small:a/b", "self:h2o:64"]}])
    assert grid.restored(grid.resolved(cell)) == cell
    assert grid.key(grid.restored(grid.resolved(cell))) == grid.key(cell)
    assert grid.plain_of(cell) == plain


def test_auto_tries_its_own_tree_also_from_a_command_line(tmp_path):
    path = tmp_path / "auto.yaml"
    path.write_text("methods: [{draft: auto}, {draft: self}]")
    found = config.from_command_line([str(path), "--batch", "2"], "launch")[0]
    ((_, auto, mine),) = grid.groups(found)
    assert (auto.tree, mine.tree) == ("chain:8", "chain:4")


def test_methods_that_tables_could_not_tell_apart_are_refused():
    methods = [{"draft": "small", "model": "a/d"}, {"draft": "small", "model": "b/d"}]
    with pytest.raises(fields.ConfigError, match="two methods are called 'd, chain:4'"):
        cells(methods=methods)


def test_what_a_grid_can_vary_are_settings():
    assert set(axes.VARIED) <= set(config.Experiment.model_fields)


def read(tmp_path, **files):
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return config.read(tmp_path / "top.yaml")


def test_a_base_gives_what_a_file_lacks_but_not_its_name(tmp_path):
    found = read(
        tmp_path,
        top="base: under.yaml\nrepeats: 5",
        under="base: lowest.yaml\nname: under\nbatch: 2\nrepeats: 7",
        lowest="batch: 9\ncontext: 64",
    )
    assert (found.name, found.batch, found.context, found.repeats) == ("top", 2, 64, 5)


def test_a_base_that_is_no_file_or_the_file_itself_is_refused(tmp_path):
    with pytest.raises(fields.ConfigError, match="top.yaml: is its own base, by way of other.yaml"):
        read(tmp_path, top="base: other.yaml", other="base: top.yaml")
    with pytest.raises(fields.ConfigError, match="none.yaml: there is no such file"):
        read(tmp_path, top="base: none.yaml")
    with pytest.raises(fields.ConfigError, match=r"base=\['a.yaml'\]: give the path of one file"):
        read(tmp_path, top="base: [a.yaml]")


def test_the_command_line_wins_over_the_axes_of_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("grid: {batch: [1, 2], context: [64, 128]}\nzip: [{seed: [1], repeats: [2]}]")

    def given(*arguments):
        return config.from_command_line([str(path), *arguments], "launch")[0]

    assert given().grid == {"batch": [1, 2], "context": [64, 128]}
    assert given("--batch", "4").grid == {"context": [64, 128]}
    assert given("--batch", "4").batch == 4
    found = given("--grid.batch", "8", "16", "--grid.new-tokens=32", "--repeats", "1")
    assert found.grid == {"batch": [8, 16], "context": [64, 128], "new_tokens": [32]}
    assert found.zip == [{"seed": [1]}] and found.repeats == 1
    assert given("--name", "context").grid == {"batch": [1, 2], "context": [64, 128]}
    flags = tmp_path / "flags.yaml"
    flags.write_text("grid: {phases: [true, false]}")
    assert not config.from_command_line([str(flags), "--no-phases"], "launch")[0].grid
    with pytest.raises(fields.ConfigError, match=r"--grid.mesh \[: no value as YAML has them"):
        given("--grid.mesh", "[")
    with pytest.raises(fields.ConfigError, match="--batch and --grid.batch are both given"):
        given("--batch", "4", "--grid.batch", "1")
