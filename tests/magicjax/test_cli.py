"""The command line on a tiny model directory: what it prints where, and how it refuses."""

import logging
import pathlib
import re
import subprocess
import sys

import pytest

import magicjax
import models
from magicjax import cli, compilation
from tests.magicjax import tiny

PROMPT = "def add(first, second):\n    return first + second — été\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny random model with a byte-level tokenizer, as a Hugging Face directory."""
    import tokenizers
    import transformers

    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([PROMPT * 3], trainer)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<end>")
    module = models.build(tiny.config(vocab_size=len(wrapped)))
    path = tmp_path_factory.mktemp("models") / "tiny"
    models.save_checkpoint(
        path, module, models.init_params(module, 0), eos_token_ids=[0], tokenizer=wrapped
    )
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `magicjax ARGUMENTS` in this process; returns (exit code, output, errors)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["magicjax", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


def expected_text(directory, **options) -> str:
    target = magicjax.load(directory)
    return magicjax.generate(target, [PROMPT], max_new_tokens=20, **options).texts[0]


def test_it_prints_the_text_and_reports_acceptance_beside_it(directory, run):
    code, out, err = run(
        *("generate", "--target", directory, "--prompt", PROMPT, "--max-new-tokens", 20),
        *("--drafter", "self:streaming:32", "--tree", "chain:3", "--show-tree"),
    )
    assert code == 0
    drawing, _, text = out.partition("└─3\n")
    assert drawing.startswith("4 nodes, depth 3\n0\n└─1\n  └─2\n")
    assert text == expected_text(directory) + "\n"
    first = r"^20 tokens, 19 of them decoded in [\d.]+ s: [\d.]+ tokens/s \(\d+ rounds, .*xla\)$"
    assert re.search(first, err, re.M)
    assert re.search(r"^tau \d\.\d\d tokens a round, of 4.0 nodes$", err, re.M)
    assert re.search(r"^accepted by depth  1: [\d.]+  2: [\d.]+  3: [\d.]+$", err, re.M)
    assert re.search(r"^  where reached    1: [\d.]+  2: [\d.]+  3: [\d.]+$", err, re.M)
    assert re.search(r"^KV cache: target [\d.]+ MB, draft [\d.]+ MB$", err, re.M)


def test_a_small_model_and_a_prompt_from_a_file_give_the_same_text(directory, run, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT, "utf-8")
    code, out, err = run(
        *("generate", "--target", directory, "--prompt-file", prompt, "--max-new-tokens", 20),
        *("--drafter", f"small:{directory}", "--tree", "chain:3"),
    )
    assert (code, out) == (0, expected_text(directory) + "\n")
    assert "1: 1.00  2: 1.00" in err  # the drafter is the target


def test_plain_decoding_reports_no_acceptance(directory, run):
    code, out, err = run(
        "generate", "--target", directory, "--prompt", PROMPT, "--max-new-tokens", 20
    )
    assert (code, out) == (0, expected_text(directory) + "\n")
    assert "accepted by depth" not in err


def test_without_a_round_there_is_no_tau(directory, run):
    code, out, err = run(
        *("generate", "--target", directory, "--prompt", PROMPT, "--max-new-tokens", 1),
        *("--drafter", "look-up", "--tree", "chain:2"),
    )
    assert code == 0
    assert err.startswith("1 token, from prefill (attention: ")
    assert "tau" not in err


SAMPLING = {
    "plain": ([], {}),
    "filtered": (
        ["--temperature", "0.7", "--top-k", "9", "--top-p", "0.9", "--seed", "5"],
        dict(temperature=0.7, top_k=9, top_p=0.9, seed=5),
    ),
    "a verifier and a draw": (
        [
            *("--drafter", "self:streaming:32", "--tree", "expansion:2,1"),
            *("--draw", "with_replacement", "--verifier", "mss_with_replacement"),
        ],
        dict(
            drafter=magicjax.SelfSpeculation("streaming", 32, "with_replacement"),
            tree=magicjax.expansion((2, 1)),
            verifier="mss_with_replacement",
        ),
    ),
    "two drafters, a tree each": (
        [
            *("--drafter", "self:streaming:32", "--drafter", "look-up:3"),
            *("--tree", "dynamic:4,2,2", "--tree", "chain:3"),
        ],
        dict(
            drafter=magicjax.Ensemble(
                (magicjax.SelfSpeculation("streaming", 32), magicjax.LookUp(3)),
                (magicjax.DynamicTree(4, 2, 2), magicjax.chain(3)),
            )
        ),
    ),
}


@pytest.mark.parametrize("what", SAMPLING)
def test_options_are_those_of_generate(what, directory, run):
    """The very text, which the seed, the rule and the draws decide together."""
    arguments, options = SAMPLING[what]
    code, out, err = run(
        *("generate", "--target", directory, "--prompt", PROMPT, "--max-new-tokens", 20),
        *("--do-sample", *arguments),
    )
    assert (code, out) == (0, expected_text(directory, do_sample=True, **options) + "\n")


SPARSE = {
    "self, refreshed and quantized": (
        [
            *("--drafter", "self:snapkv:32", "--tree", "chain:3"),
            *("--refresh-every", "2", "--kv-dtype", "int8"),
        ],
        r"tau .*, draft 0\.0 MB$",
    ),
    "self, full": (
        ["--drafter", "self:full", "--tree", "chain:3"],
        r"1: 1\.00  2: 1\.00  3: 1\.00",
    ),
    "small, sparse": (
        [
            *("--drafter", "small:DIR:streaming:48", "--tree", "chain:3"),
            *("--sink-positions", "in_cache"),
        ],
        r"accepted by depth",
    ),
    "an option for one of two": (
        [
            *("--drafter", "self:h2o:32", "--drafter", "small:DIR", "--tree", "chain:2"),
            *("--refresh-every", "2", "--kv-dtype", "int4"),
        ],
        r"accepted by depth",
    ),
}


@pytest.mark.parametrize("what", SPARSE)
def test_sparse_caches_give_the_same_text(what, directory, run):
    arguments, reported = SPARSE[what]
    code, out, err = run(
        *("generate", "--target", directory, "--prompt", PROMPT, "--max-new-tokens", 20),
        *(argument.replace("DIR", str(directory)) for argument in arguments),
    )
    assert (code, out) == (0, expected_text(directory) + "\n")
    assert re.search(reported, err, re.M | re.S)


def test_several_drafters_share_one_tree_or_have_one_each():
    def made(*arguments):
        needed = ("generate", "--target", "t", "--prompt", "p")
        return cli._speculation(cli._parser().parse_args([*needed, *arguments]))

    two = ("--drafter", "self:streaming:32", "--drafter", "look-up")
    members = (magicjax.SelfSpeculation("streaming", 32), magicjax.LookUp())
    chain, bush = magicjax.chain(2), magicjax.expansion((2, 1))
    assert made(*two) == (magicjax.Ensemble(members), None)
    assert made(*two, "--tree", "chain:2") == (magicjax.Ensemble(members), chain)
    trees = ("--tree", "expansion:2,1", "--tree", "chain:2")
    assert made(*two, *trees) == (magicjax.Ensemble(members, (bush, chain)), None)
    assert made("--drafter", "look-up", "--tree", "chain:2") == (magicjax.LookUp(), chain)
    assert made() == (None, None)


class Letters:
    """A tokenizer whose tokens are bytes, so that a character may take several."""

    def decode(self, tokens, skip_special_tokens):
        assert skip_special_tokens
        return bytes(tokens).decode("utf-8", "replace")


def test_a_character_of_several_tokens_is_printed_when_it_is_whole(capsys):
    import numpy as np

    def rounds():
        for byte in "né!".encode():
            yield [np.array([byte])]
        return "the output"

    shown = []

    class Screen:
        def write(self, text):
            shown.append(text)

        def flush(self):
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", Screen())
        assert cli._print_stream(rounds(), Letters()) == "the output"
    assert [text for text in shown if text] == ["n", "é", "!", "\n"]


REFUSED = {
    "no target": (["--prompt", "a"], "the following arguments are required: --target"),
    "no prompt": (["--target", "DIR"], "one of the arguments --prompt --prompt-file is required"),
    "two prompts": (
        ["--target", "DIR", "--prompt", "a", "--prompt-file", "b"],
        "not allowed with argument",
    ),
    "no such directory": (["--target", "./none", "--prompt", "a"], "./none is no directory"),
    "no such preset": (["--target", "opt-125", "--prompt", "a"], "the nearest is 'opt-125m'"),
    "nothing of that name": (
        ["--target", "nosuch", "--prompt", "a"],
        "'nosuch' is no directory, and preset 'nosuch' does not exist: all are llama-68m,",
    ),
    "a directory without a model": (
        ["--target", "PARENT", "--prompt", "a"],
        "config.json does not exist: a checkpoint directory must hold it",
    ),
    "a preset without a tokenizer": (
        ["--target", "opt-125m", "--prompt", "a"],
        "opt-125m has no tokenizer, and text needs one: give a directory that has one with "
        "--tokenizer",
    ),
    "no such file": (
        ["--target", "DIR", "--prompt-file", "/none"],
        "--prompt-file /none does not exist",
    ),
    "a directory for a file": (
        ["--target", "DIR", "--prompt-file", "PARENT"],
        "is a directory: give a file of text",
    ),
    "a file of bytes": (
        ["--target", "DIR", "--prompt-file", "BYTES"],
        "bytes.bin is not UTF-8 text: byte 0xff at position 2",
    ),
    "no such option": (
        ["--taget", "DIR", "--prompt", "a"],
        "magicjax generate: error: no such option: --taget; did you mean --target?",
    ),
    "half an option": (
        ["--target", "DIR", "--prompt", "a", "--temp", "2"],
        "no such option: --temp",
    ),
    "a stray word": (["--target", "DIR", "--prompt", "a", "word"], "no such option: word"),
    "no such dtype": (["--target", "DIR", "--prompt", "a", "--dtype", "floaty"], "floaty"),
    "empty prompt": (["--target", "DIR", "--prompt", ""], "prompt 0 is empty"),
    "too long": (
        ["--target", "DIR", "--prompt", "a", "--max-new-tokens", "600"],
        "the target has 512: shorten the prompt or --max-new-tokens",
    ),
    "no new token": (
        ["--target", "DIR", "--prompt", "a", "--max-new-tokens", "0"],
        "--max-new-tokens 0: it must be at least 1",
    ),
    "a tree alone": (
        ["--target", "DIR", "--prompt", "a", "--tree", "chain:2"],
        "--tree needs a --drafter: give one, or leave --tree out",
    ),
    "a drawing of no tree": (
        ["--target", "DIR", "--prompt", "a", "--show-tree"],
        "--show-tree needs a --drafter",
    ),
    "a draw alone": (
        ["--target", "DIR", "--prompt", "a", "--do-sample", "--draw", "top"],
        "--draw needs a --drafter",
    ),
    "a draw of nothing": (
        [
            *("--target", "DIR", "--prompt", "a", "--do-sample"),
            *("--drafter", "look-up", "--draw", "top"),
        ],
        "--draw has no meaning for a look-up",
    ),
    "a refresh alone": (
        ["--target", "DIR", "--prompt", "a", "--refresh-every", "4"],
        "--refresh-every needs a --drafter",
    ),
    "a refresh of a full cache": (
        [
            *("--target", "DIR", "--prompt", "a", "--drafter", "self:full"),
            *("--drafter", "small:DIR:snapkv:64", "--refresh-every", "4"),
        ],
        "--refresh-every is for the sparse cache of self:POLICY, with another policy than full: "
        "give such a --drafter, or leave --refresh-every out",
    ),
    "a dtype of no cache": (
        [
            *("--target", "DIR", "--prompt", "a", "--drafter", "small:DIR", "--drafter", "look-up"),
            *("--kv-dtype", "int8"),
        ],
        "--kv-dtype is for the sparse cache of self:POLICY or small:PATH:POLICY",
    ),
    "sinks of no small model": (
        [
            *("--target", "DIR", "--prompt", "a", "--drafter", "self:streaming:64"),
            *("--sink-positions", "text"),
        ],
        "--sink-positions is for the sparse cache of small:PATH:POLICY",
    ),
    "a refresh of no round": (
        [
            *("--target", "DIR", "--prompt", "a", "--drafter", "self:snapkv:64"),
            *("--refresh-every", "0"),
        ],
        "--refresh-every 0: it must be at least 1 round",
    ),
    "a refresh of sinks": (
        [
            *("--target", "DIR", "--prompt", "a", "--drafter", "self:streaming:64"),
            *("--refresh-every", "4"),
        ],
        "--refresh-every 4: a streaming cache always pins the first tokens; leave --refresh-every "
        "out",
    ),
    "sinks that move with another policy": (
        [
            *("--target", "DIR", "--prompt", "a", "--drafter", "small:DIR:snapkv:64"),
            *("--sink-positions", "in_cache"),
        ],
        "--sink-positions 'in_cache' moves the sinks of policy 'streaming'",
    ),
    "a budget of a full cache": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self:full:64"],
        "budget=64: with policy 'full' the draft reads the target's own cache; leave budget out",
    ),
    "no such kv dtype": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self:snapkv", "--kv-dtype", "int2"],
        "argument --kv-dtype: invalid choice: 'int2'",
    ),
    "no such policy of a small model": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "small:DIR:h20:64"],
        "argument --drafter: policy='h20' is unknown: did you mean 'h2o'? It must be one of",
    ),
    "a directory with a colon": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "small:llama:7b"],
        "for a directory of that name write small:llama:7b:full",
    ),
    "a draw in greedy decoding": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self", "--draw", "top"],
        "--draw is for sampling: pass --do-sample",
    ),
    "three trees for two drafters": (
        [
            *("--target", "DIR", "--prompt", "a", "--drafter", "self", "--drafter", "look-up"),
            *("--tree", "chain:2") * 3,
        ],
        "3 --tree for 2 --drafter: give one, or one for each drafter",
    ),
    "a temperature in greedy decoding": (
        ["--target", "DIR", "--prompt", "a", "--temperature", "0.5"],
        "--temperature 0.5 has no meaning in greedy decoding: pass --do-sample, or leave it out",
    ),
    "a temperature of zero": (
        ["--target", "DIR", "--prompt", "a", "--do-sample", "--temperature", "0"],
        "--temperature 0: it must be above 0 and finite in float32; for the most likely tokens "
        "alone, leave --do-sample out",
    ),
    "a verifier in greedy decoding": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self", "--verifier", "mss"],
        "--verifier 'mss' is for sampling: pass --do-sample",
    ),
    "a verifier that is not exact": (
        [
            *("--target", "DIR", "--prompt", "a", "--drafter", "self:streaming:64", "--do-sample"),
            *("--verifier", "mss_with_replacement"),
        ],
        "--verifier 'mss_with_replacement' is not exact for children drawn 'without_replacement'",
    ),
    "no such draw": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self", "--draw", "tops"],
        "argument --draw: invalid choice: 'tops'",
    ),
    "no such tree": (
        ["--target", "DIR", "--prompt", "a", "--tree", "bush:2"],
        "'bush:2' is no tree: write chain:4, expansion:2,2,1, parents:-1,0,0,1 or dynamic:16,6,4",
    ),
    "a tree out of order": (
        ["--target", "DIR", "--prompt", "a", "--tree", "parents:-1,2,0"],
        "node 1 has parent 2",
    ),
    "no such drafter": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "big:DIR"],
        "'big:DIR' is no drafter: write self:streaming:256 (policy and budget), small:PATH",
    ),
    "no such small model": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "small:./none"],
        "./none is no directory",
    ),
    "no such policy": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self:streamin:64"],
        "did you mean 'streaming'",
    ),
    "a budget too small": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self:streaming:8"],
        "budget=8 leaves too small a ring",
    ),
    "no such backend": (
        ["--target", "DIR", "--prompt", "a", "--backend", "triton"],
        "--backend 'triton' is unknown",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_arguments_end_with_exit_code_2_and_the_reason(
    what, directory, run, tmp_path, monkeypatch
):
    """Before anything is compiled, and before weights are loaded."""
    arguments, message = REFUSED[what]
    paths = {"PARENT": directory.parent, "BYTES": tmp_path / "bytes.bin"}
    paths["BYTES"].write_bytes(b"ab\xff")
    monkeypatch.setattr(magicjax, "load", lambda *_: pytest.fail("weights were loaded"))
    before = compilation.count()
    filled = (re.sub(r"^(small:)?DIR", rf"\g<1>{directory}", a) for a in arguments)
    code, out, err = run("generate", *(paths.get(a, a) for a in filled))
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert compilation.count() == before


def test_a_drafter_is_read_as_it_is_written():
    assert cli.make_drafter("self:streaming:64") == magicjax.SelfSpeculation(budget=64)
    assert cli.make_drafter("self") == magicjax.SelfSpeculation()
    assert cli.make_drafter("self", draw="top") == magicjax.SelfSpeculation(draw="top")
    assert cli.make_drafter("self:full") == magicjax.SelfSpeculation("full")
    assert cli.make_drafter("self:h2o:9", refresh_every=4, kv_dtype="int8") == (
        magicjax.SelfSpeculation("h2o", 9, refresh_every=4, kv_dtype="int8")
    )
    assert cli.make_drafter("look-up") == magicjax.LookUp()
    assert cli.make_drafter("look-up:7") == magicjax.LookUp(7)


@pytest.mark.parametrize(
    ("text", "path", "policy", "budget"),
    [
        ("small:opt-125m", "opt-125m", "full", None),
        ("small:./a/b:snapkv", "./a/b", "snapkv", None),
        ("small:./a/b:snapkv:64", "./a/b", "snapkv", 64),
        ("small:./a:b/c", "./a:b/c", "full", None),  # no policy has a slash
        ("small:./a/b:c:full", "./a/b:c", "full", None),
        ("small:a:snapkv:64:h2o:32", "a:snapkv:64", "h2o", 32),
    ],
)
def test_a_small_models_policy_stands_behind_its_last_colons(text, path, policy, budget):
    made = cli.make_drafter(text, lambda source: source)
    assert made == magicjax.SmallModel(path, policy=policy, budget=budget)


def test_options_reach_the_drafters_that_can_use_them():
    options = dict(refresh_every=4, kv_dtype="int8", sink_positions="text")

    def made(text):
        return cli.make_drafter(text, lambda source: source, **options)

    assert made("small:d") == magicjax.SmallModel("d")
    assert made("small:d:h2o") == magicjax.SmallModel("d", policy="h2o", kv_dtype="int8")
    assert made("self:full") == magicjax.SelfSpeculation("full")
    assert made("look-up") == magicjax.LookUp()
    policy = magicjax.policies.TOVA()
    assert made("self:tova:64") == magicjax.SelfSpeculation(policy, 64, None, 4, "int8")


@pytest.mark.parametrize("text", ["", "self:", "self:streaming:", "small", "small:", "look-up:a"])
def test_half_a_drafter_is_none(text):
    with pytest.raises(ValueError, match="is no drafter: write self:streaming:256"):
        cli.make_drafter(text)


def test_a_prompt_may_begin_with_dashes(directory, run):
    code, out, err = run(
        *("generate", "--target", directory, "--prompt=--a", "--max-new-tokens", 600)
    )
    assert "prompt 0 has " in err and "no such option" not in err


def test_arguments_of_generate_become_options_and_paths_stay():
    said = "top_k=-1 in ./top_k/max_new_tokens: pass do_sample=True, or leave max_new_tokens out"
    assert cli.in_words_of_options("refresh_every=0: leave kv_dtype='int8' out") == (
        "--refresh-every 0: leave --kv-dtype 'int8' out"
    )
    assert cli.in_words_of_options(said) == (
        "--top-k -1 in ./top_k/max_new_tokens: pass --do-sample, or leave --max-new-tokens out"
    )


def test_the_version_is_that_of_the_package(run):
    code, out, err = run("--version")
    assert code == 0 and re.fullmatch(r"magicjax \d+\.\d+\.\d+\n", out)


def test_python_runs_the_package_as_the_command():
    here = pathlib.Path(magicjax.__file__).parent.parent
    command = [sys.executable, "-m", "magicjax", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=here, check=True)
    assert ran.stdout.startswith("magicjax ")


def test_verbose_logs_this_package_alone(directory, run):
    code, out, err = run(
        *("generate", "--target", directory, "--prompt", "a", "--max-new-tokens", "600"),
        "--verbose",
    )
    assert code == 2
    assert logging.getLogger("magicjax").level == logging.INFO
    assert logging.getLogger().level == logging.WARNING
    logging.getLogger("magicjax").setLevel(logging.NOTSET)
