"""A step of Hugging Face transformers' `generate` with a static cache, on the same device.

It runs in a process of its own, before JAX takes the device's memory. The model has the same
config and random weights; the cache is filled with random numbers instead of reading a prompt.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from typing import Any

from magicjax.generation import config_of

SHORT, LONG = 4, 36  # new tokens of two calls, whose difference is decoding alone
REPEATS = 3
SECONDS = 300  # that it may take, with the compiling
ANSWER = "answer: "


@dataclasses.dataclass(frozen=True)
class Question:
    """What to time.

    Attributes:
      config: of the model, as Hugging Face writes it.
      dtype: of weights and cache.
      batch, context: rows, and the tokens that each has in the cache.
      device: of torch, cuda or cpu.
    """

    config: dict[str, Any]
    dtype: str
    batch: int
    context: int
    device: str


def ask(target: str, dtype: str, batch: int, context: int, device: str) -> dict[str, Any]:
    """Returns {"ms", "torch", "transformers"}, or {"why"} if it cannot be timed here.

    Args:
      target: preset or model directory; only its config is read.
      dtype, batch, context, device: as for Question.
    """
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        return {"why": f"{missing[0]} is not installed"}
    from models.hf_config import write_config

    question = Question(write_config(config_of(target)), dtype, batch, context, device)
    try:
        found = subprocess.run(
            [
                sys.executable,
                "-m",
                "magicjax.benchmarks.hf_baseline",
                json.dumps(dataclasses.asdict(question)),
            ],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"why": f"took longer than {SECONDS} s"}
    answers = [line for line in found.stdout.splitlines() if line.startswith(ANSWER)]
    if answers:
        return json.loads(answers[-1].removeprefix(ANSWER))
    last = (found.stderr.strip().splitlines() or ["nothing printed"])[-1]
    return {"why": f"ended with status {found.returncode}: {last[:300]}"}


def answer(question: Question) -> dict[str, Any]:
    """Returns the answer, in the process that has torch."""
    import torch
    import transformers

    if question.device == "cuda" and not torch.cuda.is_available():
        return {"why": "torch is installed without CUDA"}
    dtype, device = getattr(torch, question.dtype), torch.device(question.device)
    config = transformers.AutoConfig.for_model(**question.config)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    slots = question.context + 1 + LONG
    cache: Any = transformers.StaticCache(config=model.config, max_cache_len=slots)
    heads, size = config.num_key_value_heads, config.head_dim
    cache.early_initialization(question.batch, heads, size, dtype, device)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    tokens = torch.zeros(question.batch, question.context + 1, dtype=torch.long, device=device)

    def seconds(new: int) -> float:
        for layer in cache.layers:
            layer.cumulative_length.fill_(question.context)  # the last token is not in it yet
        begin = time.perf_counter()
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            past_key_values=cache,
            max_new_tokens=new,
            do_sample=False,
        )
        assert out.shape[1] == tokens.shape[1] + new
        out.sum().item()  # waits
        return time.perf_counter() - begin

    seconds(SHORT)  # compiles
    short = min(seconds(SHORT) for _ in range(REPEATS))
    long = min(seconds(LONG) for _ in range(REPEATS))
    if long <= short:
        return {"why": f"{LONG} tokens took no longer than {SHORT}: the machine is too busy"}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"ms": 1e3 * (long - short) / (LONG - SHORT)} | versions


if __name__ == "__main__":
    print(ANSWER + json.dumps(answer(Question(**json.loads(sys.argv[1])))))
