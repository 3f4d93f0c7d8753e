"""Errors of the command line: in terms of options, before weights are loaded."""

import re

import pytest

import magicjax
import models
from magicjax import loading
from magicjax.cli import calibrate, fit, generate, plan
from magicjax.cli.options import in_option_names
from magicjax.decoding import program_cache
from magicjax.drafters.spec import make_drafter

REFUSED = {
    "no target": (["--prompt", "a"], "the following arguments are required: --target"),
    "no prompt": (
        ["--target", "DIR"],
        "one of the arguments --prompt --prompt-file --chat is required",
    ),
    "two prompts": (
        ["--target", "DIR", "--prompt", "a", "--prompt-file", "b"],
        "not allowed with argument",
    ),
    "no such directory": (["--target", "./none", "--prompt", "a"], "./none is not a directory"),
    "no such preset": (["--target", "opt-125", "--prompt", "a"], "did you mean 'opt-125m'?"),
    "nothing of that name": (
        ["--target", "nosuch", "--prompt", "a"],
        "'nosuch' is not a directory, a file or a preset. Presets are llama-68m, ",
    ),
    "a directory without a model": (
        ["--target", "PARENT", "--prompt", "a"],
        "config.json does not exist: a checkpoint directory must hold it",
    ),
    "a preset without a tokenizer": (
        ["--target", "opt-125m", "--prompt", "a"],
        "opt-125m has no tokenizer: pass a directory that has one as --tokenizer",
    ),
    "no such file": (
        ["--target", "DIR", "--prompt-file", "/none"],
        "--prompt-file /none does not exist",
    ),
    "a directory for a file": (
        ["--target", "DIR", "--prompt-file", "PARENT"],
        "is a directory: pass a text file",
    ),
    "a file of bytes": (
        ["--target", "DIR", "--prompt-file", "BYTES"],
        "bytes.bin is not UTF-8 text: byte 0xff at position 2",
    ),
    "no such option": (
        ["--taget", "DIR", "--prompt", "a"],
        "magicjax generate: error: unknown option --taget; did you mean '--target'?",
    ),
    "half an option": (
        ["--target", "DIR", "--prompt", "a", "--temp", "2"],
        "unknown option --temp",
    ),
    "a stray word": (["--target", "DIR", "--prompt", "a", "word"], "unknown option word"),
    "no such dtype": (["--target", "DIR", "--prompt", "a", "--dtype", "floaty"], "floaty"),
    "empty prompt": (["--target", "DIR", "--prompt", ""], "prompt 0 is empty"),
    "too long": (
        ["--target", "DIR", "--prompt", "a", "--max-tokens", "600"],
        "the target has 512: shorten the prompt or reduce --max-tokens",
    ),
    "no new token": (
        ["--target", "DIR", "--prompt", "a", "--max-tokens", "0"],
        "--max-tokens 0: it must be at least 1",
    ),
    "an empty stop string": (
        ["--target", "DIR", "--prompt", "a", "--stop", ""],
        "--stop '': a stop string must have at least 1 character",
    ),
    "too many log-probabilities": (
        ["--target", "DIR", "--prompt", "a", "--logprobs", "21"],
        "--logprobs 21: it must be at most 20",
    ),
    "a tree alone": (
        ["--target", "DIR", "--prompt", "a", "--tree", "chain:2"],
        "--tree has no effect without --drafter: remove it",
    ),
    "a drawing of no tree": (
        ["--target", "DIR", "--prompt", "a", "--show-tree"],
        "--show-tree has no effect without --drafter",
    ),
    "a draw of nothing": (
        [*("--target", "DIR", "--prompt", "a"), *("--drafter", "prompt-lookup:draw=top")],
        "argument --drafter: 'draw' is not an option of prompt-lookup:draw=top (options: "
        "max_ngram, min_ngram)",
    ),
    "auto beside another": (
        [
            *("--target", "DIR", "--prompt", "a", "--drafter", "auto"),
            *("--drafter", "prompt-lookup"),
        ],
        "--drafter auto excludes other drafters: list them with --candidate instead",
    ),
    "a tree of auto": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "auto", "--tree", "chain:2"],
        "--tree has no effect with --drafter auto, which chooses the tree: remove it",
    ),
    "a candidate of another": (
        [
            "--target",
            "DIR",
            "--prompt",
            "a",
            "--drafter",
            "prompt-lookup",
            "--candidate",
            "prompt-lookup",
        ],
        "--candidate has no effect without --drafter auto",
    ),
    "auto tries itself": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "auto", "--candidate", "auto"],
        "auto is not a candidate: use self:streaming:256",
    ),
    "no profile": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "auto", "--profile", "no.json"],
        "the profile no.json does not exist: measure this device with `magicjax calibrate",
    ),
    "a candidate that cannot draft": (
        [
            *("--target", "DIR", "--prompt", "a", "--drafter", "auto", "--profile", "h100"),
            *("--candidate", "self:streaming:20"),
        ],
        "budget=20 is too small: its ring has",
    ),
    "a refresh of a full cache": (
        [*("--target", "DIR", "--prompt", "a"), *("--drafter", "self:full:refresh_every=4")],
        "refresh_every=4: with policy 'full' the draft reads the target's own cache",
    ),
    "a dtype of no cache": (
        [*("--target", "DIR", "--prompt", "a"), *("--drafter", "small:DIR:kv_dtype=int8")],
        "kv_dtype='int8': with policy 'full' the draft keeps all of its cache",
    ),
    "sinks of no small model": (
        [
            *("--target", "DIR", "--prompt", "a"),
            *("--drafter", "self:streaming:64:sink_positions=text"),
        ],
        "'sink_positions' is not an option of self:streaming:64",
    ),
    "a refresh of no round": (
        [
            *("--target", "DIR", "--prompt", "a"),
            *("--drafter", "self:snapkv:64:refresh_every=0"),
        ],
        "refresh_every=0: it must be at least 1 round",
    ),
    "a refresh of sinks": (
        [
            *("--target", "DIR", "--prompt", "a"),
            *("--drafter", "self:streaming:64:refresh_every=4"),
        ],
        "refresh_every=4: a streaming cache always pins the first tokens",
    ),
    "sinks that move with another policy": (
        [
            *("--target", "DIR", "--prompt", "a"),
            *("--drafter", "small:DIR:snapkv:64:sink_positions=in_cache"),
        ],
        "needs policy 'streaming' and no kv_dtype",
    ),
    "a budget of a full cache": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self:full:64"],
        "budget=64: with policy 'full' the draft reads the target's own cache; use another "
        "policy, or omit budget",
    ),
    "no such kv dtype": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self:snapkv:kv_dtype=int2"],
        "kv_dtype='int2': it must be int8 or int4",
    ),
    "no such policy of a small model": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "small:DIR:h20:64"],
        "argument --drafter: policy='h20' is unknown: use one of",
    ),
    "a directory with a colon": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "small:llama:7b"],
        "(a directory of that name needs small:llama:7b:full)",
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
        "3 --tree for 2 --drafter: pass one, or one per drafter",
    ),
    "top_k in greedy decoding": (
        ["--target", "DIR", "--prompt", "a", "--top-k", "5"],
        "--top-k 5 has no effect in greedy decoding: pass a temperature above 0, or omit --top-k",
    ),
    "a temperature below zero": (
        ["--target", "DIR", "--prompt", "a", "--temperature=-1"],
        "--temperature -1.0: it must be 0 for greedy decoding, or at least",
    ),
    "a verifier in greedy decoding": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self", "--verifier", "mss"],
        "--verifier 'mss' requires sampling: pass a temperature above 0 or omit --verifier",
    ),
    "no such draw": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self:draw=tops"],
        "draw='tops': it must be with_replacement or without_replacement or top",
    ),
    "no such tree": (
        ["--target", "DIR", "--prompt", "a", "--tree", "bush:2"],
        "'bush:2' is not a tree: use chain:4, expansion:2,2,1, parents:-1,0,0,1 or dynamic:16,6,4",
    ),
    "a tree out of order": (
        ["--target", "DIR", "--prompt", "a", "--tree", "parents:-1,2,0"],
        "node 1 has parent 2",
    ),
    "no such drafter": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "big:DIR"],
        "'big' is not a drafter (drafters: prompt-lookup, self, small, or the import path of",
    ),
    "no such small model": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "small:./none"],
        "./none is not a directory",
    ),
    "no such policy": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self:streamin:64"],
        "did you mean 'streaming'",
    ),
    "a budget too small": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self:streaming:8"],
        "budget=8 is too small: its ring has",
    ),
    "a copy of offloaded weights": (
        [*("--target", "DIR", "--prompt", "a", "--offload"), *("--drafter", "self:weights=int8")],
        "quantize a target on the device, and the target is offloaded: omit the drafter's weights",
    ),
    "unknown weights": (
        ["--target", "DIR", "--prompt", "a", "--weights", "int3"],
        "weights='int3' is unknown: use 'int8', 'int4'",
    ),
    "groups that do not divide": (
        ["--target", "DIR", "--prompt", "a", "--weights", "int4"],
        "groups of 128 do not divide the 32 inputs of attention/q: use int4:",
    ),
    "no such backend": (
        ["--target", "DIR", "--prompt", "a", "--backend", "triton"],
        "'xla'], or omit --backend",
    ),
    "a backend of another device": (
        ["--target", "DIR", "--prompt", "a", "--backend", "mosaic"],
        "; use --backend 'xla', or omit --backend",
    ),
    "a misspelt drafter": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "slef:streaming:256"],
        "did you mean 'self'?",
    ),
    "a misspelt tree": (
        ["--target", "DIR", "--prompt", "a", "--drafter", "self", "--tree", "chian:3"],
        "did you mean 'chain'?",
    ),
}


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
    code, out, err = run("generate", *(paths.get(a, a) for a in filled))
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    if "argument --" in err or "did you mean" in err:
        assert "--help" not in err
    assert program_cache.totals() == before


def test_a_slow_tokenizer_is_an_error_before_weights_are_loaded(directory, run, monkeypatch):
    monkeypatch.setattr(models, "load_tokenizer", lambda source: object())
    monkeypatch.setattr(loading, "with_weights", lambda *_: pytest.fail("weights were loaded"))
    code, out, err = run("generate", "--target", directory, "--prompt", "a")
    assert (code, out) == (2, "")
    assert f"{directory} has a tokenizer without tokenizer.json: save it with" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a drafter"),
        ("self:", "policy='' is unknown"),
        ("self:streaming:", "budget='': it must be an integer"),
        ("small", "needs a model: write small:PATH"),
        ("small:", "needs a model: write small:PATH"),
        ("prompt-lookup:a", "max_ngram='a': it must be an integer"),
    ],
)
def test_an_incomplete_drafter_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        make_drafter(text, magicjax.load)


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


def test_a_prompt_may_begin_with_dashes(directory, run):
    code, out, err = run(*("generate", "--target", directory, "--prompt=--a", "--max-tokens", 600))
    assert "prompt 0 has " in err and "unknown option" not in err


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
