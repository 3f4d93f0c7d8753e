"""Compares a GGUF file with Hugging Face transformers' reading of it: tokens, logits, greedy text.

    python -m tests.models.compare_gguf FILE.gguf PYTHON

PYTHON has torch, transformers, accelerate and gguf, and does not need this project. Both compute in
float32. Fails unless all token ids of a mixed text of 1.1 MB and all greedy tokens are equal, and
the largest error of a logit is at most 1e-4 of the largest logit.

transformers does not split digits as the pre-tokenizer `smollm` does, so it tokenizes the text
between digits, and every digit, separately. That is what `smollm` means.
"""

import json
import pathlib
import random
import subprocess
import sys
import tempfile
import unicodedata

import numpy as np

CONTEXT, NEW_TOKENS = 2048, 128
LIMIT = 1e-4
QUESTIONS = (
    "What is a token tree?",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "List 5 prime numbers above 100.",
    "Translate 'good morning' into French.",
    "Explain recursion to a child.",
    "Who wrote Faust, and when?",
    "What is 12 * 34?",
)


def mixed_text(special: list[str]) -> str:
    """Returns documentation, source code, numbers, characters of all scripts and special tokens."""
    import pydoc_data.topics

    draw = random.Random(0)
    points = [i for i in range(0x110000) if unicodedata.category(chr(i)) not in ("Cs", "Cn", "Co")]
    lib = pathlib.Path(json.__file__).parent.parent
    code = [path.read_text("utf-8") for path in sorted(lib.glob("*.py"))[:40]]
    parts = (
        "\n".join(pydoc_data.topics.topics.values())[:400_000],
        "".join(code)[:300_000],
        " ".join(str(draw.choice([1, 1.0, -1]) * draw.randrange(10**9)) for _ in range(20_000)),
        "".join(chr(draw.choice(points)) + " " * (draw.random() < 0.2) for _ in range(40_000)),
        "".join(draw.choice([*special, " word", "\n\n\t ", "  "]) for _ in range(5_000)),
    )
    return "".join(parts)


def their_ids(tokenizer, text: str) -> list[int]:
    """Returns the token ids of the parts of a text between digits, and of every digit."""
    parts = [""]
    for char in text:
        if unicodedata.category(char).startswith("N"):
            parts += [char, ""]
        else:
            parts[-1] += char
    rows = tokenizer([part for part in parts if part], add_special_tokens=False)["input_ids"]
    return [token for row in rows for token in row]


def theirs(gguf: str, folder: pathlib.Path) -> None:
    """Writes what transformers computes; runs in the other environment."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(pathlib.Path(gguf).parent)}
    where["gguf_file"] = pathlib.Path(gguf).name
    tokenizer = AutoTokenizer.from_pretrained(**where)
    inputs = json.loads((folder / "inputs.json").read_text())
    ids = their_ids(tokenizer, inputs["text"])
    print("token ids are done", file=sys.stderr)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        logits = model(torch.tensor([inputs["context"]])).logits[0].numpy()
        print("logits are done", file=sys.stderr)
        greedy = [
            model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
            )[0, len(prompt) :].tolist()
            for prompt in inputs["prompts"]
        ]
    np.savez(folder / "theirs.npz", ids=ids, logits=logits, greedy=greedy)


def main(gguf: str, python: str) -> int:
    import magicjax
    from tests.models.conftest import logits_of

    model = magicjax.load(gguf, dtype="float32")
    tokenizer = model.tokenizer
    text = mixed_text(tokenizer.all_special_tokens)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        for chat in chats
    ]
    inputs = {"text": text, "context": ids[:CONTEXT], "prompts": prompts}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "inputs.json").write_text(json.dumps(inputs))
        gguf = str(pathlib.Path(gguf).resolve())
        subprocess.run([python, __file__, gguf, "--theirs", name], check=True)
        expected = dict(np.load(folder / "theirs.npz"))
    logits = np.asarray(logits_of(model.module, model.params, np.array([ids[:CONTEXT]])))[0]
    error = np.abs(logits - expected["logits"]).max() / np.abs(expected["logits"]).max()
    params = magicjax.SamplingParams(max_tokens=NEW_TOKENS)
    out = magicjax.generate(model, prompts, params, eos_token_id=[])
    equal_rows = int((np.asarray(out.tokens) == expected["greedy"]).all(1).sum())
    equal_ids = np.array_equal(ids, expected["ids"])
    print(f"{len(text.encode()):,} bytes: {len(ids):,} token ids equal: {equal_ids}")
    print(f"{CONTEXT:,} tokens: largest error of a logit {error:.1e} of the largest logit")
    print(f"{len(prompts)} prompts: {equal_rows} of equal greedy text of {NEW_TOKENS} tokens")
    return 0 if equal_ids and error <= LIMIT and equal_rows == len(prompts) else 1


if __name__ == "__main__":
    if sys.argv[2] == "--theirs":
        theirs(sys.argv[1], pathlib.Path(sys.argv[3]))
    else:
        sys.exit(main(*sys.argv[1:]))
