"""`magicjax chat` and `generate --chat`: in a pseudo-terminal, from a pipe, and refused."""

import io
import json
import os
import pathlib
import pty
import re
import select
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import models
from magicjax import loading
from magicjax.decoding import program_cache
from tests.magicjax import tiny

# What follows each character: a message that ends with ? is answered "fine.", and one that ends
# with ! by "lolo..." without an end.
END = "<end>"
NEXT = {"?": "f", "f": "i", "i": "n", "n": "e", "e": ".", ".": END, "!": "l", "l": "o", "o": "l"}
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}[{{ m.content }}]"
    "{% else %}{{ m.content }}{% if m.role == 'assistant' %}<end>{% endif %}{% endif %}"
    "{% endfor %}"
)
SECONDS = 120  # until a chat in a process answers


def byte_tokenizer(template: str | None):
    """Returns a tokenizer of single bytes, so an answer has the same tokens in the next turn."""
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {END: 0} | {byte: i for i, byte in enumerate(alphabet, 1)}
    bytes_only = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    bytes_only.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = tokenizers.decoders.ByteLevel()
    bytes_only.add_special_tokens([END])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token=END, chat_template=template
    )


def scripted(params, ids: dict[str, int]):
    """Returns the parameters of a model that says `NEXT`: its layers add nothing."""
    names = [[key.key for key in path] for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    leaves, structure = jax.tree.flatten(params)
    rng, made = np.random.default_rng(0), {}
    for name, leaf in zip(names, leaves, strict=True):
        scale = name[-1] == "scale"
        made[name[-1]] = np.ones(leaf.shape) if scale else rng.standard_normal(leaf.shape)
    unembedding = np.zeros_like(made["unembedding"])
    for now, then in NEXT.items():
        unembedding[ids[then]] += made["embedding"][ids[now]]
    made |= {"unembedding": unembedding}
    new = [
        np.zeros(leaf.shape) if {"out", "down"} & {*name} else made[name[-1]]
        for name, leaf in zip(names, leaves, strict=True)
    ]
    new = [
        np.broadcast_to(x, leaf.shape) if x.shape == leaf.shape else rng.standard_normal(leaf.shape)
        for x, leaf in zip(new, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, [x.astype(np.float32) for x in new])


def saved(path: pathlib.Path, template: str | None) -> pathlib.Path:
    """Saves the model as a Hugging Face directory."""
    import flax.linen as nn

    tokenizer = byte_tokenizer(template)
    config = tiny.config(
        vocab_size=len(tokenizer), hidden_size=64, num_layers=1, max_positions=20_000
    )
    module = models.build(config)
    params = scripted(nn.meta.unbox(models.abstract_params(module)), tokenizer.get_vocab())
    models.save_checkpoint(path, module, params, eos_token_ids=[0], tokenizer=tokenizer)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("chat") / "model", TEMPLATE)


@pytest.fixture
def talk(model, run, monkeypatch):
    """Runs a chat with lines from a pipe; returns (exit code, output, errors)."""

    def call(lines, *arguments):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run("chat", "--target", model, *arguments)

    return call


class Terminal:
    """A chat in a process with a pseudo-terminal."""

    def __init__(self, *arguments):
        self.master, slave = pty.openpty()
        code = (
            "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
            "from magicjax.cli.main import main; main()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "chat", *map(str, arguments)],
            env=os.environ | {"TERM": "dumb", "PYTHONPATH": os.getcwd()},
            **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
            start_new_session=True,
        )
        os.close(slave)
        self.text = ""

    def until(self, pattern: str) -> str:
        """Reads up to a pattern, and returns what was read."""
        deadline = time.monotonic() + SECONDS
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text!r}"
            if select.select([self.master], [], [], 1)[0]:
                self.text += os.read(self.master, 4096).decode().replace("\r", "")
        read, self.text = self.text[: found.end()], self.text[found.end() :]
        return read

    def say(self, line: str, pattern: str = r"\n> $") -> str:
        """Enters a line and reads up to the next prompt, or to a pattern."""
        return self.press(f"{line}\n", pattern)

    def press(self, keys: str, pattern: str) -> str:
        os.write(self.master, keys.encode())
        return self.until(pattern)

    def interrupt(self, pattern: str) -> str:
        """Presses Ctrl-C at a prompt; again if readline missed it, as it can just after one."""
        os.write(self.master, b"\x03")
        if not select.select([self.master], [], [], 10)[0]:
            os.write(self.master, b"\x03")
        return self.until(pattern)


