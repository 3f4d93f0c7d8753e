"""Errors of the command line: in terms of options, before weights are loaded."""

import json
import re
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
import safetensors.numpy

import models
from magicjax import loading
from magicjax.cli import calibrate, fit, generate, plan
from magicjax.cli.arg_utils import in_option_names
from magicjax.decoding import program_cache

REFUSED = {
    "no target": (["--prompt", "a"], "the following arguments are required: --target"),
    "no such directory": (["--target", "./none", "--prompt", "a"], "./none is not a directory"),
    "a preset without a tokenizer": (
        ["--target", "opt-125m", "--prompt", "a"],
        "opt-125m has no tokenizer: pass a directory that has one as --tokenizer",
    ),
    "no such file": (
        ["--target", "DIR", "--prompt-file", "/none"],
        "--prompt-file /none does not exist",
    ),
    "a file of bytes": (
        ["--target", "DIR", "--prompt-file", "BYTES"],
        "bytes.bin is not UTF-8 text: byte 0xff at position 2",
    ),
    "no such option": (
        ["--taget", "DIR", "--prompt", "a"],
        "magicjax generate: error: unknown option --taget; did you mean '--target'?",
    ),
    "a stray word": (["--target", "DIR", "--prompt", "a", "word"], "unknown option word"),
    "too long": (
        ["--target", "DIR", "--prompt", "a", "--max-tokens", "600"],
        "the target has 512: shorten the prompt or reduce --max-tokens",
    ),
    "too long in thousands": (
        ["--target", "DIR", "--prompt", "a", "--max-tokens", "4k"],
        "with --max-tokens 4096 it needs",
    ),
    "no tokens": (
        ["--target", "DIR", "--prompt", "a", "--max-tokens", "0"],
        "magicjax: --max-tokens 0: it must be an integer of at least 1",
    ),
    "a negative stop token": (
        ["--target", "DIR", "--prompt", "a", "--stop-token-id", "-1"],
        "a token of --stop-token-id -1: it must be an integer of at least 0",
    ),
    "a biased token outside the vocabulary": (
        ["--target", "DIR", "--prompt", "a", "--logit-bias", "99999999=1"],
        "magicjax: --logit-bias has the token 99999999, and the vocabulary has ",
    ),
    "a word beside a grammar": (
        ["--target", "DIR", "--prompt", "a", "--json", "--bad-word", "a"],
        "magicjax: --bad-word with a grammar may leave no token",
    ),
    "a separator": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self,prompt-lookup"],
        "the members of an ensemble are joined by ' + ', as in 'self:streaming:256 + prompt-",
    ),
    "a tree alone": (
        ["--target", "DIR", "--prompt", "a", "--tree", "chain:2"],
        "--tree has no effect without --drafter: remove it",
    ),
    "a draw of nothing": (
        [*("--target", "DIR", "--prompt", "a"), *("--drafter", "prompt-lookup:draw=top")],
        "argument --drafter: 'draw' is not an option of prompt-lookup:draw=top (options: "
        "max_ngram, min_ngram)",
    ),
    "a cascade beside another": (
        [
            *("--target", "DIR", "--prompt", "a", "--drafter", "prompt-lookup -> self"),
            *("--drafter", "prompt-lookup"),
        ],
        "--drafter 'prompt-lookup -> self' is a cascade, which cannot be a member of an ensemble",
    ),
    "auto beside another": (
        [
            *("--target", "DIR", "--prompt", "a", "--drafter", "auto"),
            *("--drafter", "prompt-lookup"),
        ],
        "--drafter auto excludes other drafters: list them with --candidate instead",
    ),
    "none with another drafter": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "none", "--drafter", "prompt-lookup"],
        "--drafter none with another drafter: remove one of them",
    ),
    "a tree of auto": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "auto", "--tree", "chain:2"],
        "--tree has no effect with --drafter auto, which chooses the tree: remove it",
    ),
    "a tree of auto for two drafters": (
        [
            *("--target", "DIR", "--prompt", "a", "--tree", "auto"),
            *("--drafter", "self", "--drafter", "prompt-lookup"),
        ],
        "--tree auto chooses the tree of one --drafter: name one drafter",
    ),
    "a candidate that cannot draft": (
        [
            *("--target", "DIR", "--prompt", "a", "--drafter", "auto", "--profile", "h100"),
            *("--candidate", "self:streaming:20"),
        ],
        "budget=20 is too small: its ring has",
    ),
    "a draw in greedy decoding": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self:draw=top"],
        "draw has no effect in greedy decoding, without --temperature: remove it from "
        "self:draw=top",
    ),
    "three trees for two drafters": (
        [
            *(
                "--target",
                "DIR",
                "--prompt",
                "a",
                "--drafter",
                "self",
                "--drafter",
                "prompt-lookup",
            ),
            *("--tree", "chain:2") * 3,
        ],
        "--tree 'chain:2 + chain:2 + chain:2' has 3 trees for 2 drafters: give one for all, or one",
    ),
    "top_k without a temperature": (
        ["--target", "DIR", "--prompt", "a", "--top-k", "5"],
        "--top-k has no effect without --temperature: remove it",
    ),
    "a stop token of another vocabulary": (
        ["--target", "DIR", "--prompt", "a", "--stop-token-id", "999"],
        "--stop-token-id has the token 999, and the vocabulary has",
    ),
    "no such drafter": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "big:DIR"],
        "'big' is not a drafter (drafters: eagle, forced, full, mtp, prompt-lookup, quest, self, "
        "small, suffix, or the import path",
    ),
    "no such small model": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "small:./none"],
        "./none is not a directory",
    ),
    "a small model of another tokenizer": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "small:OTHER"],
        "the tokenizer of the drafter 'other' differs from that of the target 'tiny' in 2 tokens, "
        "such as 'a' (id ",
    ),
    "a budget too small": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self:streaming:8"],
        "budget=8 is too small: its ring has",
    ),
    "unknown weights": (
        ["--target", "DIR", "--prompt", "a", "--weights", "int3"],
        "weights='int3' is unknown: use 'int8', 'int4'",
    ),
    "a backend of another device": (
        ["--target", "DIR", "--prompt", "a", "--backend", "mosaic"],
        "; use --backend 'xla', or omit --backend",
    ),
    "a misspelt tree": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self", "--tree", "chian:3"],
        "did you mean 'chain'?",
    ),
}


