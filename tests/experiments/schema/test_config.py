import dataclasses
import pathlib

import pytest

from experiments.schema import config, fields
from magicjax import policies

FOLDER = pathlib.Path(config.__file__).parents[1] / "configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))


def read(tmp_path, text, more="\nmethods: []"):
    path = tmp_path / "mine.yaml"
    path.write_text(text if "methods:" in text else text + more)
    return config.read(path)


def test_a_file_without_methods_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_text("batch: 2")
    with pytest.raises(
        config.ConfigError, match=r"methods is missing: .*methods: \[\{drafter: self"
    ):
        config.read(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("repeets: 3", "repeets", "repeats"),
        ("batches: 3", "batches", "batch"),
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
        ("{drafter: small}", "drafter 'small' needs a model: write small:PATH"),
        ("{drafter: self, policy: sanpkv}", "did you mean 'snapkv'?"),
        (
            "{drafter: prompt-lookup, policy: snapkv}",
            "policy: no such key with drafter=prompt-lookup (keys: drafter, drafters, profile, "
            "tree, verifier, adaptive, max_ngram, min_ngram)",
        ),
        ("{drafter: small:x + small:y, budget: 64}", "budget could belong to any member of"),
        ("{drafter: self, tree: 'chain:1 + chain:2'}", "has 2 trees for 1 drafters"),
        ("{drafter: self, tree: 'chain:1 -> chain:2'}", "does not fit the drafter: use one tree"),
        (
            "{drafter: self, verifier: greedy}",
            "verifier='greedy' does not verify sampled tokens (verifiers: naive, mss",
        ),
        (
            "{drafter: self, drafters: [prompt-lookup]}",
            "drafters has no effect without drafter=auto",
        ),
        ("{drafter: auto, policy: snapkv}", "policy has no effect with drafter=auto"),
        ("{drafter: self, tree: [4]}", "methods.0.tree.0=4: it must be text, as in tree: chain:4"),
        (
            "self",
            "methods.0='self': it must be `key: value` lines, as in methods: [{drafter: self:str",
        ),
        (
            "{drafter: self, tree: expansion:2,1}",
            "methods.0.1: a key must be text: quote a value that contains commas, as in {tree: "
            '"expansion:2,2,1"}',
        ),
        (
            "{drafter: self, budgt: 64}",
            "budgt: no such key with drafter=self; did you mean 'budget'?",
        ),
    ],
)
def test_options_that_do_not_fit_together_are_refused(tmp_path, method, message):
    with pytest.raises(fields.ConfigError) as error:
        read(tmp_path, f"methods: [{method}]")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("methods: self", "methods='self': it must be a list, as in methods: [{drafter: self:stre"),
        ("batch: two", "batch='two': it must be an integer"),
    ],
)
def test_values_of_a_wrong_type_are_refused_in_plain_words(tmp_path, text, message):
    with pytest.raises(fields.ConfigError) as error:
        read(tmp_path, text)
    assert str(error.value).splitlines()[1].startswith(f"  {message}")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("top_k: 3\nseed: 1", "top_k, seed"),
        ("methods: [{drafter: self, draw: top}]", "methods.0.draw"),
    ],
)
def test_settings_of_sampling_are_refused_in_greedy_decoding(tmp_path, text, names):
    with pytest.raises(fields.ConfigError) as error:
        read(tmp_path, text)
    assert f"{names} has no effect in greedy decoding: set temperature" in str(error.value)
    read(tmp_path, f"temperature: 1\n{text}")


@pytest.mark.parametrize("kind", ["stdlib", "random"])
def test_a_chat_template_for_text_that_asks_nothing_is_refused(kind, tmp_path):
    other = "" if kind == "stdlib" else "\nagreement_tokens: 0"
    with pytest.raises(
        fields.ConfigError, match=f"chat_template has no effect with prompts={kind}"
    ):
        read(tmp_path, f"prompts: {kind}\nchat_template: no{other}")
    assert read(tmp_path, "prompts: chat\nchat_template: no").chat_template is False