def test_a_conversation_in_a_terminal(model, tmp_path):
    # An endless answer must not end before Ctrl-C arrives.
    options = "--drafter", "prompt-lookup", "--max-tokens", 7000
    terminal, file = Terminal("--target", model, *options), tmp_path / "c.json"
    assert terminal.until(r"> $").endswith("drafter prompt-lookup, chain:4\n> ")
    notice = "(loading or compiling programs; once per start)\n"
    for turn in range(4):
        answer = f"{notice if turn == 0 else ''}fine.\n"
        assert terminal.say(f"turn {turn} of many?").endswith(f"of many?\n{answer}> ")
    terminal.say("for ever!", "lolo")
    terminal.press("\x03", r"\n\(stopped\)\n> $")
    assert terminal.say("how are you?").endswith("?\nfine.\n> ")
    stats = terminal.say("/stats")
    # The sixth turn prefills the last token of the fifth answer, its end, and the message.
    assert re.search(
        rf"last answer: 6 tokens, [\d.]+ tokens/s, tau .*, {2 + len('how are you?')} tokens", stats
    )
    assert re.search(r"in total:    \d+ tokens.*\ncontext:     \d+ of 8192 tokens", stats)
    assert f"saved 12 messages in {file}" in terminal.say(f"/save {file}")
    messages = json.loads(file.read_text())
    assert [message["role"] for message in messages] == ["user", "assistant"] * 6
    assert messages[-2:] == [
        {"role": "user", "content": "how are you?"},
        {"role": "assistant", "content": "fine."},
    ]
    assert re.fullmatch("(lo)+l?", messages[9]["content"])
    time.sleep(0.5)
    terminal.interrupt(r"\nCtrl-C again, Ctrl-D or /quit ends; /help lists the commands\n> $")
    os.write(terminal.master, b"\x04")
    assert terminal.process.wait(SECONDS) == 0


def test_a_conversation_from_a_pipe(talk, tmp_path):
    file = tmp_path / "new" / "c.json"
    code, out, err = talk(
        ["hi?", "", "/reset", "and you?", f"/save {file}", "/save", f"/save {tmp_path}", "/stat"],
        *("--system", "be kind"),
    )
    assert (code, out) == (0, "fine.\nfine.\n")
    assert err.startswith("drafter prompt-lookup:4, chain:4; --drafter none turns it off\n")
    assert [message["content"] for message in json.loads(file.read_text())] == [
        *("be kind", "and you?", "fine.")
    ]
    assert "(new conversation)\n" in err
    assert "/save needs a file: /save conversation.json\n" in err
    assert re.search(rf"^/save {tmp_path}: Is a directory$", err, re.M)
    assert "unknown command /stat; did you mean '/stats'?; /help lists the commands" in err


def test_answers_end_at_stop_strings_and_tokens(talk):
    token = byte_tokenizer(None).convert_tokens_to_ids("o")
    for options in (("--stop-token-id", token), ("--stop", "ol")):
        code, out, err = talk(["go!", "hi?"], *options)
        assert (code, out) == (0, "l\nfine.\n") and "ended at" not in err


@pytest.mark.slow
def test_a_full_context_ends_answers_and_refuses_messages_in_one_line(talk):
    code, out, err = talk(
        ["go!", "more?", "/reset", "hi?", "go!"], "--max-context", 24, "--max-tokens", 22
    )
    assert code == 0
    answer = ("lo" * 11)[:21]
    assert out.startswith(f"{answer}\nfine.\n")
    assert err.splitlines()[1:4] == [
        "(loading or compiling programs; once per start)",
        "(the context of 24 tokens is full: /reset starts a new conversation)",
        "the conversation has 30 tokens with this message, and --max-context 24 leaves no room for "
        "an answer: shorten the message, set a larger --max-context, or start a new conversation "
        "(/reset)",
    ]


@pytest.fixture
def sampling_model(model, tmp_path):
    """Returns a function that copies the model with settings in generation_config.json."""

    def copy(**settings):
        path = shutil.copytree(model, tmp_path / f"model {len([*tmp_path.iterdir()])}")
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0} | settings))
        return path

    return copy


