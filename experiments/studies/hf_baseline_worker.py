"""Generates with Hugging Face transformers, for `experiments.studies.hf_baseline`.

Runs in an environment with torch and transformers, without this project. Reads requests as JSON
lines from stdin and writes answers as JSON lines to stdout; output of libraries goes to stderr.
"""

import copy
import functools
import json
import os
import sys
import time
import traceback
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


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
def load(directory: str) -> Any:
    """Returns a model in float32 that does not stop at end tokens."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def generate(
    directory: str,
    prompts: list[list[int]],
    new_tokens: int,
    cache: str,
    compiled: bool = False,
    assistant: str = "",
    assistant_tokens: int = 0,
) -> dict:
    """Returns the new tokens and time stamps of one greedy call of `generate`.

    With `assistant_tokens`=0, an assistant drafts with the library's default settings.
    """
    model = load(directory)
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    if cache == "static":
        options["cache_implementation"] = "static"
    if compiled:
        options["compile_config"] = transformers.CompileConfig(fullgraph=False)
        options["compile_config"]._compile_all_devices = True
    if assistant:
        drafter = load(assistant)
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


def main():
    """Writes the versions, then answers requests until stdin ends.

    An exception is answered with its traceback.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(int(sys.argv[1]))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(versions), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = generate(**json.loads(line))
        except Exception as error:  # raised again by `hf_baseline`
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
