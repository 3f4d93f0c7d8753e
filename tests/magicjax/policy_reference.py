"""What each policy pins, in numpy float64 and loops, written from the papers.

All functions take one row and one layer: a prompt of n tokens, whose newest `recent` positions are
in the ring. The candidates are the positions below n - recent. Each policy is a function from a
`Row` to its scores, float64 [K, candidates]; `pinned` picks the highest. Nothing comes from the
packages under test, nor from JAX.

All differ from the papers in one way: there each policy runs again whenever the cache is full; here
it runs once, after the prompt, and the newest `recent` positions are always kept.
"""

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One prompt in one layer, float64.

    Attributes:
      q: [n, H, D], the queries of all its tokens, rotated to their positions.
      keys: [n, K, D], rotated to their positions.
      values: [n, K, D].
      recent: R, how many of the newest positions are in the ring.
    """

    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    recent: int

    @property
    def length(self) -> int:
        return len(self.keys)

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def size(self) -> int:
        return self.keys.shape[2]

    @property
    def candidates(self) -> int:
        return self.length - self.recent

    def heads_of(self, kv_head: int) -> range:
        """Returns the query heads that share a KV head: G neighbours."""
        group = self.heads // self.kv_heads
        return range(kv_head * group, (kv_head + 1) * group)


def pinned(scores: np.ndarray, count: int) -> list[list[int]]:
    """Returns for each head the positions of its `count` highest scores, in order.

    Earlier positions first among equal scores. Scores are [K, candidates].
    """
    chosen = []
    for of_head in scores:
        best_first = sorted(range(len(of_head)), key=lambda position: -of_head[position])
        chosen.append(sorted(best_first[:count]))
    return chosen


def logits(row: Row, scaled: bool = True) -> np.ndarray:
    """Returns [n, H, n]: what query p of head h gives to position s; -inf after p."""
    out = np.full((row.length, row.heads, row.length), -np.inf)
    for kv_head in range(row.kv_heads):
        for head in row.heads_of(kv_head):
            for p in range(row.length):
                out[p, head, : p + 1] = row.keys[: p + 1, kv_head] @ row.q[p, head]
    return out / np.sqrt(row.size) if scaled else out


@functools.cache
def attention(row: Row, scaled: bool = True) -> np.ndarray:
    """Returns [n, H, n]: the probability that query p of head h gives to position s.

    A query sees what is before it and itself, and all of that is in its softmax.
    """
    scores = logits(row, scaled)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def mass(row: Row, queries: int, scaled: bool = True) -> np.ndarray:
    """Returns [K, n]: the attention of the newest `queries` tokens to each position.

    Summed over these queries (all of them in a shorter row) and over the heads of the KV head.
    """
    paid = attention(row, scaled)
    out = np.zeros((row.kv_heads, row.length))
    for kv_head in range(row.kv_heads):
        for head in row.heads_of(kv_head):
            for p in range(max(row.length - queries, 0), row.length):
                out[kv_head] += paid[p, head]
    return out


def pooled(scores: np.ndarray, kernel: int, pooling: str) -> np.ndarray:
    """Returns [K, m] from [K, m]: each score with its kernel // 2 neighbours on either side.

    `max` takes the highest of those that exist; `avg` divides their sum by the kernel, even at
    the ends, as torch's avg_pool1d does by default.
    """
    reach, length = kernel // 2, scores.shape[1]
    out = np.zeros_like(scores)
    for position in range(length):
        near = scores[:, max(position - reach, 0) : position + reach + 1]
        out[:, position] = near.max(1) if pooling == "max" else near.sum(1) / kernel
    return out


def streaming(row: Row) -> np.ndarray:
    """StreamingLLM (arXiv 2309.17453): the first positions, the earlier the better."""
    return np.tile(-np.arange(row.candidates, dtype=np.float64), (row.kv_heads, 1))


def snapkv(
    row: Row, window: int = 32, kernel: int = 7, pooling: str = "max", scaled: bool = True
) -> np.ndarray:
    """SnapKV (arXiv 2404.14469): the attention of the prompt's end, smoothed along positions.

    Differs from the paper and its code:
      - there the candidates end where the window begins, because the window is what is kept
        besides; here they end where the ring begins. With a ring smaller than the window,
        positions in the window are candidates, and only the queries after them count;
        with a larger one, positions before the window are not.
      - there each query head selects and keeps its own copies; here the G heads that share a KV
        head select together. Their sum is pooled. That is the same as the sum of what is pooled
        for `avg`, but not for `max` (MagicDec pools each head, then sums).
      - MagicDec omits the division by sqrt(D), as `scaled=False` does. Its causal mask
        within the window misses some of the queries unless G = 4; here it never does.
    """
    return pooled(mass(row, window, scaled)[:, : row.candidates], kernel, pooling)


def h2o(row: Row) -> np.ndarray:
    """H2O (arXiv 2306.14048): the attention of all queries of the prompt.

    Differs from the paper: there evicted entries get no more attention, so each eviction
    changes the following sums; its code, like this, runs the prompt in full before the first.
    There each query head selects for itself; here the heads that share a KV head together.
    """
    return mass(row, row.length)[:, : row.candidates]


def tova(row: Row) -> np.ndarray:
    """TOVA (arXiv 2401.06104): the attention of the last query, averaged over all heads.

    Differs from the paper: there nothing protects the newest positions.
    """
    last = attention(row)[-1, :, : row.candidates]
    return np.tile(last.mean(axis=0), (row.kv_heads, 1))


def pyramid(pins: int, layers: int, beta: float = 20.0) -> np.ndarray:
    """Returns float64 [layers], how many PyramidKV pins in each layer before rounding.

    A straight line from 2 P - P / beta in the first layer to P / beta in the last, P on average
    (arXiv 2406.02069).

    Differs from its code: there P / beta and the step are rounded down, so that the sum is not
    exact; shares are besides the window, here besides the ring. There a short prompt changes the
    shape: a first layer that would exceed the prompt gets all of it, the last one the more, and
    below twice the budget all layers are SnapKV's. Within a layer the scores are SnapKV's.
    """
    last = pins / beta
    return np.linspace(2 * pins - last, last, layers) if layers > 1 else np.array([float(pins)])


def keydiff(row: Row) -> np.ndarray:
    """KeyDiff (arXiv 2504.15364): minus the cosine between a key and the mean unit key.

    Differs from the paper: there the mean is of all keys in the cache; here the ring's are not in
    it. Keys are rotated, as they stand in the cache.
    """
    out = np.zeros((row.kv_heads, row.candidates))
    for kv_head in range(row.kv_heads):
        keys = row.keys[: row.candidates, kv_head]
        mean = np.mean([key / np.linalg.norm(key) for key in keys], axis=0)
        for position, key in enumerate(keys):
            out[kv_head, position] = -(key @ mean) / np.linalg.norm(key) / np.linalg.norm(mean)
    return out


def knorm(row: Row) -> np.ndarray:
    """Key norms (arXiv 2406.11430): minus the L2 norm of the key; a rotation does not change it.

    Differs from the paper: its authors leave the first two layers whole; here every layer is
    thinned. Nor do they protect the newest positions.
    """
    return -np.linalg.norm(row.keys[: row.candidates], axis=-1).T


def rotation(position: int, inverse: np.ndarray) -> np.ndarray:
    """Returns the matrix [D, D] that rotates pair (x[i], x[i + D/2]) by position * inverse[i]."""
    half = len(inverse)
    out = np.zeros((2 * half, 2 * half))
    for i, frequency in enumerate(inverse):
        cos, sin = np.cos(position * frequency), np.sin(position * frequency)
        out[i, i], out[i, i + half] = cos, -sin
        out[i + half, i], out[i + half, i + half] = sin, cos
    return out


def expected_attention(
    row: Row,
    inverse: np.ndarray | None,
    window: int = 128,
    future: int = 512,
    epsilon: float = 0.0,
    covariance: bool = True,
) -> np.ndarray:
    """Expected Attention (arXiv 2510.00636): the mean attention of future queries.

    Queries before their rotation are taken for Gaussian, with the mean and covariance (divided by
    their number) of the newest `window`. Future rotations are replaced by their mean over the next
    `future` positions. `inverse` is [D/2], radians a position; None: a model that does not rotate.
    Any factor that the model puts on cosine and sine is in the queries, and stays there once.

    Differs from the paper and its code (kvpress):
      - there all queries of the prompt but those of the first 4 tokens are measured, and these 4
        are always kept; here the newest `window` are, and no position is always kept.
      - the attention is normalized over the candidates, there over all keys but the first 4. That
        weighs the G heads against each other a little differently, and epsilon against both.
      - the value's norm omits the output matrix, as in the code, whose authors found it slightly
        better to include it (kvpress pull request 47).
    """
    q, n, size = row.q[-window:], row.length, row.size
    first = n - len(q)
    mean_rotation = np.eye(size)
    if inverse is not None:
        back = [rotation(-(first + i), inverse) for i in range(len(q))]
        q = np.stack([q[i] @ back[i].T for i in range(len(q))])
        mean_rotation = np.mean([rotation(p, inverse) for p in range(n, n + future)], axis=0)
    out = np.zeros((row.kv_heads, row.candidates))
    for kv_head in range(row.kv_heads):
        keys = row.keys[: row.candidates, kv_head]
        for head in row.heads_of(kv_head):
            mean = mean_rotation @ q[:, head].mean(axis=0)
            spread = np.cov(q[:, head].T, bias=True)
            spread = mean_rotation @ spread @ mean_rotation.T
            exponent = keys @ mean / np.sqrt(size)
            if covariance:
                exponent += [key @ spread @ key / (2 * size) for key in keys]
            z = np.exp(exponent - exponent.max())
            out[kv_head] += z / z.sum() + epsilon
        out[kv_head] /= len(row.heads_of(kv_head))
        out[kv_head] *= np.linalg.norm(row.values[: row.candidates, kv_head], axis=-1)
    return out