@pytest.mark.slow
def test_sampling_is_what_the_files_ask_for(sampling_model, run):
    prompt = ("--prompt", "abc", "--max-tokens", "40")

    def text(target, *options):
        code, output, errors = run("generate", "--target", target, *prompt, *options)
        assert code == 0
        return output.splitlines()[0], errors

    hot = sampling_model(temperature=50.0, top_k=30, min_p=0.0, repetition_penalty=1.0)
    sampled, _ = text(hot, "--do-sample")
    assert (sampled, "") == (text(hot, "--temperature", "50", "--top-k", "30")[0], "")
    assert text(hot, "--do-sample", "--top-k", "2")[0] != sampled
    assert text(hot, "--do-sample", "--top-k", "0")[0] == text(hot, "--temperature", "50")[0]
    greedy, errors = text(hot)
    assert greedy != sampled and greedy == text(sampling_model())[0]
    assert "asks for temperature 50, top_k 30 (--do-sample)" in errors
    assert "asks for top_k 30 (--do-sample)" in text(sampling_model(top_k=30))[1]
    penalized = text(sampling_model(temperature=0.5, repetition_penalty=1.2))[1]
    assert "asks for temperature 0.5, repetition_penalty 1.2 (--do-sample)" in penalized
    typical = text(sampling_model(temperature=0.5, typical_p=0.9))[1]
    assert "typical_p 0.9 (typical_p: not supported)" in typical
    for settings, message in (
        (dict(temperature=0.6, typical_p=0.9, epsilon_cutoff=0.1), "epsilon_cutoff, typical_p"),
        ({}, "no generation_config.json that asks for sampling"),
        (dict(temperature=0.6, do_sample=False), "no generation_config.json that asks"),
        (dict(temperature="0.6"), "temperature '0.6' must be a number: correct generation_config"),
    ):
        code, _, errors = run(
            "generate", "--target", sampling_model(**settings), *prompt, "--do-sample"
        )
        assert code != 0 and message in errors


def test_generate_answers_a_message_in_the_chat_template(model, run):
    code, out, err = run("generate", "--target", model, "--chat", "how are you?")
    assert (code, out) == (0, "fine.\n")


REFUSED = {
    "auto": (["--drafter", "auto"], "--drafter auto measures a single prompt: find a drafter"),
    "beyond the model": (["--max-context", "30000"], "and at most the 20000 positions of"),
    "no room": (
        ["--max-context", "4", "--system", "be brief"],
        "--max-context 4: it must be at le",
    ),
    "no count": (["--max-tokens", "4x"], "'4x' is not a number of tokens: use 8192 or 8k"),
    "no new tokens": (["--max-tokens", "0"], "--max-tokens 0: it must be an integer of at least 1"),
    "a tree alone": (
        ["--tree", "chain:2", "--drafter", "none"],
        "--tree has no effect with --drafter none: remove it",
    ),
    "a copy of offloaded weights": (
        ["--offload", "--drafter", "self:weights=int8"],
        "quantize a target on the device, and the target is offloaded",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_options_are_errors_before_weights_are_loaded(what, model, run, monkeypatch):
    arguments, message = REFUSED[what]
    monkeypatch.setattr(loading, "with_weights", None)
    code, out, err = run("chat", "--target", model, *arguments)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def larger(model, path, tokens):
    """Saves the model's tokenizer with added tokens; returns its path and its size before."""
    tokenizer = models.load_tokenizer(model)
    size = len(tokenizer)
    tokenizer.add_tokens(tokens)
    tokenizer.save_pretrained(path)
    return path, size


@pytest.mark.parametrize("command", [["chat"], ["generate", "--prompt", "a"]])
def test_a_tokenizer_of_which_the_model_lacks_a_tenth_is_an_error(
    command, model, run, monkeypatch, tmp_path
):
    path, size = larger(model, tmp_path, [f"<{i}>" for i in range(30)])
    monkeypatch.setattr(models, "load_checkpoint", None)
    code, out, err = run(*command, "--target", model, "--tokenizer", path)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert f"30 of the {size + 30} tokens of the tokenizer of {path}, such as '<0>'" in err
    assert f"(id {size}), are outside the model's vocabulary of {size} tokens: use" in err


def test_a_token_that_the_model_lacks_is_an_error_in_prompts_only(model, run, talk, tmp_path):
    path, size = larger(model, tmp_path, ["<new>"])
    message = f"token {size} ('<new>'), outside the target's vocabulary of {size} tokens"
    arguments = ["--target", model, "--tokenizer", path, "--max-tokens", "4"]
    code, out, err = run("generate", *arguments, "--prompt", "a<new>")
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    code, out, err = talk(["a <new> one?", "hi?"], "--tokenizer", path)
    assert (code, out) == (0, "fine.\n") and message in err


@pytest.mark.parametrize("command", [["chat"], ["generate", "--chat", "hi?"]])
def test_a_tokenizer_without_a_template_is_an_error(command, run, monkeypatch, tmp_path):
    bare, before = saved(tmp_path / "bare", None), program_cache.totals()
    monkeypatch.setattr(loading, "with_weights", None)
    code, out, err = run(*command, "--target", bare)
    assert code == 2 and program_cache.totals() == before
    assert "the tokenizer has no chat template: pass the prompt as text, or use a" in err


def test_a_template_that_rejects_the_system_message_is_an_error(run, monkeypatch, tmp_path):
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    model = saved(tmp_path / "strict", strict + TEMPLATE)
    monkeypatch.setattr(loading, "with_weights", None)
    code, out, err = run("chat", "--target", model, "--system", "be kind")
    assert code == 2 and "the chat template rejects messages of system, user: no system" in err
