"""Schedules of requests that come, share beginnings, and leave, on one engine after another.

A case is a request. The engine of a configuration serves all of its schedules, so what one leaves
behind (prefixes, spare rows, old entries of slots) meets the next.
"""

import dataclasses
import functools
import itertools
import types
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import magicjax
from magicjax.decoding import program_cache
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.request import Request
from magicjax.decoding.text import NewTokens, Text
from magicjax.engine.handle import Handle
from magicjax.engine.setup import row_request
from tests.fuzz import checks
from tests.fuzz.batches import prompt as random_prompt
from tests.fuzz.checks import UNIT, WHOLE, Found
from tests.fuzz.configurations import FLAGS, SCHEDULES, Configuration
from tests.magicjax import keywords
from tests.magicjax.decoding import test_logprobs
from tests.magicjax.engine import engines
from tests.magicjax.engine.test_speculation import Forced

UNITS = 24  # schedules of a configuration
MOST = 20  # requests of a schedule
LOGPROBS = 2  # alternatives of an engine with log-probabilities
HOST_BYTES = 10**6  # of prefixes in host memory
NEAR = 16  # runs with weights that differ by rounding, to decide a tie


@dataclasses.dataclass
class Session:
    """An engine and what the checks of its requests need.

    Attributes:
      engine: of `target` and `drafter`.
      eos: tokens that end a row.
      alone: a request of one row, whose programs decode any prompt alone; None where the oracle
        determines the texts.
      clock: its `now`, in seconds, is the time for the engine.
      texts: of earlier prompts and answers, which later prompts repeat or continue.
      compiled: programs before the first schedule.
      submitted: requests so far.
    """

    made: Configuration
    engine: magicjax.Engine
    target: magicjax.Model
    drafter: Any
    eos: list[int]
    alone: Request | None
    clock: Any
    texts: list[np.ndarray]
    compiled: int
    submitted: int = 0


@dataclasses.dataclass
class Asked:
    """A request, and what has arrived of it."""

    handle: Handle
    pieces: list[NewTokens]


def units(made: Configuration) -> int:
    """Returns the number of schedules of a configuration."""
    return UNITS


def run_units(made: Configuration, numbers: list[int]) -> Found:
    """Runs the schedules up to the largest number; checks those of the numbers."""
    found, clock = Found(), types.SimpleNamespace(now=1.0)
    started: list[Session] = []

    def start() -> int:
        started.append(_start(made, clock))
        return 0

    with mock.patch("time.monotonic", lambda: clock.now):
        if not found.compare(UNIT * numbers[0] + WHOLE, start):
            return found
        for unit in range(max(numbers) + 1):
            counted = found if unit in numbers else Found()
            if not found.compare(UNIT * unit + WHOLE, _run, started[0], unit, counted):
                break  # the engine may have unfinished requests
    return found


@functools.cache
def tokenizer(vocab: int):
    """Returns a tokenizer whose tokens are a, b, c, aa, ab, ...: stop strings span several."""
    import tokenizers
    import transformers

    words = ("".join(w) for n in itertools.count(1) for w in itertools.product("abc", repeat=n))
    own = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in zip(range(vocab), words)}, "a")
    )
    own.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own)


def text_of(target, tokens) -> str:
    """Returns the text of tokens."""
    return "".join(target.tokenizer.convert_ids_to_tokens([int(token) for token in tokens]))


