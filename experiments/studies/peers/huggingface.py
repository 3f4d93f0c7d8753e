"""Generates with Hugging Face transformers; `serve.py` runs it where torch is installed."""

import copy
import functools
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}


class Stopwatch(StoppingCriteria):
    """Never stops generation; records (time, tokens) after every step.

    The first call follows prefill and the first token, so the time between the first and the last
    stamp is decoding alone.
    """

    def __init__(self):
        self.stamps: list[tuple[float, int]] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.stamps.append((time.perf_counter(), input_ids.shape[1]))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@functools.cache
def load(directory: str, dtype: str) -> Any:
    """Returns a model that does not stop at end tokens."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def generate(
    directory: str,
    dtype: str,
    prompts: list[list[int]],
    new_tokens: int,
    threads: int,
    cache: str,
    compiled: bool = False,
    lookup_tokens: int = 0,
    assistant: str = "",
    assistant_tokens: int = 0,
) -> dict:
    """Returns the new tokens and time stamps of one greedy call of `generate`.

    With `assistant_tokens`=0, an assistant drafts with the library's default settings.
    """
    torch.set_num_threads(threads)
    model = load(directory, dtype)
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    if cache == "static":
        options["cache_implementation"] = "static"
    if compiled:
        options["compile_config"] = transformers.CompileConfig(fullgraph=False)
        options["compile_config"]._compile_all_devices = True
    if lookup_tokens:
        options["prompt_lookup_num_tokens"] = lookup_tokens
    if assistant:
        drafter = load(assistant, dtype)
        defaults = drafter.generation_config
        drafter.generation_config = copy.deepcopy(defaults)
        if assistant_tokens:
            drafter.generation_config.num_assistant_tokens = assistant_tokens
            drafter.generation_config.num_assistant_tokens_schedule = "constant"
            drafter.generation_config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = drafter
    tokens = torch.tensor(prompts)
    watch = Stopwatch()
    begin = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            stopping_criteria=StoppingCriteriaList([watch]),
            **options,
        )
    if assistant:
        drafter.generation_config = defaults
    return {
        "tokens": out[:, tokens.shape[1] :].tolist(),
        "stamps": [(at - begin, length - tokens.shape[1]) for at, length in watch.stamps],
    }
