"""A store of texts in one array of fixed size, on the host.

Each text is followed by `NO_TOKEN`, the newest one is last, and unused slots are before the first:

    -1 -1 -1 -1 5 6 7 -1 8 9 -1
"""

from typing import Any

import numpy as np
from jaxtyping import Int

NO_TOKEN = -1  # after a text, and in unused slots


def empty(size: int) -> Int[np.ndarray, "M"]:
    """Returns a store of M slots without texts, int32."""
    return np.full(size, NO_TOKEN, np.int32)


def with_text(store: Int[np.ndarray, "M"], text: Any) -> Int[np.ndarray, "M"]:
    """Returns the store with a text added as the newest one.

    The oldest tokens leave a full store. A text that is longer than the store keeps its end.

    Args:
      store: int32 [M].
      text: token ids [T].

    Raises:
      ValueError, TypeError: other numbers than token ids, or another shape.
    """
    tokens = np.asarray(text)
    if tokens.size == 0:
        return store
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(
            f"a text of shape {tokens.shape} and dtype {tokens.dtype}: pass the token ids of one "
            "text, such as tokenizer(text)['input_ids']"
        )
    if outside := tokens[(tokens < 0) | (tokens > np.iinfo(np.int32).max)].tolist():
        raise ValueError(f"a text with token {outside[0]}: token ids are 0 to 2**31 - 1")
    joined = np.concatenate([store, tokens, [NO_TOKEN]]).astype(np.int32)
    return joined[len(joined) - len(store) :]