def _start(made: Configuration, clock: Any) -> Session:
    rng = made.rng(FLAGS)
    weights = int(rng.integers(2**31))
    target, (drafter, tree) = made.target(weights), made.drafting(weights)
    target = dataclasses.replace(target, tokenizer=tokenizer(target.config.vocab_size))
    eos = [int(token) for token in rng.integers(target.config.vocab_size, size=made.eos)]
    config = magicjax.EngineConfig(
        sampling=made.sampled,
        verifier=made.verifier,
        eos_token_id=eos,
        slots=made.rows,
        capacity=int(rng.integers(made.width + 8, engines.CAPACITY + 1)),
        max_tokens=made.new_tokens,
        prefill_chunk=int(rng.choice([7, 16, 20, 33, 64])),
        rounds_per_step=int(rng.choice([1, 2, 3, 8])),
        **_options(rng, made, drafter),
    )
    engine = magicjax.Engine(target, drafter, tree, config, mesh=made.mesh)
    engine.warm_up()
    if len(engine._loops.settings) > 1:  # modes that times choose would differ in each run
        engine._loops.controller = Forced(**vars(engine._loops.controller))
    alone = None
    if not made.exact:
        longest = np.zeros(engine._setup.capacity - 1, np.int32)
        options: dict[str, Any] = dict(drafter=drafter, tree=tree, eos_token_id=eos)
        options |= dict(temperature=1.0, verifier=made.verifier, max_tokens=made.new_tokens)
        options |= dict(top_k=3, top_p=0.9)  # as static settings
        alone = keywords.prepare(target, [longest], **options)
        _alone(alone, longest[:1], 1, alone.rows.sampling)  # compiles
    compiled = program_cache.totals()[0]
    return Session(made, engine, target, drafter, eos, alone, clock, [], compiled)


def _options(rng, made: Configuration, drafter: Any) -> dict[str, Any]:
    """Returns options of the engine that change no text."""
    prefix_bytes = [None, None, None, 0][rng.integers(4)]
    logprobs, host, adaptive = rng.random(3) < (0.3, 0.4, 0.3)
    found = dict(prefix_bytes=prefix_bytes, logprobs=LOGPROBS if logprobs else None)
    if host and prefix_bytes is None and _stores_prefixes(made, drafter):
        found["host_prefix_bytes"] = HOST_BYTES
    found["adaptive"] = bool(adaptive and made.exact and drafter is not None)
    return found


def _stores_prefixes(made: Configuration, drafter) -> bool:
    """Returns whether an engine stores prefixes by default."""
    if drafter is None:
        return True
    return not drafter.stats_spec().total


def _run(session: Session, unit: int, found: Found) -> int:
    """Runs one schedule; checks the engine, and then every request."""
    rng, engine = session.made.rng(SCHEDULES, unit + 1), session.engine
    if rng.random() < 0.5:
        engine._prefixes.clear()
        engine.forget_texts()
    rate, count = float(rng.uniform(0.3, 3)), int(rng.integers(5, MOST + 1))
    asked: list[Asked] = []
    rows_at = int(rng.integers(1, 12))  # the step after which the rows' caches are checked
    for step in itertools.count():
        arriving = min(rng.poisson(rate), count - len(asked))
        while arriving > 0:
            new = _submit(rng, session, arriving)
            asked, arriving = asked + new, arriving - len(new)
        if not engine.unfinished and len(asked) == count:
            break
        _act(rng, engine, asked)
        session.clock.now += float(rng.exponential(2.0))
        assert (
            len(engine._scheduler.running) + len(engine._scheduler.prefilling) <= session.made.rows
        )
        if step >= rows_at and engine._scheduler.running:
            state, texts = engines.rows_of(engine)
            disabled = engines.disabled_rows(engine)
            engines.check_state(state, texts, session.target, session.drafter, disabled)
            found.caches, rows_at = found.caches + len(texts), 10**9
    session.submitted += count
    _check_idle(session)
    found.schedules += 1
    for row, one in enumerate(asked):
        result = one.handle.result()
        found.requests, found.tokens = found.requests + 1, found.tokens + len(result.tokens)
        found.ends[result.finish_reason] += 1
        found.ends["reused"] += result.stats.reused_tokens > 0
        found.compare(UNIT * unit + row, _check, session, one)
    whole = [np.concatenate([a.handle.prompt, a.handle.result().tokens]) for a in asked]
    session.texts = [*session.texts, *whole][-8:]
    return 0


