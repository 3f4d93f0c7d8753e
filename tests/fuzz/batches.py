"""Calls of `generate` on random prompts, limits, EOS tokens and sampling settings.

A case is a row. Rows whose text plain decoding determines are compared with the oracle. The others
are generated again with the same seed and index beside other rows, and must not change.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from magicjax.decoding.decoder import Decoder
from magicjax.decoding.rows import sampling_of
from tests.fuzz import checks
from tests.fuzz.checks import UNIT, WHOLE, Found
from tests.fuzz.configurations import BATCHES, FLAGS, Configuration
from tests.magicjax import keywords, tiny
from tests.magicjax.engine import engines

ROWS = 128  # of a configuration, in at most MAX_UNITS calls
MAX_UNITS = 12


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a call of `generate` is asked for, besides the models.

    Attributes:
      prompts: token ids; the last row has the longest, and the largest limit, so that all batches
        of a configuration share their programs.
      limits: of each row.
      sampling: the arguments of `generate`.
    """

    prompts: list[np.ndarray]
    limits: list[int]
    sampling: dict[str, Any]

    def mixed(self, other: "Batch") -> "Batch":
        """Returns the batch with every second row of another one, and with its own last row."""

        def mix(own, others):
            if not isinstance(own, list):
                return own
            rows = zip(own[:-1], others[:-1], strict=True)
            return [b if i % 2 else a for i, (a, b) in enumerate(rows)] + own[-1:]

        sampling = {name: mix(value, other.sampling[name]) for name, value in self.sampling.items()}
        prompts, limits = mix(self.prompts, other.prompts), mix(self.limits, other.limits)
        return Batch(prompts, limits, sampling)


def units(made: Configuration) -> int:
    """Returns the number of calls of a configuration."""
    return min(-(-ROWS // made.rows), MAX_UNITS)


def run_units(made: Configuration, numbers: list[int]) -> Found:
    """Generates the batches of these numbers, and checks their rows."""
    found = Found()
    for unit in numbers:
        found.compare(UNIT * unit + WHOLE, _run, made, unit, found)
    return found


def _run(made: Configuration, unit: int, found: Found) -> int:
    rng = made.rng(BATCHES, unit + 1)
    weights = int(rng.integers(2**31))
    target, (drafter, tree) = made.target(weights), made.drafting(weights)
    eos = [int(token) for token in rng.integers(target.config.vocab_size, size=made.eos)]
    options = dict(
        drafter=drafter, tree=tree, eos_token_id=eos, verifier=made.verifier, mesh=made.mesh
    )
    batch = _batch(rng, made, target.config.vocab_size)
    rows = _rows(target, batch, options)
    for row, text, limit in zip(range(made.rows), rows, batch.limits, strict=True):
        found.rows, found.tokens = found.rows + 1, found.tokens + len(text)
        if not found.compare(UNIT * unit + row, _end, text, limit, eos):
            rows[row] = text[:0]  # nothing else of it is compared
    how = _samplers(batch) if made.sampled else [None] * made.rows
    for row, text in enumerate(rows):
        arguments = target, batch.prompts[row], text
        if not made.sampled:
            found.compare(UNIT * unit + row, checks.greedy, *arguments)
        else:
            check = checks.sampled if made.exact else checks.possible
            found.compare(UNIT * unit + row, check, *arguments, how[row])
    if not made.exact:
        company = batch.mixed(_batch(rng, made, target.config.vocab_size))
        again = _rows(target, company, options)
        for row in range(0, made.rows - 1, 2):
            found.compare(UNIT * unit + row, _same, rows[row], again[row])
    if unit == 0:
        _check_caches(target, batch, options)
        found.caches += made.rows
    return 0


def _batch(rng, made: Configuration, vocab: int) -> Batch:
    prompts = [prompt(rng, int(rng.integers(1, made.width + 1)), vocab) for _ in range(made.rows)]
    prompts[-1] = prompt(rng, made.width, vocab)
    limits = [int(n) for n in rng.integers(1, made.new_tokens + 1, made.rows)]
    limits[-1] = made.new_tokens
    return Batch(prompts, limits, _sampling(rng, made) if made.sampled else {})


def prompt(rng, length: int, vocab: int) -> np.ndarray:
    """Returns random tokens, or few that repeat."""
    if rng.random() < 0.3:
        return np.resize(rng.integers(0, vocab, rng.integers(1, 7)), length).astype(np.int32)
    return rng.integers(0, vocab, length).astype(np.int32)


def _sampling(rng, made: Configuration) -> dict[str, Any]:
    rows = made.rows
    use_top_k, use_top_p = (bool(x) for x in made.rng(FLAGS).random(2) < 0.5)  # static in programs
    found: dict[str, Any] = dict(seed=int(rng.integers(2**32)))
    found["temperature"] = [float(x) for x in rng.uniform(0.3, 1.6, rows)]
    if use_top_k:
        found["top_k"] = [int(x) for x in rng.integers(0, 16, rows)]
        found["top_k"][-1] = 9
    if use_top_p:
        found["top_p"] = [float(x) for x in rng.uniform(0.3, 1.2, rows).clip(max=1)]
        found["top_p"][-1] = 0.8
    return found


def _samplers(batch: Batch) -> list[checks.Sampler]:
    params, _ = keywords.split(len(batch.prompts), **batch.sampling)
    return checks.samplers(sampling_of(params, warping=True), batch.prompts)


def _rows(target, batch: Batch, options: dict[str, Any]) -> list[np.ndarray]:
    output = keywords.generate(
        target, batch.prompts, max_tokens=batch.limits, **options, **batch.sampling
    )
    return tiny.rows_of(output)


def _end(row, limit: int, eos) -> int:
    checks.end(row, limit, eos)
    return 0


def _same(row, again) -> int:
    assert np.array_equal(row, again), f"{row} became {again} beside other rows"
    return 0


def _check_caches(target, batch: Batch, options: dict[str, Any]) -> None:
    """Asserts that the caches at the end are those of a fresh prefill of the texts."""
    sampling = batch.sampling
    request = keywords.prepare(
        target, batch.prompts, max_tokens=batch.limits, **options, **sampling
    )
    decoder = Decoder(request)
    state = decoder.decode(decoder.start())
    state = dataclasses.replace(state, rows=None, rounds=None)
    state = jax.tree.map(np.array, state)
    texts = [
        np.concatenate([prompt, output[:emitted]])
        for prompt, output, emitted in zip(batch.prompts, state.output, state.emitted, strict=True)
    ]
    engines.check_state(state, texts, target, options["drafter"])
