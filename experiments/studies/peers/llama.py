"""Generates with llama.cpp; `serve.py` runs it where llama-cpp-python is installed."""

import functools
import itertools
import time

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

VERSIONS = {"llama-cpp-python": llama_cpp.__version__}
FILE_TYPE = "LLAMA_FTYPE_MOSTLY_"


@functools.lru_cache(maxsize=2)
def load(file: str, capacity: int, threads: int, lookup_tokens: int) -> llama_cpp.Llama:
    """Returns a model with a cache of `capacity` tokens."""
    draft = LlamaPromptLookupDecoding(num_pred_tokens=lookup_tokens) if lookup_tokens else None
    options = {"n_threads": threads, "n_threads_batch": threads, "draft_model": draft}
    options["logits_all"] = bool(draft)  # else the array of logits is too short for drafts
    return llama_cpp.Llama(file, n_ctx=capacity, verbose=False, **options)


def quantization(model: llama_cpp.Llama) -> str:
    """Returns the type of the file's weights, such as Q4_1."""
    number = int(model.metadata.get("general.file_type", -1))
    names = [n for n in dir(llama_cpp) if n.startswith(FILE_TYPE)]
    found = [n for n in names if getattr(llama_cpp, n) == number]
    if number == 0:
        return "float32"
    return found[0].removeprefix(FILE_TYPE) if found else f"type {number}"


def generate(
    file: str, prompts: list[list[int]], new_tokens: int, threads: int, lookup_tokens: int = 0
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
    return {"tokens": [tokens], "stamps": stamps, "dtype": quantization(model)}