def _submit(rng, session: Session, most_requests: int) -> list[Asked]:
    """Submits a request, or several samples of one prompt."""
    engine, made = session.engine, session.made
    sampling: dict[str, Any] = {}
    if made.sampled and rng.random() >= 0.15:
        sampling = dict(temperature=float(rng.uniform(0.3, 1.6)), seed=int(rng.integers(2**32)))
        if rng.random() < 0.5:
            sampling["top_k"] = int(rng.integers(0, 16))
        if rng.random() < 0.5:
            sampling["top_p"] = float(rng.uniform(0.3, 1))
    prompt = _prompt(rng, session)
    most = min(made.new_tokens, engine._setup.capacity - len(prompt))
    params = magicjax.SamplingParams(
        max_tokens=None if rng.random() < 0.3 else int(rng.integers(1, most + 1)),
        stop=_stop(rng, session) if rng.random() < 0.3 else (),
        logprobs=_logprobs(rng, engine),
        **sampling,
    )
    when: dict[str, Any] = dict(
        priority=float(rng.integers(3)),
        deadline_s=float(rng.exponential(30.0)) + 0.1 if rng.random() < 0.1 else None,
    )
    samples = int(rng.integers(1, most_requests + 1)) if rng.random() < 0.2 else 1
    if samples == 1 or params.greedy:
        handles = [engine.submit(prompt, params, **when)]
    else:
        handles = engine.submit_samples(prompt, samples, params, **when)
    return [Asked(handle, []) for handle in handles]


def _logprobs(rng, engine: magicjax.Engine) -> int | None:
    if engine._setup.row.settings.logprobs is None:
        return None
    return [None, *range(LOGPROBS + 1)][rng.integers(LOGPROBS + 2)]


def _prompt(rng, session: Session) -> np.ndarray:
    """Returns a new prompt, or one that begins like an earlier text or is such a text."""
    vocab, width = session.target.config.vocab_size, session.made.width
    new = random_prompt(rng, int(rng.integers(1, width + 1)), vocab)
    waiting = [handle.prompt for handle in session.engine.unfinished]
    earlier = [*session.texts, *waiting]
    if not earlier or rng.random() < 0.4:
        return new
    text = earlier[rng.integers(len(earlier))]
    kept = text if rng.random() < 0.5 else text[: rng.integers(1, len(text) + 1)]
    whole = kept if rng.random() < 0.3 else np.concatenate([kept, new])
    return whole[: session.engine._setup.capacity - 1 - int(rng.integers(8))]


def _stop(rng, session: Session) -> list[str]:
    """Returns parts of an earlier text, and a random string."""
    random = "".join(rng.choice([*"abc"], int(rng.integers(1, 5))))
    if not session.texts:
        return [random]
    text = text_of(session.target, session.texts[rng.integers(len(session.texts))])
    begin, length = int(rng.integers(len(text))), int(rng.integers(1, 9))
    return [text[begin : begin + length], random][: int(rng.integers(1, 3))]


def _act(rng, engine: magicjax.Engine, asked: list[Asked]) -> None:
    """Does what a server may do next: mostly a step."""
    one = asked[rng.integers(len(asked))] if asked else None
    kind = rng.random()
    if one is None or kind < 0.82:
        engine.step()
    elif kind < 0.90:
        one.handle.cancel()
    elif kind < 0.96:
        one.pieces += one.handle.arrived()
    elif kind < 0.98:
        one.pieces += one.handle  # runs the engine until this request is finished
    else:
        one.handle.result()


def _check_idle(session: Session) -> None:
    """Asserts that no request, slot or row is left over, and that nothing was compiled."""
    engine, stats = session.engine, session.engine.stats
    assert (
        not engine._scheduler.running
        and not engine._scheduler.prefilling
        and not engine._scheduler.waiting
    )
    assert stats.running == stats.waiting == 0
    assert engine._ended.all(), f"slots are leaked: {engine._ended}"
    assert len(engine._spare_rows) <= engine.config.prefill_rows, (
        f"{len(engine._spare_rows)} spare rows"
    )
    store = engine._prefixes
    on_device = [entry for entry in store._entries if not entry.on_host]
    assert len(on_device) <= store.max_entries, f"{len(on_device)} prefixes on the device"
    assert stats.prefix_host_bytes <= store.max_host_bytes
    assert sum(stats.finished.values()) == session.submitted
    compiled = program_cache.totals()[0] - session.compiled
    assert not compiled, f"{compiled} programs compiled after warm-up"


