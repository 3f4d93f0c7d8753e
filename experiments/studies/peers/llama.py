"""Generates with llama.cpp; `serve.py` runs it where llama-cpp-python is installed."""

import ctypes
import functools
import itertools
import time

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

VERSIONS = {"llama-cpp-python": llama_cpp.__version__}
FILE_TYPES = {
    "float32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "float16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "bfloat16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
}


class SmallModel(LlamaDraftModel):
    """Drafts greedily with another model, whose cache keeps the accepted tokens."""

    def __init__(self, model: llama_cpp.Llama, tokens: int):
        self.model, self.tokens = model, tokens

    def __call__(self, input_ids, /, **kwargs):
        room = self.model.n_ctx() - len(input_ids)
        drafted = self.model.generate(input_ids.tolist(), temp=0.0)
        return np.array(list(itertools.islice(drafted, min(self.tokens, room))), np.intc)


@functools.lru_cache(maxsize=3)
def load(
    file: str, capacity: int, threads: int, drafted_tokens: int, draft: str
) -> llama_cpp.Llama:
    """Returns a model with a cache of `capacity` tokens.

    It drafts with the model in the file `draft`, or by prompt lookup if that is "".
    """
    options = {"n_threads": threads, "n_threads_batch": threads, "n_ctx": capacity}
    options |= {"verbose": False}
    if draft:
        options["draft_model"] = SmallModel(llama_cpp.Llama(draft, **options), drafted_tokens)
    elif drafted_tokens:
        options["draft_model"] = LlamaPromptLookupDecoding(num_pred_tokens=drafted_tokens)
    # Without logits_all the array of logits is too short for drafts.
    return llama_cpp.Llama(file, logits_all=bool(drafted_tokens), **options)


@llama_cpp.llama_log_callback
def _discard(level, text, data):
    """Drops a message: converting prints a line for every tensor."""


def convert(file: str, out: str, dtype: str) -> dict:
    """Writes a file with the weights of another one in a type of `FILE_TYPES`."""
    llama_cpp.llama_log_set(_discard, None)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[dtype]
    params.allow_requantize = True
    code = llama_cpp.llama_model_quantize(file.encode(), out.encode(), ctypes.byref(params))
    if code:
        raise RuntimeError(f"llama.cpp could not convert {file} to {dtype}: code {code}")
    return {}


def generate(
    file: str,
    prompts: list[list[int]],
    new_tokens: int,
    threads: int,
    drafted_tokens: int = 0,
    draft: str = "",
) -> dict:
    """Returns the new tokens and time stamps of one greedy call for one prompt."""
    (prompt,) = prompts
    capacity = len(prompt) + new_tokens + drafted_tokens
    model = load(file, capacity, threads, drafted_tokens, draft)
    model.reset()  # else the cache of an equal prompt is used again
    if isinstance(model.draft_model, SmallModel):
        model.draft_model.model.reset()
    begin = time.perf_counter()
    tokens, stamps = [], []
    for token in itertools.islice(model.generate(prompt, temp=0.0), new_tokens):
        tokens.append(token)
        stamps.append((time.perf_counter() - begin, len(tokens)))
    return {"tokens": [tokens], "stamps": stamps}
