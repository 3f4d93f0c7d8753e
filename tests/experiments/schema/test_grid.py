import dataclasses

import pytest

import magicjax
from experiments.runner import workload
from experiments.schema import config, fields, grid, method
from magicjax import policies
from magicjax.drafters import spec

EXPERIMENT = fields.validated(
    config.Experiment,
    {
        "zip": [{"batch": [1, 4, 4], "context": [2048, 2048, 8192]}],
        "methods": [
            {"drafter": "self", "budget": [128, 256], "tree": ["chain:3", "chain:7"]},
            {"drafter": "small:somewhere/draft-1", "tree": "expansion:2,2,1"},
        ],
    },
    "test",
)


def test_a_grid_is_a_product_with_a_group_for_each_combination_of_the_axes():
    groups = grid.groups(EXPERIMENT)
    assert [(g[0].batch, g[0].context) for g in groups] == [(1, 2048), (4, 2048), (4, 8192)]
    for group in groups:
        assert [cell.method for cell in group] == [
            "self:streaming:128, chain:3",
            "self:streaming:128, chain:7",
            "self:streaming:256, chain:3",
            "self:streaming:256, chain:7",
            "small:draft-1:full, expansion:2,2,1",
        ]
        assert len({(cell.batch, cell.context, cell.candidates) for cell in group}) == 1


def test_the_weights_of_drafts_are_in_their_names_and_have_no_agreement():
    drafts = {"drafter": ["full", "small:somewhere/draft-1"], "weights": ["", "int4:32"]}
    (group,) = grid.groups(fields.validated(config.Experiment, {"methods": [drafts]}, "test"))
    assert [cell.method for cell in group] == [
        "full, chain:4",
        "full:weights=int4:32, chain:4",
        "small:draft-1:full, chain:4",
        "small:draft-1:full:weights=int4:32, chain:4",
    ]
    assert [workload._view(cell) for cell in group] == [{}, None, {}, None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": [{"drafter": "self", "tree": ["chain:3", "chain:3"]}]}, "twice: remove one"),
        ({"methods": [{"drafter": "self"}, {"drafter": "self", "sinks": 16}]}, "twice: remove one"),
        ({"grid": {"batch": [1, 1]}}, "the axis batch lists a value twice"),
        ({"methods": [{"drafter": "self"}], "exclude": [{"batch": 9}]}, "exclude: no cell has"),
        (
            {"grid": {"target": ["a/model", "b/model"]}, "methods": []},
            "a/model and b/model have the same name",
        ),
        (
            {"methods": [{"drafter": "small:a/model"}, {"drafter": "small:b/model"}]},
            "two methods have the name",
        ),
    ],
)
def test_the_same_cell_twice_is_refused(change, message):
    with pytest.raises(fields.ConfigError, match=message):
        grid.groups(fields.validated(config.Experiment, change, "test"))


def test_a_cell_parses_its_drafter_and_its_tree_once(monkeypatch):
    (group,) = grid.groups(config.Experiment(methods=[method.Method(tree=["chain:2"])]))
    (cell,) = map(grid.restored, map(grid.resolved, group))  # as in its process
    texts = []
    for name in ("parse_one", "parse_tree"):
        real = getattr(spec, name)
        monkeypatch.setattr(spec, name, lambda text, real=real: texts.append(text) or real(text))
    made = grid.make_drafter(cell, magicjax.load)
    assert made == (magicjax.SelfSpeculation(), magicjax.chain(2))
    assert grid.columns(cell)["nodes"] == 3 and grid.key(cell) and grid.drafters_fingerprint(cell)
    assert texts == ["self:streaming:256", "chain:2"]


def another(value):
    """Returns another value of a setting."""
    if value is None:
        return 1
    return (*value, "self") if isinstance(value, tuple) else value + type(value)(1)


def test_a_key_changes_with_every_setting():
    cell = grid.groups(EXPERIMENT)[0][1]
    keys = {grid.key(cell)}
    for field in dataclasses.fields(cell):
        keys.add(
            grid.key(dataclasses.replace(cell, **{field.name: another(getattr(cell, field.name))}))
        )
    assert len(keys) == 1 + len(dataclasses.fields(cell))
    assert grid.key(cell) == grid.key(dataclasses.replace(cell))


