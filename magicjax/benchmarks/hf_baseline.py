"""Times a step of Hugging Face transformers' `generate` with a static cache on the same device.

It runs in a separate process, before JAX allocates the device's memory. The model has the same
config and random weights, and random numbers fill the cache instead of a prefill.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from typing import Any

from magicjax.loading import config_of

SHORT, LONG = 4, 36  # new tokens of two calls, whose difference is decoding alone
REPEATS = 3
TIMEOUT = 300  # seconds, including compilation
PREFIX = "result: "


def time_step(target: str, dtype: str, batch: int, context: int, device: str) -> dict[str, Any]:
    """Returns {"ms", "torch", "transformers"}, or {"skipped": reason}.

    Args:
      target: as for `magicjax.load`; only its config is read.
      dtype: of weights and cache.
      batch, context: rows, and cached tokens per row.
      device: of torch, cuda or cpu.
    """
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        return {"skipped": f"{missing[0]} is not installed"}
    from models.hf_config import write_config

    config = config_of(target)
    heads = config.num_kv_heads, config.head_dim
    arguments = json.dumps([write_config(config), heads, dtype, batch, context, device])
    try:
        process = subprocess.run(
            [sys.executable, "-m", "magicjax.benchmarks.hf_baseline", arguments],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return {"skipped": f"took longer than {TIMEOUT} s"}
    results = [line for line in process.stdout.splitlines() if line.startswith(PREFIX)]
    if results:
        return json.loads(results[-1].removeprefix(PREFIX))
    last = (process.stderr.strip().splitlines() or ["no output"])[-1]
    return {"skipped": f"exited with status {process.returncode}: {last[:300]}"}


def run(
    hf_config: dict[str, Any],
    heads: tuple[int, int],
    dtype_name: str,
    batch: int,
    context: int,
    device_name: str,
) -> dict[str, Any]:
    """Returns what `time_step` returns; runs in the process that imports torch.

    `heads`: the number of KV heads and their size, which configs of families name differently.
    """
    import torch
    import transformers

    if device_name == "cuda" and not torch.cuda.is_available():
        return {"skipped": "torch is installed without CUDA"}
    dtype, device = getattr(torch, dtype_name), torch.device(device_name)
    config = transformers.AutoConfig.for_model(**hf_config)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    slots = context + 1 + LONG
    cache: Any = transformers.StaticCache(config=model.config, max_cache_len=slots)
    cache.early_initialization(batch, *heads, dtype, device)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    tokens = torch.zeros(batch, context + 1, dtype=torch.long, device=device)

    def seconds(new: int) -> float:
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)  # the cache lacks the last token
        begin = time.perf_counter()
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            past_key_values=cache,
            max_new_tokens=new,
            do_sample=False,
        )
        assert out.shape[1] == tokens.shape[1] + new
        out.sum().item()  # synchronizes
        return time.perf_counter() - begin

    seconds(SHORT)  # compiles
    short = min(seconds(SHORT) for _ in range(REPEATS))
    long = min(seconds(LONG) for _ in range(REPEATS))
    if long <= short:
        return {"skipped": f"{LONG} tokens took no longer than {SHORT}: the machine is too busy"}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"ms": 1e3 * (long - short) / (LONG - SHORT)} | versions


if __name__ == "__main__":
    print(PREFIX + json.dumps(run(*json.loads(sys.argv[1]))))