def _with_another_tokenizer(directory, path):
    """Returns a copy of a model's directory whose tokenizer has the ids of two tokens swapped."""
    shutil.copytree(directory, path)
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    file.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_arguments_exit_with_code_2_and_the_reason(
    what, directory, run, tmp_path, monkeypatch
):
    """Before anything is compiled, and before weights are loaded."""
    arguments, message = REFUSED[what]
    paths = {"PARENT": directory.parent, "BYTES": tmp_path / "bytes.bin"}
    paths["BYTES"].write_bytes(b"ab\xff")
    monkeypatch.setattr(loading, "with_weights", lambda *_: pytest.fail("weights were loaded"))
    before = program_cache.totals()
    filled = (re.sub(r"^(small:)?DIR", rf"\g<1>{directory}", a) for a in arguments)
    other = _with_another_tokenizer(directory, tmp_path / "other")
    filled = (re.sub("^small:OTHER", f"small:{other}", a) for a in filled)
    code, out, err = run("generate", *(paths.get(a, a) for a in filled))
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    if "argument --" in err or "did you mean" in err:
        assert "--help" not in err
    assert program_cache.totals() == before


def test_a_slow_tokenizer_is_an_error_before_weights_are_loaded(directory, run, monkeypatch):
    slow = types.SimpleNamespace(get_vocab=dict)
    monkeypatch.setattr(models, "load_tokenizer", lambda source: slow)
    monkeypatch.setattr(loading, "with_weights", lambda *_: pytest.fail("weights were loaded"))
    code, out, err = run("generate", "--target", directory, "--prompt", "a")
    assert (code, out) == (2, "")
    assert f"{directory} has a tokenizer without tokenizer.json: save it with" in err


def test_float64_weights_are_one_error(directory, run, tmp_path):
    folder = shutil.copytree(directory, tmp_path / "wide")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    wide = {name: x.astype(np.float64) for name, x in tensors.items()}
    safetensors.numpy.save_file(wide, folder / "model.safetensors")
    options = ("--target", folder, "--prompt", "a", "--max-tokens", "1")
    assert run("generate", *options) == (
        2,
        "",
        f"magicjax: {folder} has weights in float64, which needs JAX's 64-bit mode: pass "
        "--dtype 'float32'\n",
    )
    narrow = run("generate", *options, "--dtype", "float32")
    assert narrow[:2] == run("generate", "--target", directory, *options[2:])[:2]


@pytest.mark.parametrize("command", [generate, plan, fit, calibrate])
def test_an_interrupt_ends_with_one_line(command, run, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    name = command.__name__.rpartition(".")[2]
    required = {
        "generate": ("--target", "a", "--prompt", "a"),
        "plan": ("--target", "a", "--batch", 1, "--context", 1, "--device", "h100"),
        "fit": ("--target", "a", "--batch", 1, "--context", 1, "--device", "h100"),
        "calibrate": (),
    }
    assert run(name, *required[name]) == (130, "", "magicjax: interrupted\n")


def test_an_interrupt_during_the_imports_ends_with_one_line():
    command = (sys.executable, "-X", "importtime", "-m", "magicjax", "calibrate")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        next(line for line in process.stderr if "numpy" in line)
        process.send_signal(signal.SIGINT)
        lines = process.stderr.read().splitlines()
    assert [line for line in lines if "import time:" not in line] == ["magicjax: interrupted"]
    assert process.returncode == 130


def test_python_arguments_become_options_and_paths_stay():
    names = ("top_k", "offload", "max_tokens", "refresh_every", "kv_dtype")
    text = "top_k=-1 in ./top_k=1/a: pass offload=True, or omit max_tokens"
    assert in_option_names("refresh_every=0: kv_dtype='int8'", names) == (
        "--refresh-every 0: --kv-dtype 'int8'"
    )
    assert in_option_names(text, names) == (
        "--top-k -1 in ./top_k=1/a: pass --offload, or omit --max-tokens"
    )
    text = "omit drafter and tree, or remove duplicates"
    assert in_option_names(text, iter(("drafter", "tree"))) == (
        "omit --drafter and --tree, or remove duplicates"
    )