def test_a_key_has_the_names_of_models_and_files_not_their_folders():
    def cell(folder, target="target"):
        methods = [method.Method(drafter=[f"small:{folder}draft"])]
        experiment = config.Experiment(
            target=f"{folder}{target}",
            prompts="files",
            prompt_path=f"{folder}texts",
            methods=methods,
        )
        return grid.groups(experiment)[0][0]

    assert grid.key(cell("a/")) == grid.key(cell("../b/")) == grid.key(cell(""))
    assert grid.key(cell("a/")) != grid.key(cell("a/", "other"))


def test_a_fingerprint_names_the_weights_not_the_folder(tmp_path):
    for folder, weights in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(weights)
    a, b, c = (grid.fingerprint(str(tmp_path / name)) for name in "abc")
    assert a == b != c
    assert grid.fingerprint("opt-125m") == ""


SAMPLED = fields.validated(
    config.Experiment,
    {
        "temperature": 1.0,
        "top_p": 0.9,
        "methods": [
            {
                "drafter": "self",
                "tree": ["chain:3", "dynamic:16,6,4"],
                "verifier": ["mss", "naive"],
            },
            {"drafter": "prompt-lookup", "tree": "expansion:2,1,1"},
            {
                "drafter": "small:zoo/draft-1 + small:zoo/draft-2 + prompt-lookup",
                "tree": ["chain:3", "expansion:2,2 + chain:4 + chain:5"],
            },
            {"drafter": "small:zoo/draft-1", "draw": "with_replacement"},
        ],
    },
    "test",
)


def test_a_sampled_grid_resolves_its_settings_and_asks_the_drafters_for_their_bounds():
    (cells,) = grid.groups(SAMPLED)
    members = "small:draft-1:full + small:draft-2:full + prompt-lookup:4"
    assert [(c.method, c.gamma, c.nodes, c.draw_methods) for c in cells] == [
        ("self:streaming:256, chain:3", 3, 4, "without_replacement"),
        ("self:streaming:256, chain:3, naive", 3, 4, "without_replacement"),
        ("self:streaming:256, dynamic:16,6,4", 6, 16, "top"),
        ("self:streaming:256, dynamic:16,6,4, naive", 6, 16, "top"),
        ("prompt-lookup:4, expansion:2,1,1", 3, 7, "top"),
        (f"{members}, chain:3", 3, 10, "top + without_replacement"),
        (f"{members}, expansion:2,2 + chain:4 + chain:5", 5, 16, "top + without_replacement"),
        ("small:draft-1:full:draw=with_replacement, chain:4", 4, 5, "with_replacement"),
    ]
    same = magicjax.SamplingParams(temperature=1.0, top_p=0.9, max_tokens=SAMPLED.new_tokens)
    assert all(cell.params == same for cell in cells)


def cells_of(*methods):
    return grid.groups(fields.validated(config.Experiment, {"methods": list(methods)}, "test"))[0]


def test_policies_budgets_refreshes_and_dtypes_make_a_cell_of_each_combination():
    cells = cells_of(
        {"drafter": "self", "policy": ["h2o", "snapkv"], "budget": 64, "refresh_every": [None, 4]},
        {"drafter": "self", "policy": ["knorm", "tova"], "kv_dtype": ["", "int8"], "recent": 9},
        {"drafter": "full", "layers": ["", "0-3,9"], "tree": "chain:3"},
        {"drafter": "small:zoo/draft-1", "policy": ["streaming", "knorm", "full"]},
        {"drafter": "small:draft-1:streaming", "sink_positions": "in_cache"},
        {"drafter": "self:snapkv:refresh_every=4", "kv_dtype": "int4"},
    )
    assert [cell.method for cell in cells] == [
        "self:h2o:64, chain:4",
        "self:h2o:64:refresh_every=4, chain:4",
        "self:snapkv:64, chain:4",
        "self:snapkv:64:refresh_every=4, chain:4",
        "self:knorm:256:recent=9, chain:4",
        "self:knorm:256:kv_dtype=int8:recent=9, chain:4",
        "self:tova:256:recent=9, chain:4",
        "self:tova:256:kv_dtype=int8:recent=9, chain:4",
        "full, chain:3",
        "full:layers=0-3,9, chain:3",
        "small:draft-1:streaming:256, chain:4",
        "small:draft-1:knorm:256, chain:4",
        "small:draft-1:full, chain:4",
        "small:draft-1:streaming:256:sink_positions=in_cache, chain:4",
        "self:snapkv:256:refresh_every=4:kv_dtype=int4, chain:4",
    ]


