"""The command line on a tiny model directory: its output and its statistics."""

import argparse
import builtins
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

import magicjax
import models
from magicjax import loading
from magicjax.cli import main, printing
from magicjax.decoding.counts import Counts
from magicjax.decoding.text import Text
from magicjax.decoding.token_bytes import bytes_of_byte_level
from magicjax.drafters import spec
from magicjax.parallel import offloading
from magicjax.prediction.cost_model import default_profile
from magicjax.verification.logprobs import LogProbs
from pallas_kernels import choose_backend
from tests.magicjax import keywords, small_tokenizers, tiny
from tests.magicjax.small_tokenizers import with_thinking
from tests.quick import quick

PROMPT = tiny.SOURCE


def expected_text(directory, **options) -> str:
    target = magicjax.load(directory)
    return keywords.generate(target, [PROMPT], max_tokens=20, **options).texts[0]


def test_it_prints_the_text_and_reports_acceptance(directory, run):
    code, out, err = run(
        *("generate", "--target", directory, "--prompt", PROMPT, "--max-tokens", 20),
        *("--drafter", "self:streaming:32", "--tree", "chain:3", "--show-tree"),
    )
    assert code == 0
    drawing, _, printed = out.partition("└─3\n")
    assert drawing.startswith("4 nodes, depth 3\n0\n└─1\n  └─2\n")
    assert printed == expected_text(directory) + "\n"
    first = f"^20 tokens, finish_reason length, backend {choose_backend()}$"
    assert re.search(first, err, re.M)
    decoding = r"^decoding 19 tokens: [\d.]+ s, [\d.]+ tokens/s, \d+ rounds$"
    assert re.search(decoding, err, re.M)
    assert re.search(r"^tau \d\.\d\d tokens per round, 4.0 nodes per round$", err, re.M)
    assert re.search(r"^acceptance by depth  1: [\d.]+  2: [\d.]+  3: [\d.]+$", err, re.M)
    assert re.search(r"^  if reached         1: [\d.]+  2: [\d.]+  3: [\d.]+$", err, re.M)
    assert re.search(r"^KV cache: target [\d.]+ MB, draft [\d.]+ MB$", err, re.M)


def test_stop_strings_end_the_printed_text(directory, run):
    whole = expected_text(directory)
    stop = whole[5:8]
    code, out, err = run(
        *("generate", "--target", directory, "--prompt", PROMPT, "--max-tokens", 20),
        *("--stop", "never said", "--stop", stop),
    )
    assert (code, out) == (0, whole[: whole.index(stop)] + "\n")
    stopped = r"^1?\d tokens, finish_reason stop \(a stop string or token\), backend "
    assert re.search(stopped, err)
    target = magicjax.load(directory)
    token = int(keywords.generate(target, [PROMPT], max_tokens=20).tokens[0, 4])
    expected = expected_text(directory, stop_token_ids=[token])
    code, out, err = run(
        *("generate", "--target", directory, "--prompt", PROMPT, "--max-tokens", 20),
        *("--stop-token-id", token),
    )
    assert (code, out) == (0, expected + "\n") and expected != whole
    assert re.search(stopped, err)
    code, out, err = run(
        *("generate", "--target", directory, "--prompt", PROMPT),
        *("--logit-bias", f"{target.eos_token_ids[0]}=1000"),
    )
    assert (code, out) == (0, "\n") and err.startswith("1 token, finish_reason stop (EOS), ")
    arguments = ("generate", "--target", directory, "--prompt", PROMPT, "--max-tokens", 2)
    assert re.search(
        r"^decoding 1 token: [\d.]+ s, [\d.]+ tokens/s, 1 round$", run(*arguments)[2], re.M
    )


def test_values_that_cannot_change_the_text_are_accepted(directory, run):
    code, out, err = run(
        *("generate", "--target", directory, "--prompt", PROMPT, "--max-tokens", 20),
        *(
            "--temperature",
            0,
            "--top-k",
            5,
            "--top-p",
            0.9,
            "--min-p",
            0.1,
            "--top-n-sigma",
            2,
            "--seed",
            3,
            "--drafter",
            "none",
        ),
    )
    assert (code, out) == (0, expected_text(directory) + "\n")


def test_a_prompt_file_keeps_its_line_ends(directory, run, tmp_path):
    file, prompt = tmp_path / "prompt.txt", "def f():\r\n\treturn 1\r\n"
    file.write_bytes(prompt.encode())
    arguments = "generate", "--target", directory, "--max-tokens", 20
    texts = [
        run(*arguments, *source)[1] for source in (("--prompt-file", file), ("--prompt", prompt))
    ]
    other = run(*arguments, "--prompt", prompt.replace("\r\n", "\n"))[1]
    assert texts[0] == texts[1] != other
    file.write_text(prompt, encoding="utf-8-sig", newline="")  # as some editors write it
    assert run(*arguments, "--prompt-file", file)[1] == texts[0]