SERVED = "slots: 2\n"
REFUSED = [
    ("prompts: haystack", "prompts='haystack'"),
    ("prompts: random\ncandidates: 4", "candidates has no effect with prompts=random"),
    (
        "prompts: random\nmethods: [{drafter: self}]",
        "agreement_tokens has no effect with prompts=random",
    ),
    ("requests: 6\nbatch: 4", "requests=6 is not a multiple of batch=4"),
    ("requests: 6\nmethods: [{drafter: auto}]", "requests is not supported with drafter=auto"),
    ("temperature: -1", "temperature=-1"),
    ("temperature: .inf", "temperature=inf"),
    ("temperature: 1\nseed: -1", "seed=-1"),
    ("temperature: 1\nseed: 4294967296", "seed=4294967296"),
    ("temperature: 1\ntop_p: 1.1", "top_p=1.1"),
    ("base: mine.yaml", "mine.yaml is its own base, through mine.yaml: remove one `base`"),
    ("base: none.yaml", "none.yaml: no such file"),
    ("base: [a.yaml]", "base=['a.yaml'] must be the path of one file"),
    ("mesh: pipe=2", "'pipe=2' is not a valid mesh: use stage=2,data=2,model=2"),
    (SERVED + "batch: 4", "batch has no effect with slots: remove it"),
    (SERVED + "methods: [{drafter: auto}]", "drafter=auto is not supported with slots"),
    (
        SERVED + "temperature: 1\nmethods: [{drafter: self, adaptive: yes}]",
        "methods.0: adaptive with a temperature changes texts unless",
    ),
    (SERVED + "mesh: stage=2", "mesh=stage=2 with slots: remove stage, or omit slots"),
    ("slots: 3\nmesh: data=2", "slots=3 is not a multiple of data=2 of the mesh"),
    (SERVED + "prompts: chat\nmin_context: 5", "min_context shortens texts, not prompts=chat"),
    (SERVED + "min_new_tokens: 9999", "min_new_tokens=9999 is larger than new_tokens="),
    ("rank: 1", "coordinator, processes and rank have no effect without distributed"),
    ("launcher: ray\njobs: 2", "jobs has no effect with launcher=ray"),
    ("launcher: in_process\nmemory_limit_gb: 1", "memory_limit_gb: no effect with launcher=in_pro"),
    ("launcher: ray\nworker: 0/2", "worker divides the cells that Ray distributes"),
    ("worker: 2/2", "give I/N, with I from 0 to N - 1"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_settings_that_do_not_fit_together_are_refused(tmp_path, text, message):
    with pytest.raises(fields.ConfigError) as error:
        read(tmp_path, text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (["--methods.0.profile", "x"], "profile has no effect without drafter=auto: remove it"),
        (["--repeats", "-1"], "repeats=-1: Input should be greater than or equal to 0"),
        (["--prompts", "stdlb"], "prompts='stdlb': 'stdlb' is not a kind of prompts; did you mean"),
    ],
)
def test_overrides_are_checked_like_the_file(tmp_path, capsys, override, message):
    path = tmp_path / "mine.yaml"
    path.write_text("methods: [{drafter: self}]")
    with pytest.raises(fields.ConfigError) as error:
        config.from_command_line([str(path), *override], "launch")
    assert str(error.value).startswith(f"command line:\n  {message}")
    assert capsys.readouterr() == ("", "")


def test_a_command_without_its_file_first_is_refused(tmp_path):
    with pytest.raises(fields.ConfigError, match="no experiment file: run launch"):
        config.from_command_line([], "launch")
    path = tmp_path / "mine.yaml"
    path.write_text("repeats: 5")
    with pytest.raises(fields.ConfigError, match=f"must come first: launch {path} --repeats 1$"):
        config.from_command_line(["--repeats", "1", str(path)], "launch")
    with pytest.raises(fields.ConfigError, match="expected `key: value` lines, found list"):
        read(tmp_path, "- 1", more="")


@dataclasses.dataclass(frozen=True)
class Mine(policies.KNorm):
    pass


def test_paths_in_a_file_are_relative_to_it_and_those_of_commands_are_not(tmp_path, monkeypatch):
    for folder in ("models/t", "models/d", "configs/deeper", "work/models/t"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    text = (
        "target: ../models/t\nresults: ../out\nprompts: files\nprompt_path: texts.txt\n"
        "methods:\n"
        "  - {drafter: ['small:../models/d:full', 'small:../models/d + prompt-lookup:3']}\n"
        "  - {drafter: auto, drafters: ['small:../models/d'], profile: mine.json}\n"
        "  - {drafter: small:opt-125m}\n"
        "exclude: [{target: ../models/t, model: [../models/d]}]\n"
    )
    (tmp_path / "configs" / "texts.txt").write_text("x")
    (tmp_path / "configs" / "mine.json").write_text("{}")
    (tmp_path / "configs" / "mine.yaml").write_text(text)
    (tmp_path / "configs" / "deeper" / "more.yaml").write_text("base: ../mine.yaml")
    for file in ("mine", "deeper/more"):
        made = config.read(tmp_path / "configs" / f"{file}.yaml")
        assert made.target == str(tmp_path / "models" / "t")
        assert made.results == str(tmp_path / "out")
        assert made.prompt_path == str(tmp_path / "configs" / "texts.txt")
        draft = f"small:{tmp_path}/models/d"
        assert made.methods[0].drafter == [f"{draft}:full", f"{draft} + prompt-lookup:3"]
        assert made.methods[1].drafters == [draft]
        assert made.methods[1].profile == str(tmp_path / "configs" / "mine.json")
        assert made.methods[2].drafter == ["small:opt-125m"]
        if file == "mine":  # `exclude` is not inherited
            paths = {"target": made.target, "model": [f"{tmp_path}/models/d"]}
            assert made.exclude == [paths]
    assert config.read(pathlib.Path("../configs/mine.yaml")).target == "../models/t"
    arguments = ["../configs/mine.yaml", "--target", "models/t"]
    assert config.from_command_line(arguments, "launch").target == "models/t"


def test_the_command_line_overrides_the_file_which_overrides_the_defaults(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("repeats: 5\nnew_tokens: 32\nmethods: [{drafter: self, tree: chain:2}]")
    overrides = ["--repeats", "7", "--methods.0.tree", "chain:3", "chain:4"]
    experiment = config.from_command_line([str(path), *overrides], "launch")
    assert experiment.repeats == 7
    assert experiment.new_tokens == 32
    assert experiment.candidates == config.Experiment().candidates
    assert experiment.methods[0].tree == ["chain:3", "chain:4"]
    assert experiment.name == "mine"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_configs_of_the_project_are_valid(path):
    assert config.read(path).name == path.stem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nexclude: [{batch: 1}\nrepeats: 3", "mine.yaml: line 3: "),
        ("grid: {context: 512, 1024}", "grid.1024: a key must be text: "),
        ("name: 'a", "mine.yaml: line 1: found unexpected end of stream"),
        ("", "mine.yaml: the file is empty"),
        ("# nothing\n", "mine.yaml: the file is empty"),
    ],
)
def test_invalid_yaml_is_refused_with_the_line(tmp_path, text, message):
    with pytest.raises(fields.ConfigError, match=message):
        read(tmp_path, text, more="")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path, message in ((tmp_path, "Is a directory"), (tmp_path / "no.yaml", "No such file")):
        with pytest.raises(fields.ConfigError, match=f"{path.name}: {message}"):
            config.read(path)
    path = tmp_path / "bytes.yaml"
    path.write_bytes(b"name: \xff")
    with pytest.raises(fields.ConfigError, match=r"bytes.yaml: not UTF-8 text \(byte 6\)"):
        config.read(path)


def test_help_shows_the_values_of_the_file_or_the_defaults_if_it_is_wrong(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    for drafter, expected in {
        "self:streaming:64": ("values of", "(default: 7)"),
        "no_such_module.Drafter": ("settings without a file", "(default: 1)"),
    }.items():
        path.write_text(f"{{batch: 7, methods: [{{drafter: {drafter}}}]}}")
        with pytest.raises(SystemExit) as end:
            config.from_command_line([str(path), "--help"], "launch")
        printed = capsys.readouterr().out
        assert end.value.code == 0 and all(words in printed for words in expected)
