import importlib.metadata
import pathlib

import pytest

from experiments import prompts
from experiments.schema import config, fields, method, settings

FOLDER = pathlib.Path(config.__file__).parents[1] / "configs"
OTHERS = {"specinfer_tables.yaml"}  # read by a command of their own
CONFIGS = sorted(path for path in FOLDER.glob("*.yaml") if path.name not in OTHERS)


def read(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return config.read(path)


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("repeets: 3", "repeets", "repeats"),
        ("batches: 3", "batches", "batch"),
        ("slurm: {minuts: 3}", "slurm.minuts", "minutes"),
        ("methods: [{draft: self, bugdet: 64}]", "methods.0.bugdet", "budget"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(tmp_path, text, key, nearest):
    with pytest.raises(fields.ConfigError) as error:
        read(tmp_path, text)
    assert f"{key}: no such key; did you mean {nearest!r}?" in str(error.value)
    assert "mine.yaml" in str(error.value)


def test_all_problems_of_a_file_are_reported(tmp_path):
    with pytest.raises(fields.ConfigError) as error:
        read(tmp_path, "repeats: -1\nnew_tokens: '128'\nbatch: 0")
    message = str(error.value)
    assert "repeats=-1" in message and "new_tokens='128'" in message and "batch=0" in message


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("{draft: small}", "draft=small needs the model's directory"),
        (
            "{draft: small, model: x, budget: 64}",
            "budget=64: with policy 'full' the draft keeps all of its cache; use another "
            "policy, or omit budget",
        ),
        ("{draft: self, policy: sanpkv}", "did you mean 'snapkv'?"),
        ("{draft: self, policy: [h2o, snap]}", "policy='snap' is unknown: use one of"),
        (
            "{draft: prompt-lookup, policy: snapkv}",
            "policy has no effect with draft=prompt-lookup",
        ),
        (
            "{draft: self, policy: full, budget: 64}",
            "budget=64: with policy 'full' the draft reads the target's own cache; use "
            "another policy, or omit budget",
        ),
        ("{draft: self, policy: [snapkv, full], kv_dtype: int8}", "omit kv_dtype"),
        (
            "{draft: self, refresh_every: 4}",
            "refresh_every=4: a streaming cache always pins the first tokens; omit refresh_every, "
            "or use another policy",
        ),
        ("{draft: self, policy: h2o, refresh_every: -1}", "greater than or equal to 0"),
        (
            "{draft: small, model: x, policy: h2o, refresh_every: 4}",
            "refresh_every has no effect with draft=small",
        ),
        ("{draft: self, kv_dtype: int2}", "methods.0.kv_dtype.0='int2'"),
        ("{draft: self, sink_positions: text}", "sink_positions has no effect with draft=self"),
        (
            "{draft: small, model: x, sink_positions: text}",
            "sink_positions has no effect with policy=full: remove it, or set policy=streaming",
        ),
        (
            "{draft: small, model: x, policy: [streaming, h2o], sink_positions: in_cache}",
            "sink_positions='in_cache' needs policy 'streaming' and no kv_dtype",
        ),
        (
            "{draft: self, policy: [h2o, tova], sinks: 4}",
            "sinks has no effect with policy=h2o, tova: remove it, or set policy=streaming",
        ),
        (
            "{draft: self, recent: 32}",
            "recent has no effect with policy=streaming: remove it, or set a policy that chooses",
        ),
        ("{draft: self, model: x}", "model has no effect with draft=self"),
        ("{draft: prompt-lookup, draw: top}", "draw has no effect with draft=prompt-lookup"),
        ("{draft: small, model: x, models: [y, z]}", "models has no effect with draft=small"),
        ("{draft: ensemble}", "models lists 0 members of an ensemble: list at least 2"),
        ("{draft: ensemble, models: [x]}", "models lists 1 members"),
        (
            "{draft: ensemble, models: [x, y], tree: 'chain:1 + chain:2 + chain:3'}",
            "has 3 trees for 2 drafters",
        ),
        ("{draft: self, tree: 'chain:1 + chain:2'}", "has 2 trees for 1 drafters"),
        ("{draft: prompt-lookup, tree: 'expansion:1,2'}", "this tree branches below the root"),
        (
            "{draft: ensemble, models: [x, prompt-lookup], tree: 'expansion:2,2'}",
            "this tree branches below the root",
        ),
        ("{draft: self, draw: with_replacement, tree: 'dynamic:8,3,4'}", "in a dynamic tree would"),
        (
            "{draft: self, verifier: greedy}",
            "verifier='greedy' does not verify sampled tokens: use naive, mss",
        ),
        ("{draft: self, tree: 'dynamic:9,1,2'}", "draft 2 nodes; use at most 3"),
        ("{draft: self, tree: chain:0}", "chain(0): the length must be at least 1"),
        ("{draft: self, tree: 'chain:2,2'}", "'chain:2,2' is not a tree: use chain:4"),
        ("{draft: self, drafters: [prompt-lookup]}", "drafters has no effect with draft=self"),
        ("{draft: auto, policy: snapkv}", "policy has no effect with draft=auto"),
        ("{draft: auto, drafters: [slef]}", "'slef' is not a drafter: use self:streaming:256"),
        ("{draft: auto, tree: 'dynamic:9,4,3'}", "must be a static tree"),
        ("{draft: self, tree: ladder:3}", "'ladder:3' is not a tree: use chain:4"),
        (
            "{draft: self, tree: expansion:2,1}",
            "methods.0.1: a key must be text: quote a value that contains commas, as in {tree: "
            '"expansion:2,2,1"}',
        ),
        ("{draft: self, budgt: 64}", "methods.0.budgt: no such key; did you mean 'budget'?"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(tmp_path, method, message):
    with pytest.raises(fields.ConfigError) as error:
        read(tmp_path, f"methods: [{method}]")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("temperature: 0.5\ntop_k: 3", "temperature, top_k"),
        ("top_p: 0.5", "top_p"),
        ("seed: 0", "seed"),
        ("methods: [{draft: self}, {draft: self, verifier: mss}]", "methods.1.verifier"),
        ("methods: [{draft: self, draw: top}]", "methods.0.draw"),
    ],
)
def test_settings_of_sampling_are_refused_in_greedy_decoding(tmp_path, text, names):
    with pytest.raises(fields.ConfigError) as error:
        read(tmp_path, text)
    assert f"{names} has no effect in greedy decoding: set do_sample" in str(error.value)
    read(tmp_path, f"do_sample: true\n{text}")


def test_prompts_are_text_or_any_of_the_tasks(tmp_path):
    assert read(tmp_path, "repeats: 1").prompts == prompts.STDLIB
    for name in prompts.KINDS:
        assert read(tmp_path, f"prompts: {name}").prompts == name
    with pytest.raises(fields.ConfigError) as error:
        read(tmp_path, "prompts: haystack")
    message = str(error.value)
    assert "prompts='haystack'" in message
    assert all(name in message for name in prompts.KINDS)


def test_a_choice_among_random_prompts_is_refused(tmp_path):
    with pytest.raises(fields.ConfigError, match="candidates has no effect with prompts=random"):
        read(tmp_path, "prompts: random\nagreement_tokens: 0\ncandidates: 4")
    assert read(tmp_path, "prompts: chat\ncandidates: 4").candidates == 4


def test_requests_are_whole_batches_and_unknown_to_auto(tmp_path):
    assert read(tmp_path, "requests: 6\nbatch: 3").requests == 6
    with pytest.raises(fields.ConfigError, match="requests=6 is not a multiple of batch=4"):
        read(tmp_path, "requests: 6\nbatch: 4")
    with pytest.raises(fields.ConfigError, match="not supported with draft=auto"):
        read(tmp_path, "requests: 6\nmethods: [{draft: auto}]")


@pytest.mark.parametrize("kind", ["stdlib", "random"])
def test_a_chat_template_for_text_that_asks_nothing_is_refused(kind, tmp_path):
    other = "" if kind == "stdlib" else "\nagreement_tokens: 0"
    with pytest.raises(
        fields.ConfigError, match=f"chat_template has no effect with prompts={kind}"
    ):
        read(tmp_path, f"prompts: {kind}\nchat_template: no{other}")
    assert read(tmp_path, "prompts: chat\nchat_template: no").chat_template is False


def test_a_policy_of_another_package_has_a_name(tmp_path, monkeypatch):
    point = importlib.metadata.EntryPoint("mine", "magicjax.policies:KNorm", "magicjax.policies")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    method = read(tmp_path, "methods: [{draft: self, policy: [mine, h2o]}]").methods[0]
    assert [options["policy"] for options in method.options(sampled=False)] == ["mine", "h2o"]
    with pytest.raises(
        fields.ConfigError, match="policy='mini' is unknown: .*; did you mean 'mine'"
    ):
        read(tmp_path, "methods: [{draft: self, policy: mini}]")


@pytest.mark.parametrize("text", ["temperature: 0", "top_p: 0", "top_p: 1.1", "top_k: 0"])
def test_parameters_of_sampling_out_of_range_are_refused(tmp_path, text):
    with pytest.raises(fields.ConfigError, match=text.replace(": ", "=")):
        read(tmp_path, f"do_sample: true\n{text}")


def test_the_command_line_overrides_the_file_which_overrides_the_defaults(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("repeats: 5\nnew_tokens: 32\nmethods: [{draft: self, tree: chain:2}]")
    overrides = ["--repeats", "7", "--methods.0.tree", "chain:3", "chain:4"]
    experiment, source = config.from_command_line([str(path), *overrides], "launch")
    assert source == str(path)
    assert experiment.repeats == 7
    assert experiment.new_tokens == 32
    assert experiment.candidates == config.Experiment().candidates
    assert experiment.methods[0].tree == ["chain:3", "chain:4"]
    assert experiment.name == "mine"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (["--methods.0.model", "x"], "model has no effect with draft=self: remove it"),
        (["--repeats", "-1"], "repeats=-1: Input should be greater than or equal to 0"),
        (["--prompts", "stdlb"], "prompts='stdlb': 'stdlb' is not a kind of prompts; did you mean"),
        (["--methods.0.policy", "streming"], "policy='streming' is unknown"),
        (["--slurm.gpus", "-1"], "gpus=-1: Input should be greater than or equal to 0"),
    ],
)
def test_overrides_are_checked_like_the_file(tmp_path, capsys, override, message):
    path = tmp_path / "mine.yaml"
    path.write_text("methods: [{draft: self}]")
    with pytest.raises(fields.ConfigError) as error:
        config.from_command_line([str(path), *override], "launch")
    assert str(error.value).startswith(f"command line:\n  {message}")
    assert "pydantic" not in str(error.value) and "input_value" not in str(error.value)
    assert capsys.readouterr() == ("", "")