def _check(session: Session, one: Asked) -> int:
    """Asserts that a finished request has its text alone, or the right beginning of it."""
    result, asked, target = one.handle.result(), one.handle.text, session.target
    tokens, reason, stops = result.tokens, result.finish_reason, asked.params.stop
    one.pieces += one.handle.arrived()
    arrived = [new.tokens for new in one.pieces]
    np.testing.assert_array_equal(np.concatenate([[], *arrived]), tokens)
    assert "".join(new.text for new in one.pieces) == result.text
    before = text_of(target, tokens[:-1])
    text = before if reason == "eos" else text_of(target, tokens)  # EOS has no text
    assert not any(stop in before for stop in stops), f"goes on after one of {stops}: {text}"
    ends = [text.index(stop) for stop in stops if stop in text]
    assert (reason == "stop") == bool(ends), f"{reason}, stop strings {stops}: {text}"
    assert result.text == text[: min(ends, default=None)]
    if reason in ("eos", "length"):
        checks.end(tokens, asked.limit, session.eos)
        assert (reason == "eos") == (tokens[-1] in session.eos), reason
    else:
        is_eos = np.isin(tokens, session.eos)
        assert not is_eos[: -1 if reason == "stop" else None].any(), f"{reason}: {tokens}"
        assert len(tokens) <= asked.limit - (reason != "stop")
    if (count := asked.params.logprobs) is not None and len(tokens):
        test_logprobs.check(target, asked.prompt, tokens, result.logprobs, count)
    return _check_tokens(session, asked, tokens) if len(tokens) else 0


def _check_tokens(session: Session, asked: Text, tokens) -> int:
    target, prompt, limit = session.target, asked.prompt, asked.limit
    if asked.params.greedy:
        return checks.greedy(target, prompt, tokens)
    sampling = row_request(session.engine._setup, asked).rows.sampling
    (how,) = checks.samplers(sampling, [prompt])
    if session.alone is None:
        return checks.sampled(target, prompt, tokens, how)
    checks.possible(target, prompt, tokens, how)
    whole = _alone(session.alone, prompt, limit, sampling)
    wrong = np.flatnonzero(whole[: len(tokens)] != tokens)
    assert len(whole) >= len(tokens), f"{tokens} instead of {whole} alone"
    if not wrong.size:
        return 0
    same = wrong[0] + 1
    for seed in range(NEAR):  # a request that differs by rounding has either text
        other = _alone(_disturbed(session.alone, seed), prompt, limit, sampling)
        if np.array_equal(other[:same], tokens[:same]):
            return 1
    raise AssertionError(f"{tokens} instead of {whole} alone")


def _alone(request: Request, prompt, limit: int, sampling) -> np.ndarray:
    """Returns the text that `generate` has for the prompt alone, in fixed shapes."""
    tokens = np.zeros(request.rows.tokens.shape, np.int32)
    tokens[0, : len(prompt)] = prompt
    request = dataclasses.replace(
        request,
        prompts=[prompt],
        rows=dataclasses.replace(
            request.rows,
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray([len(prompt)], jnp.int32),
            limits=jnp.asarray([limit], jnp.int32),
            sampling=jax.tree.map(jnp.asarray, sampling),
        ),
    )
    decoder = Decoder(request)
    state = decoder.decode(decoder.start())
    return np.asarray(state.output)[0, : int(state.emitted[0])]


def _disturbed(request: Request, seed: int) -> Request:
    """Returns the request with weights of the models that differ by rounding."""
    rng = np.random.default_rng(seed)

    def disturb(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x * jnp.asarray(1 + 3e-7 * rng.standard_normal(x.shape), x.dtype)

    target, drafter = jax.tree.map(disturb, (request.target, request.drafter))
    return dataclasses.replace(request, target=target, drafter=drafter)
