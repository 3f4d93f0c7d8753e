"""Generates with llama.cpp; `serve.py` runs it where llama-cpp-python is installed."""

import ctypes
import functools
import itertools
import time

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

VERSIONS = {"llama-cpp-python": llama_cpp.__version__}
FILE_TYPES = {
    "float32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "float16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "bfloat16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
}


@functools.lru_cache(maxsize=2)
def load(file: str, capacity: int, threads: int, lookup_tokens: int) -> llama_cpp.Llama:
    """Returns a model with a cache of `capacity` tokens."""
    draft = LlamaPromptLookupDecoding(num_pred_tokens=lookup_tokens) if lookup_tokens else None
    options = {"n_threads": threads, "n_threads_batch": threads, "draft_model": draft}
    options["logits_all"] = bool(draft)  # else the array of logits is too short for drafts
    return llama_cpp.Llama(file, n_ctx=capacity, verbose=False, **options)


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
    lookup_tokens: int = 0,
) -> dict:
    """Returns the new tokens and time stamps of one greedy call for one prompt."""
    (prompt,) = prompts
    model = load(file, len(prompt) + new_tokens + lookup_tokens, threads, lookup_tokens)
    model.reset()  # else the cache of an equal prompt is used again
    begin = time.perf_counter()
    tokens, stamps = [], []
    for token in itertools.islice(model.generate(prompt, temp=0.0), new_tokens):
        tokens.append(token)
        stamps.append((time.perf_counter() - begin, len(tokens)))
    return {"tokens": [tokens], "stamps": stamps}