def test_an_unknown_option_ends_with_a_suggestion(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("methods: [{draft: self}]")
    with pytest.raises(SystemExit) as end:
        config.from_command_line([str(path), "--repeets", "3"], "launch")
    assert end.value.code == 2
    assert "--repeats" in capsys.readouterr().err


def test_an_option_of_methods_among_the_settings_is_an_error_with_a_hint(tmp_path):
    with pytest.raises(fields.ConfigError, match="budgt: no such key; did you mean 'budget' of m"):
        read(tmp_path, "budgt: 64")


def test_a_command_without_a_file_is_refused():
    with pytest.raises(fields.ConfigError, match="no experiment file: run launch"):
        config.from_command_line([], "launch")


def test_help_describes_every_setting(capsys):
    with pytest.raises(SystemExit) as end:
        config.from_command_line(["--help"], "launch")
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "launch FILE" in text
    for name, field in config.Experiment.model_fields.items():
        if name not in ("grid", "zip", "exclude", "methods", "slurm"):
            assert field.description in text, name


@pytest.mark.parametrize("model", [config.Experiment, config.Slurm, method.Method])
def test_every_setting_is_documented(model):
    assert all(field.description for field in model.model_fields.values())
    for name, known in settings.declared(model).items():
        defaults = [x for x in (known.default, *known.defaults.values()) if x is not None]
        description = model.model_fields[name].description
        texts = [f"{x:g}" if isinstance(x, float) else str(x) for x in defaults]
        assert all(text in description for text in texts), name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_configs_of_the_project_are_valid(path):
    assert config.read(path).name == path.stem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nexclude: [{batch: 1}\nrepeats: 3", "mine.yaml: line 3: "),
        ("name: 'a", "mine.yaml: line 1: found unexpected end of stream"),
        ("", "mine.yaml: the file is empty"),
        ("# nothing\n", "mine.yaml: the file is empty"),
    ],
)
def test_invalid_yaml_is_refused_with_the_line(tmp_path, text, message):
    with pytest.raises(fields.ConfigError, match=message):
        read(tmp_path, text)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path, message in ((tmp_path, "Is a directory"), (tmp_path / "no.yaml", "No such file")):
        with pytest.raises(fields.ConfigError, match=f"{path.name}: {message}"):
            config.read(path)
    path = tmp_path / "bytes.yaml"
    path.write_bytes(b"name: \xff")
    with pytest.raises(fields.ConfigError, match=r"bytes.yaml: not UTF-8 text \(byte 6\)"):
        config.read(path)


def test_a_mapping_with_a_problem_is_not_repeated_in_its_message(tmp_path):
    with pytest.raises(fields.ConfigError) as error:
        read(tmp_path, "methods: [{draft: small}]")
    lines = str(error.value).splitlines()
    assert lines[1] == "  methods.0: draft=small needs the model's directory: set model"


def test_a_file_after_options_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("repeats: 5")
    with pytest.raises(fields.ConfigError, match=f"must come first: launch {path} --repeats 1$"):
        config.from_command_line(["--repeats", "1", str(path)], "launch")


def test_a_file_without_a_mapping_is_refused(tmp_path):
    with pytest.raises(fields.ConfigError, match="expected `key: value` lines, found list"):
        read(tmp_path, "- 1")


def test_a_mesh_is_written_as_on_the_command_line(tmp_path):
    assert read(tmp_path, "mesh: data=2,model=4").mesh == "data=2,model=4"
    with pytest.raises(
        fields.ConfigError, match="'pipe=2' is not a valid mesh: use stage=2,data=2,model=2"
    ):
        read(tmp_path, "mesh: pipe=2")
