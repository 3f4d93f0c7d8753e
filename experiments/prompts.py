"""Prompts from modules that no embedded model was trained on.

Held-out modules make one stream of tokens, cut into as many stretches as there are rows. A prompt
ends `offset` tokens before the end of its stretch, whatever its length, so that rows differ, and
a longer context is the same place seen with more of what came before.
"""

from typing import Any

import numpy as np
from jaxtyping import Int

from experiments import corpus


def held_out_stream(tokenizer: Any, modules: list[corpus.Module] | None = None) -> np.ndarray:
    """Returns int32 [n]: the held-out modules' tokens, each followed by the end token.

    The split goes by paths, so it holds for any version of Python; the text is that of the one
    that runs, and so prompts, and timings a little, differ between versions.
    """
    if modules is None:
        _, modules = corpus.split(corpus.library())
    if tokenizer is None:
        raise ValueError("the target has no tokenizer: prompts are made from text")
    stream: list[int] = []
    for module in modules:
        stream += tokenizer.encode(module.text, add_special_tokens=False, verbose=False)
        if tokenizer.eos_token_id is not None:
            stream.append(tokenizer.eos_token_id)
    return np.array(stream, np.int32)


def cut(stream: Int[np.ndarray, " n"], batch: int, context: int, offset: int) -> np.ndarray:
    """Returns int32 [batch, context], rows that do not overlap.

    With n = 100, batch = 2, context = 30, offset = 10: tokens 10 to 39, and 60 to 89.

    Raises:
      ValueError: the stream is too short.
    """
    stretch = len(stream) // batch
    if context + offset > stretch:
        fits = len(stream) // (context + offset)
        longest = stretch - offset
        remedies = [
            *([f"a batch of at most {fits}"] if fits else []),
            *([f"a context of at most {longest}"] if longest > 0 else []),
            "a longer text",
        ]
        raise ValueError(
            f"batch={batch} prompts of context={context}, each ending offset={offset} tokens "
            f"before its stretch does, need {batch * (context + offset)} tokens, but the held-out "
            f"text has {len(stream)}: choose {' or '.join(remedies)}"
        )
    ends = (np.arange(batch) + 1) * stretch - offset
    return np.stack([stream[end - context : end] for end in ends])
