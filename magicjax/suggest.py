"""Hints for names that do not exist: the nearest one, or that of another library's argument."""

import difflib
import functools
import inspect
import reprlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

# A transposition or one other letter in a name of four letters has 0.75, `budgt` for `budget` 0.91.
SIMILARITY = 0.75

# Arguments of transformers and vLLM, and what has the same effect here: an argument, or a phrase.
RENAMED = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "stop_strings": "stop",
    "max_model_len": "capacity",
    "max_num_seqs": "slots",
    "max_num_batched_tokens": "prefill_chunk",
    "torch_dtype": "dtype",
    "quantization": "weights",
}
PHRASES = {
    "do_sample": "temperature=0, the default of magicjax.SamplingParams, is greedy decoding, and a "
    "temperature above 0 samples",
    "n": "repeat the prompt with other seeds, or call engine.submit_samples(prompt, n, params)",
    "num_beams": "beam search is not supported: decode greedily, or sample",
    "assistant_model": "pass drafter=magicjax.SmallModel(magicjax.load(PATH)) to magicjax.generate "
    "or magicjax.Engine",
    "prompt_lookup_num_tokens": "pass drafter='prompt-lookup' and tree='chain:4'",
    "speculative_config": "pass drafter='prompt-lookup:4' or another drafter, and tree='chain:4'",
    "tensor_parallel_size": "pass mesh=magicjax.make_mesh(model=...) to magicjax.load, and to "
    "magicjax.generate or magicjax.Engine",
    "enable_prefix_caching": "prefixes are stored unless magicjax.EngineConfig(prefix_bytes=0)",
    "attention_mask": "pass what the tokenizer returned, with its mask, as prompts",
}
PHRASES |= dict.fromkeys(("best_of", "num_return_sequences"), PHRASES["n"])

# Arguments of the public calls that are themselves made by one.
PARTS = {"params": "magicjax.SamplingParams", "config": "magicjax.EngineConfig"}

_arguments: dict[str, tuple[str, ...]] = {}  # of the calls of `explain_unknown`, by name


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'NEAREST'?" for a misspelling of a known name, else "".

    Leading dashes and slashes, case, and the difference of `-` and `_` do not count.
    """
    plain = {_plain(each): each for each in known}
    nearest = difflib.get_close_matches(_plain(name), plain, 1, SIMILARITY)
    return f"; did you mean {plain[nearest[0]]!r}?" if nearest else ""


def _plain(name: str) -> str:
    return name.lstrip("-/").lower().replace("-", "_")


def explain_unknown[Call: Callable](call: Call) -> Call:
    """Returns a public function or class whose error for an unknown keyword names the remedy."""
    if isinstance(call, type):
        cls: Any = call
        cls.__init__ = explain_unknown(cls.__init__)
        return call
    name = f"magicjax.{call.__qualname__}".removesuffix(".__init__")
    known = _arguments[name] = tuple(inspect.signature(call).parameters)

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for unknown, value in kwargs.items():
            if unknown not in known:
                given_as = f"{unknown}={reprlib.repr(value)}"
                raise TypeError(f"{given_as} is not an argument of {name}{_remedy(name, unknown)}")
        return call(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _remedy(call: str, unknown: str) -> str:
    """Returns what to pass to a call, or to others, instead of an argument that it lacks."""
    if unknown in PHRASES:
        return f": {PHRASES[unknown]}"
    name = RENAMED.get(unknown, unknown)
    if name in _arguments[call]:
        return f": use {name}=..."
    package: Any = sys.modules[__package__]
    for public in package.__all__:  # imports the calls that are not imported yet
        getattr(package, public)
    having = [other for other, known in sorted(_arguments.items()) if name in known]
    passed = [other for argument, other in PARTS.items() if argument in _arguments[call]]
    if having := [other for other in having if other in passed] or having:
        return f": use {' or '.join(f'{other}({name}=...)' for other in having)}"
    arguments = [*_arguments[call], *(each for known in _arguments.values() for each in known)]
    return did_you_mean(unknown, arguments) or f": see help({call})"
