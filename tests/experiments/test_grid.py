import dataclasses

import pytest

from experiments import config, grid

EXPERIMENT = config.validate(
    {
        "shapes": [{"batch": [1, 4], "context": 2048}, {"batch": 4, "context": 8192}],
        "methods": [
            {"draft": "self", "kv_budget": [128, 256], "tree": ["chain:3", "chain:7"]},
            {"draft": "small", "model": "somewhere/draft-1", "tree": "expansion:2,2,1"},
        ],
    },
    "test",
)


def test_a_grid_is_the_product_of_its_lists_with_plain_decoding_first_in_each_group():
    groups = grid.groups(EXPERIMENT)
    assert [(g[0].batch, g[0].context) for g in groups] == [(1, 2048), (4, 2048), (4, 8192)]
    for group in groups:
        assert [cell.method for cell in group] == [
            "plain",
            "self streaming 128, chain:3",
            "self streaming 256, chain:3",
            "self streaming 128, chain:7",
            "self streaming 256, chain:7",
            "draft-1, expansion:2,2,1",
        ]
        assert len({(cell.batch, cell.context, cell.candidates) for cell in group}) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shapes": [{"batch": [1, 1]}]}, "twice"),
        ({"methods": [{"draft": "self", "tree": ["chain:3", "chain:3"]}]}, "twice: remove one"),
        ({"methods": [{"draft": "self"}, {"draft": "self", "sinks": 16}]}, "twice: remove one"),
    ],
)
def test_the_same_cell_twice_is_refused(change, message):
    with pytest.raises(config.ConfigError, match=message):
        grid.groups(config.validate(change, "test"))


def test_a_key_changes_with_every_setting_and_with_the_surroundings():
    cell = grid.groups(EXPERIMENT)[0][1]
    keys = {grid.key(cell, {"device": "a"}), grid.key(cell, {"device": "b"})}
    for field in dataclasses.fields(cell):
        value = getattr(cell, field.name)
        other = (*value, "x") if isinstance(value, tuple) else value + type(value)(1)
        keys.add(grid.key(dataclasses.replace(cell, **{field.name: other}), {"device": "a"}))
    assert len(keys) == 2 + len(dataclasses.fields(cell))
    assert grid.key(cell, {"device": "a"}) == grid.key(cell, {"device": "a"})


def test_a_fingerprint_names_the_weights_not_the_folder(tmp_path):
    for folder, weights in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(weights)
    a, b, c = (grid.fingerprint(str(tmp_path / name)) for name in "abc")
    assert a == b != c
    assert grid.fingerprint("a-preset") == ""


@pytest.mark.parametrize(
    ("name", "gamma", "nodes"),
    [("chain:1", 1, 2), ("chain:7", 7, 8), ("expansion:2,2,1", 3, 11), ("expansion:1,3", 2, 5)],
)
def test_a_tree_has_the_depth_and_nodes_that_its_name_says(name, gamma, nodes):
    cell = dataclasses.replace(grid.groups(EXPERIMENT)[0][1], tree=name)
    assert (cell.gamma, cell.nodes) == (gamma, nodes)


SAMPLED = config.validate(
    {
        "do_sample": True,
        "top_p": 0.9,
        "methods": [
            {"draft": "self", "tree": ["chain:3", "dynamic:16,6,4"], "verifier": ["mss", "naive"]},
            {"draft": "look_up", "tree": "expansion:2,1,1"},
            {
                "draft": "ensemble",
                "models": ["zoo/draft-1", "zoo/draft-2", "look_up"],
                "tree": ["chain:3", "expansion:2,2 + chain:4 + chain:5"],
            },
            {"draft": "small", "model": "zoo/draft-1", "draw": "with_replacement"},
        ],
    },
    "test",
)


def test_a_sampled_grid_resolves_its_settings_and_asks_the_drafters_for_their_bounds():
    (cells,) = grid.groups(SAMPLED)
    members = "draft-1 + draft-2 + look_up"
    assert [(c.method, c.gamma, c.nodes, c.drawings) for c in cells] == [
        ("plain", 0, 1, ""),
        ("self streaming 256, chain:3, mss", 3, 4, "without_replacement"),
        ("self streaming 256, chain:3, naive", 3, 4, "without_replacement"),
        ("self streaming 256, dynamic:16,6,4, mss", 6, 16, "top"),
        ("self streaming 256, dynamic:16,6,4, naive", 6, 16, "top"),
        ("look-up, expansion:2,1,1, mss", 3, 7, "top"),
        (f"{members}, chain:3, mss", 3, 10, "top + without_replacement"),
        (f"{members}, expansion:2,2 + chain:4 + chain:5, mss", 5, 16, "top + without_replacement"),
        ("draft-1, chain:4, with replacement, mss", 4, 5, "with_replacement"),
    ]
    same = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 0.9, "seed": 0}
    assert all(cell.sampling == same for cell in cells)


def test_a_greedy_cell_gives_generate_no_setting_of_sampling():
    cells = grid.groups(EXPERIMENT)[0]
    assert all((c.sampling, c.drawings, c.verifier) == ({}, "", "") for c in cells)


def test_plain_decoding_is_a_tree_of_only_a_root():
    plain = grid.groups(EXPERIMENT)[0][0]
    assert (plain.gamma, plain.nodes, plain.tree) == (0, 1, "")
