"""What a text must be, whatever drafted it: the oracle's choice at every token, and the right end.

The oracle (`tests.magicjax.oracle`) runs once over a whole text. If every token is its choice after
the tokens before it, the text is that of plain decoding.
"""

import collections
import dataclasses
import itertools
import traceback
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from magicjax.verification import sampling
from tests.magicjax import oracle

UNIT = 100  # case = UNIT * unit + row; a unit is a call of `generate` or a schedule of an engine
WHOLE = UNIT - 1  # in place of the row, for what concerns a whole unit
MAX_NEW = 32  # the most new tokens of any row
# Of a random number or of top_p: what the rounding of float32 logits may decide either way.
SLACK = 1e-4


@dataclasses.dataclass
class Found:
    """What was compared, and what differed.

    Attributes:
      rows: rows of `generate` that were compared.
      requests: finished requests of engines that were compared.
      schedules: schedules of engines.
      tokens: of all these.
      caches: rows whose KV caches were compared with a fresh prefill.
      ties: rows and requests with a token that float32 may decide either way.
      ends: requests by finish reason, and those that reused a prefix.
      failures: (case, message).
    """

    rows: int = 0
    requests: int = 0
    schedules: int = 0
    tokens: int = 0
    caches: int = 0
    ties: int = 0
    ends: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    def compare(self, case: int, check: Callable[..., int], *arguments) -> bool:
        """Adds the ties that a check returns, or its failure; returns whether it passed."""
        try:
            ties = check(*arguments)  # which may count others
            self.ties += ties
            return True
        except Exception as error:  # an error of any kind is a finding
            text = " ".join(str(error).split()) or traceback.format_exc(limit=-1)
            self.failures.append((case, f"{type(error).__name__}: {text[:400]}"))
            return False


@dataclasses.dataclass(frozen=True)
class Sampler:
    """The sampling of one row; `numbers` [MAX_NEW, 2] are the target's random ones."""

    temperature: float
    top_k: int
    top_p: float
    numbers: np.ndarray


def end(row, limit: int, eos) -> None:
    """Asserts that a row ends by its limit or its first EOS, and by nothing else."""
    is_eos = np.isin(row, eos)
    assert 1 <= len(row) <= limit, f"{len(row)} tokens, limit {limit}"
    assert not is_eos[:-1].any(), f"tokens after an EOS of {eos}: {row}"
    assert is_eos[-1] or len(row) == limit, f"{row} ends before {limit} tokens, without {eos}"


def greedy(target, prompt, row, logits_of: Callable = oracle.logits) -> int:
    """Asserts that every token is the oracle's best; returns 1 if one is so only up to a tie.

    `logits_of`, a function of target and text, replaces the oracle's logits.
    """
    logits = logits_of(target, [*prompt, *row])[len(prompt) - 1 : -1]
    best, wrong = logits.argmax(-1), np.flatnonzero(logits.argmax(-1) != row)
    for i in wrong:
        margin = (logits[i].max() - logits[i, row[i]]) / np.abs(logits[i]).max()
        assert margin < oracle.slack(target), (
            f"token {i} after {len(prompt)} is {row[i]} instead of {best[i]}, margin {margin:.1e}"
        )
    return int(wrong.size > 0)


def sampled(target, prompt, row, sampler: Sampler) -> int:
    """Asserts that every token is that of plain sampling with the numbers; returns 1 for a tie.

    At a tie, a random number or top_p that differs by `SLACK` gives the token.
    """
    logits = oracle.logits(target, [*prompt, *row])[len(prompt) - 1 : -1]
    numbers = sampler.numbers[: len(row)]
    p = warped(logits, sampler.temperature, sampler.top_k, sampler.top_p)
    wrong = np.flatnonzero(_choices(p, numbers) != row)
    for i in wrong:
        steps = np.array([*itertools.product((0, -SLACK, SLACK), repeat=3)])
        near = [
            warped(logits[i : i + 1], sampler.temperature, sampler.top_k, sampler.top_p + step)[0]
            for step in steps[:, 2]
        ]
        others = _choices(np.array(near), numbers[i] + steps[:, :2])
        assert row[i] in others, (
            f"token {i} after {len(prompt)} is {row[i]} instead of {others[0]}, whose probability "
            f"is {p[i, others[0]]:.3f}, not {p[i, row[i]]:.3f}"
        )
    return int(wrong.size > 0)


def possible(target, prompt, row, sampler: Sampler) -> int:
    """Asserts that top_k and top_p keep every token; returns 0."""
    logits = oracle.logits(target, [*prompt, *row])[len(prompt) - 1 : -1]
    p = warped(logits, sampler.temperature, sampler.top_k, sampler.top_p + SLACK, slack=SLACK)
    wrong = np.flatnonzero(p[np.arange(len(row)), row] == 0)
    assert not wrong.size, f"tokens {wrong} after {len(prompt)} are impossible: {row}"
    return 0


def warped(logits, temperature: float, top_k: int, top_p: float, slack: float = 0.0) -> np.ndarray:
    """Returns the probabilities [T, V] after temperature, top_k and top_p.

    Tokens whose probability is less than the last one kept by the factor 1 - slack are kept too.
    """
    p = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
    p /= p.sum(-1, keepdims=True)
    if 0 < top_k < p.shape[1]:
        lowest = -np.sort(-p, -1)[:, top_k - 1 : top_k]
        p = np.where(p >= lowest * (1 - slack), p, 0)
        p /= p.sum(-1, keepdims=True)
    if top_p < 1:
        ordered = -np.sort(-p, -1)
        last = (np.cumsum(ordered, -1) < top_p).sum(-1, keepdims=True)
        lowest = np.take_along_axis(ordered, np.minimum(last, p.shape[1] - 1), -1)
        p = np.where(p >= lowest * (1 - slack), p, 0)
        p /= p.sum(-1, keepdims=True)
    return p


_sample = jax.jit(sampling.sample)


def _choices(p, numbers) -> np.ndarray:
    """Returns the token that each distribution [T, V] and pair of numbers [T, 2] give."""
    padded = np.zeros((MAX_NEW, p.shape[1])), np.zeros((MAX_NEW, 2))
    for whole, part in zip(padded, (p, numbers), strict=True):
        whole[: len(part)] = part
    numbers = np.clip(padded[1], 0, np.nextafter(1, 0, dtype=np.float32))
    return np.asarray(_sample(jnp.float32(padded[0]), jnp.float32(numbers)))[: len(p)]


@jax.jit
def target_numbers(keys, first):
    """Returns the target's random numbers [B, MAX_NEW, 2] for the tokens from a position on."""
    positions = first[:, None] + jnp.arange(MAX_NEW)
    return sampling.uniforms(keys, positions, sampling.Purpose.TARGET)


def samplers(of_rows: sampling.Sampling, prompts) -> list[Sampler]:
    """Returns the sampler of each row after its prompt."""
    first = jnp.asarray([len(prompt) for prompt in prompts])
    numbers = np.asarray(target_numbers(of_rows.keys, first))
    rows = zip(of_rows.temperature, of_rows.top_k, of_rows.top_p, numbers, strict=True)
    return [Sampler(float(t), int(k), float(p), own) for t, k, p, own in rows]