def test_a_cell_makes_the_drafter_of_its_settings():
    draft = magicjax.Model(None, None, name="d")

    def made(**method):
        (cell,) = cells_of(method)
        return grid.make_drafter(cell, lambda directory: draft)[0]

    assert made(drafter="self", policy="snapkv", refresh_every=4, kv_dtype="int8") == (
        magicjax.SelfSpeculation("snapkv", 256, refresh_every=4, kv_dtype="int8")
    )
    assert made(drafter="self", budget=64, sinks=4, refresh_every="", kv_dtype="") == (
        magicjax.SelfSpeculation(magicjax.StreamingLLM(sinks=4), 64)
    )
    assert made(drafter="full") == magicjax.FullCacheSpeculation()
    assert made(drafter="small:d") == magicjax.SmallModel(draft)
    policy = policies.TOVA(recent=8)
    assert made(drafter="small:d", policy="tova", recent=8, kv_dtype="int4") == (
        magicjax.SmallModel(draft, policy=policy, budget=256, kv_dtype="int4")
    )
    assert made(drafter="small:d:streaming", sink_positions="in_cache") == (
        magicjax.SmallModel(draft, policy="streaming", budget=256, sink_positions="in_cache")
    )


def test_an_option_makes_cells_columns_names_and_arguments_of_the_drafter(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("methods: [{drafter: prompt-lookup, max_ngram: [2, 4]}, {drafter: self}]")
    ((two, four, other),) = grid.groups(config.read(path))
    assert [c.method for c in (two, four)] == [
        "prompt-lookup:2, chain:4",
        "prompt-lookup:4, chain:4",
    ]
    values = [grid.columns(c)["max_ngram"] for c in (grid.plain_of(two), two, four, other)]
    assert values == [None, 2, 4, None]
    assert two.speculation[0] == magicjax.PromptLookup(max_ngram=2)
    assert grid.key(two) != grid.key(four)


def test_a_cascade_is_a_kind_of_drafter_with_two_trees():
    text, trees = "prompt-lookup:4 -> self:streaming:64", ["chain:2", "chain:2 -> chain:4"]
    once, often = cells_of({"drafter": text, "tree": trees})
    assert {cell.draft for cell in (once, often)} == {"cascade"}
    assert (once.shape, often.shape) == (magicjax.chain(3).shape, magicjax.chain(4).shape)
    assert often.speculation[0].first_tree == magicjax.chain(2)
    assert once.options == {} and once.models == ()


def test_auto_tries_its_drafters_with_its_tree():
    methods = [
        {"drafter": "auto"},
        {
            "drafter": "auto",
            "drafters": ["small:a/b:streaming:64", "prompt-lookup"],
            "tree": "chain:4",
        },
    ]
    experiment = fields.validated(config.Experiment, {"methods": methods}, "test")
    default, custom = grid.groups(experiment)[0]
    assert (default.method, custom.method) == ("auto, chain:8", "auto, chain:4")
    assert (default.models, custom.models) == ((), ("a/b",))
    assert (custom.gamma, custom.nodes, custom.draw_methods) == (4, 5, "")
    loaded = []

    def load(path):
        loaded.append(path)
        return magicjax.Model(None, None, name=path)

    auto = grid.options(custom, load).drafter
    assert (loaded, auto.tree, auto.profile) == (["a/b"], magicjax.chain(4), None)
    assert [type(d).__name__ for d in auto.drafters] == ["SmallModel", "PromptLookup"]