def test_log_probabilities_follow_the_text_as_a_table(directory, run):
    code, out, err = run(
        *("generate", "--target", directory, "--prompt", PROMPT, "--max-tokens", 3),
        *("--logprobs", 2),
    )
    target = magicjax.load(directory)
    output = keywords.generate(target, [PROMPT], max_tokens=3, logprobs=2)
    assert (code, out) == (0, output.texts[0] + "\n")
    heading, *lines = err.splitlines()[:4]
    assert heading == "log-probabilities:"
    names = target.tokenizer.convert_ids_to_tokens(output.tokens[0].tolist())
    for line, name, log in zip(lines, names, output.logprobs[0].chosen, strict=True):
        encoded = bytes_of_byte_level(name)
        complete = encoded.decode(errors="ignore").encode() == encoded
        best = f"{log:8.3f} {encoded.decode() if complete else encoded!r}"
        assert line.startswith(f"{best}  {best}  ")  # greedy: the first alternative is the chosen


def test_tokens_are_shown_with_their_spaces_and_bytes():
    tokenizer = small_tokenizers.make("byte-fallback")
    names = ["▁", "a", "<s>", "<0xE4>", "<0x41>"]
    names.append(next(name for name in tokenizer.get_vocab() if re.fullmatch("▁[a-z]+", name)))
    tokens = np.array(tokenizer.convert_tokens_to_ids(names))
    none = np.zeros((len(names), 0))
    log_probs = LogProbs(np.full(len(names), -0.5), none, none.astype(int))
    _, *lines = printing.log_prob_lines(tokenizer, tokens, log_probs).splitlines()
    shown = ["' '", "'a'", "'<s>'", r"b'\xe4'", "'A'", repr(names[-1].replace("▁", " "))]
    assert lines == [f"  -0.500 {each}" for each in shown]


SAMPLING = {
    "filtered": (
        ["--temperature", "0.7", "--top-k", "9", "--top-p", "0.9", "--seed", "5"],
        dict(temperature=0.7, top_k=9, top_p=0.9, seed=5),
    ),
    "a cascade": (
        [
            *("--drafter", "prompt-lookup:3 -> self:streaming:32"),
            *("--tree", "chain:2 -> chain:4", "--temperature", "1"),
        ],
        dict(
            temperature=1.0,
            drafter=magicjax.Cascade(
                magicjax.PromptLookup(3),
                magicjax.SelfSpeculation("streaming", 32),
                magicjax.chain(2),
            ),
            tree=magicjax.chain(4),
        ),
    ),
    "two drafters, a tree each": (
        [
            *("--drafter", "self:streaming:32", "--drafter", "prompt-lookup:3"),
            *("--tree", "dynamic:4,2,2", "--tree", "chain:3", "--temperature", "1"),
        ],
        dict(
            temperature=1.0,
            drafter=magicjax.Ensemble(
                (magicjax.SelfSpeculation("streaming", 32), magicjax.PromptLookup(3)),
                (magicjax.DynamicTree(4, 2, 2), magicjax.chain(3)),
            ),
        ),
    ),
}


@pytest.mark.parametrize("what", quick(SAMPLING, "filtered"))
def test_options_have_the_effect_of_generates_arguments(what, directory, run):
    """The text is the same, and depends on the seed, the rule and the draws."""
    arguments, options = SAMPLING[what]
    code, out, err = run(
        *("generate", "--target", directory, "--prompt", PROMPT, "--max-tokens", 20), *arguments
    )
    assert (code, out) == (0, expected_text(directory, **options) + "\n")


