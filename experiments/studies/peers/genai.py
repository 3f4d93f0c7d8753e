"""Generates with OpenVINO GenAI; `serve.py` runs it where openvino-genai is installed."""

import functools
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

VERSIONS = {"openvino-genai": openvino_genai.__version__}


class Stopwatch(openvino_genai.StreamerBase):
    """Records (time, tokens) whenever tokens are decoded."""

    def __init__(self):
        super().__init__()
        self.begin, self.count = time.perf_counter(), 0
        self.stamps: list[tuple[float, int]] = []

    def write(self, token):
        self.count += len(token) if isinstance(token, list) else 1
        self.stamps.append((time.perf_counter() - self.begin, self.count))
        return openvino_genai.StreamingStatus.RUNNING

    def end(self):
        pass


@functools.lru_cache(maxsize=1)
def load(file: str, threads: int, lookup: bool) -> Any:
    """Returns a pipeline with the library's default precision of activations and caches."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # each run prefills its prompt
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "scheduler_config": scheduler}
    if lookup:
        options["prompt_lookup"] = True
    return openvino_genai.LLMPipeline(file, "CPU", **options)


def generate(
    file: str,
    prompts: list[list[int]],
    new_tokens: int,
    threads: int,
    drafted_tokens: int = 0,
) -> dict:
    """Returns the new tokens and time stamps of one greedy call for one prompt."""
    (prompt,) = prompts
    pipeline = load(file, threads, bool(drafted_tokens))
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
    if drafted_tokens:
        config.num_assistant_tokens, config.max_ngram_size = drafted_tokens, 3
    tokens = np.array([prompt], np.int64)
    inputs = openvino_genai.TokenizedInputs(
        openvino.Tensor(tokens), openvino.Tensor(np.ones_like(tokens))
    )
    watch = Stopwatch()
    (out,) = pipeline.generate(inputs, config, streamer=watch).tokens
    return {"tokens": [list(out)], "stamps": watch.stamps}
