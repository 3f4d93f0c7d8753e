"""The command line on a tiny model directory: what it prints where, and how it refuses."""

import re
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
    assert re.search(r"^\d+ tokens in [\d.]+ s: [\d.]+ tokens/s \(\d+ rounds, .*xla\)$", err, re.M)
    assert re.search(r"^tau \d\.\d\d; accepted by depth  1: [\d.]+  2: [\d.]+  3: ", err, re.M)
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
    "no such file": (["--target", "DIR", "--prompt-file", "/none"], "No such file"),
    "no such dtype": (["--target", "DIR", "--prompt", "a", "--dtype", "floaty"], "floaty"),
    "empty prompt": (["--target", "DIR", "--prompt", ""], "prompt 0 is empty"),
    "too long": (
        ["--target", "DIR", "--prompt", "a", "--max-new-tokens", "600"],
        "the target has 512: shorten the prompt",
    ),
    "no new token": (
        ["--target", "DIR", "--prompt", "a", "--max-new-tokens", "0"],
        "max_new_tokens=0: it must be at least 1",
    ),
    "a tree alone": (
        ["--target", "DIR", "--prompt", "a", "--tree", "chain:2"],
        "a tree needs a drafter",
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
        "write self:streaming:256 (policy and budget) or small:PATH",
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
        "backend='triton' is unknown",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_arguments_end_with_exit_code_2_and_the_reason(what, directory, run):
    arguments, message = REFUSED[what]
    before = compilation.count()
    code, out, err = run("generate", *(str(directory) if a == "DIR" else a for a in arguments))
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert compilation.count() == before


def test_a_drafter_is_read_as_it_is_written():
    assert cli.parse_drafter("self:streaming:64", None) == magicjax.SelfSpeculation(budget=64)
    assert cli.parse_drafter("self", None) == magicjax.SelfSpeculation()