def test_a_character_of_several_tokens_is_printed_when_it_is_complete(directory, monkeypatch):
    tokenizer = models.load_tokenizer(directory)
    tokens, printed = tokenizer("n☃!")["input_ids"], []
    assert len(tokens) == 5

    def rounds(count):
        made = Text(tokenizer, np.array([], int), magicjax.SamplingParams(), 9, ())
        for n in range(1, count + 1):
            yield [made.push(np.array(tokens[:n]), None, False)]
        made.finish("cancelled")
        return types.SimpleNamespace(results=[made.result(None, Counts())])

    monkeypatch.setattr(builtins, "print", lambda text, **_: printed.append(text))
    printing.print_stream(rounds(5))
    assert printed == ["n", "", "", "☃", "!", ""]
    printed.clear()
    printing.print_stream(rounds(2))  # an incomplete character at the end
    assert printed == ["n", "", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_shows_reasoning_dimly(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    tokenizer = with_thinking("text")

    def rounds():
        tokens = np.array(tokenizer("<think>\nHm.\n</think>\n\nYes")["input_ids"])
        made = Text(tokenizer, np.array([], int), magicjax.SamplingParams(), len(tokens), ())
        for n in range(1, len(tokens) + 1):
            yield [made.push(tokens[:n], None, n == len(tokens))]
        return types.SimpleNamespace(results=[made.result(None, Counts())])

    printing.print_stream(rounds())
    shown = capsys.readouterr().out
    if not is_terminal:
        assert shown == "Yes\n"
        return
    assert shown.startswith(printing.DIM) and shown.endswith(f"{printing.NORMAL}\n\nYes\n")
    assert shown.replace(printing.DIM, "").replace(printing.NORMAL, "") == "Hm.\n\nYes\n"


def test_python_runs_the_package_as_the_command():
    here = pathlib.Path(magicjax.__file__).parent.parent
    command = [sys.executable, "-m", "magicjax", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=here, check=True)
    assert ran.stdout.startswith("magicjax ")


@pytest.mark.parametrize("command", main.COMMANDS)
def test_the_help_of_an_option_has_its_default(command):
    (subparsers,) = main.parser([command])._subparsers._group_actions
    for option in subparsers.choices[command]._actions:
        default, shown = option.default, option.help
        if not default or default == argparse.SUPPRESS:  # what is not given
            continue
        values = default if isinstance(default, list) else [default]
        text = " ".join(str(value).removesuffix(".0") for value in values)
        text = "one device" if text == "model=1" else text
        assert f"default: {text}" in shown.replace(",", ""), option.option_strings


def test_the_help_of_calibrate_says_what_it_times_and_writes(run, monkeypatch):
    monkeypatch.setenv("MAGICJAX_CACHE", "/cache")
    code, out, _ = run("calibrate", "--help")
    shown = " ".join(out.split())
    assert "default:profile-DEVICE.jsonin/cache,withthename" in "".join(out.split())
    assert default_profile().match("/cache/profile-*.json")
    assert code == 0 and "It times every --batch with every --context, 9 pairs by default" in shown
    (subparsers,) = main.parser(["calibrate"])._subparsers._group_actions
    default = subparsers.choices["calibrate"].get_default
    assert len(default("batch")) * len(default("context")) == 9


def test_ctrl_c_ends_after_the_round_with_the_text_and_the_statistics_so_far(
    directory, run, monkeypatch
):
    stream = magicjax.stream

    def interrupted_stream(*arguments, **options):
        rounds, sent = stream(*arguments, **options), None
        try:
            for i in range(20):
                if i == 3:
                    signal.raise_signal(signal.SIGINT)
                sent = yield rounds.send(sent)
        except StopIteration as end:
            return end.value

    monkeypatch.setattr(magicjax, "stream", interrupted_stream)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = run("generate", "--target", directory, "--prompt", PROMPT, "--max-tokens", 20)
    assert code == 130 and signal.getsignal(signal.SIGINT) is before
    assert expected_text(directory).startswith(out.rstrip("\n")) and out.strip()
    assert "4 tokens, finish_reason cancelled, backend" in err and "decoding 3 tokens: " in err


class ClosedPipe(io.StringIO):
    """An output whose reader has ended."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def write(self, text):
        raise BrokenPipeError

    def fileno(self):
        return self.number


def test_a_reader_that_ends_early_is_no_error(run, monkeypatch, tmp_path):
    number = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    monkeypatch.setattr(sys, "stdout", ClosedPipe(number))
    monkeypatch.setattr(sys, "argv", ["magicjax", "fetch"])
    main.main()
    os.write(number, b"lost")  # at the end of Python
    assert (tmp_path / "out").read_bytes() == b""
    os.close(number)


def test_the_texts_of_drafters_and_trees_are_parsed_once(directory, run, monkeypatch):
    texts = []
    for name in ("parse_one", "parse_tree"):
        real = getattr(spec, name)
        monkeypatch.setattr(spec, name, lambda text, real=real: texts.append(text) or real(text))
    monkeypatch.setattr(offloading, "free_host_memory", lambda: 1000)  # ends the command
    drafters = ("--drafter", "prompt-lookup:2", "--drafter", f"small:{directory}")
    trees = ("--tree", "chain:1", "--tree", "chain:2")
    options = ("--prompt", "a", "--show-tree", *drafters, *trees)
    assert run("generate", "--target", directory, *options)[0] == 2
    assert texts == ["prompt-lookup:2", f"small:{directory}", "chain:1", "chain:2"]


def test_a_model_larger_than_the_memory_is_refused_before_it_is_loaded(directory, run, monkeypatch):
    monkeypatch.setattr(offloading, "free_host_memory", lambda: 1000)
    monkeypatch.setattr(loading, "with_weights", None)
    code, _, err = run("generate", "--target", directory, "--prompt", "a")
    assert code == 2 and "1e-06 GB are available (target's weights" in err
    assert err.count("\n") == 1
