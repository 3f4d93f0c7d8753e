"""Times the parts of a round against their floors: `python -m magicjax.benchmarks.bench`.

T_target is a step of plain decoding, T_verify(n) a pass of the target over n nodes, T_draft one
token of a self-speculating draft. The floor of a part is the time to move its bytes at the
bandwidth measured in the same run. Caches hold random numbers, because times do not depend on
values, so no prompt is prefilled. Rounds are queued, which hides the host's overhead as in the
compiled loop.

The second table is a loop with **synthetic acceptance**: its draft runs, but proposes the target's
own next tokens, each wrong with a given probability. It gives the speedup of a draft with that
acceptance rate, and says nothing about the acceptance of any real draft.
"""

import argparse
import dataclasses
import functools
import glob
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from magicjax import cost_model
from magicjax.benchmarks import hf_baseline
from magicjax.benchmarks.tables import record_table
from magicjax.decoding import loop, program_cache
from magicjax.decoding.request import Request, prepare
from magicjax.decoding.runner import state_shapes
from magicjax.drafters import Drafter, SelfSpeculation
from magicjax.drafters.base import RoundOutcome
from magicjax.files import write_atomically
from magicjax.loading import load
from magicjax.model import DTYPES, Model
from magicjax.settings import AttentionStatsSpec
from magicjax.trees.proposal import Proposal
from magicjax.trees.sequoia import expected_tokens
from magicjax.trees.token_tree import Tree, chain
from pallas_kernels.benchmarks.bandwidth import copy_bandwidth, read_bandwidth
from pallas_kernels.benchmarks.bench import best_backend
from pallas_kernels.benchmarks.timing import queued_calls

WARM_UP = 2
FINAL_NORMS = {"norm", "final_norm"}  # parameter names in the model families


@struct.dataclass
class Synthetic(Drafter):
    """Proposes a chain of a known text with a given error rate; greedy decoding only.

    Attributes:
      inner: a drafter that runs for its cost; its proposals are dropped. None: nothing runs.
      text: int32 [B, M], prompts and their plain continuations; arbitrary where only time matters.
      rate: the probability that a token is right if those before it are; a scalar, or one number
        for each position of the text.
    """

    inner: Drafter | None
    text: Int[Array, "B M"]
    rate: Float[Array, "*M"]

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        if self.inner is not None:
            self.inner.check(target, tree, depth, context)

    def draw_methods(self, tree: Tree) -> set[str]:
        return {"top"}

    def attention_stats_spec(self) -> AttentionStatsSpec:
        return AttentionStatsSpec() if self.inner is None else self.inner.attention_stats_spec()

    def cache_bytes(self, target: Model, batch: int, capacity: int) -> int:
        return 0 if self.inner is None else self.inner.cache_bytes(target, batch, capacity)

    def prefill(self, *arguments) -> Any:
        return None if self.inner is None else self.inner.prefill(*arguments)

    def propose(self, target, state, root, cache, sampling, settings) -> tuple[Proposal, Any]:
        draft, dropped = None, root[:, None]
        if self.inner is not None:
            proposal, draft = self.inner.propose(target, state, root, cache, sampling, settings)
            dropped = proposal.tokens
        gamma = settings.tree.depth
        positions = cache.lengths[:, None] + 1 + jnp.arange(gamma)
        positions = jnp.minimum(positions, self.text.shape[1] - 1)
        following = jnp.take_along_axis(self.text, positions, axis=1)
        # One number for each row and position, whichever rounds lead there.
        key = jax.random.key(0, impl="threefry2x32")
        draw = jax.vmap(jax.vmap(lambda r, p: jax.random.uniform(_fold(key, r, p)), (None, 0)))
        rate = jnp.broadcast_to(self.rate, self.text.shape[1:])[positions]
        right = draw(jnp.arange(positions.shape[0]), positions) < rate
        vocabulary = target.config.vocab_size
        tokens = jnp.where(right, following, (following + 1) % vocabulary)
        # Always 0, but the compiler cannot prove it and so must run the draft.
        zero = jnp.minimum(dropped.min(1, keepdims=True), 0)
        tokens = jnp.concatenate([root[:, None], tokens + zero], axis=1)
        return Proposal(tokens, settings.tree.array), draft

    def commit(self, target, state, draft, proposal: Proposal, outcome: RoundOutcome) -> Any:
        if self.inner is None:
            return state
        return self.inner.commit(target, state, draft, proposal, outcome)

    def synthetic_state(self, state: Any, lengths: Int[Array, "B"]) -> Any:
        return None if self.inner is None else self.inner.synthetic_state(state, lengths)


def _fold(key: Array, row: Array, position: Array) -> Array:
    return jax.random.fold_in(jax.random.fold_in(key, row), position)


@dataclasses.dataclass(frozen=True)
class Setup:
    """The settings that all timings of a run share.

    Attributes:
      target: the model.
      backend: attention backend.
      new_tokens: per row of a loop.
      repeats: timed calls, of which the median counts.
    """

    target: Model
    backend: str | None = None
    new_tokens: int = 96
    repeats: int = 10


def synthetic_request(setup: Setup, batch: int, context: int, drafter: Any, tree: Any) -> Request:
    """Returns a request with prompts of `context` tokens; nothing runs."""
    rows = np.zeros((batch, context), np.int32)
    return prepare(
        setup.target,
        list(rows),
        drafter=drafter,
        tree=tree,
        max_new_tokens=setup.new_tokens,
        eos_token_id=[],
        backend=setup.backend,
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _filled(shape: tuple[int, ...], dtype: Any) -> Array:
    """Returns repeated random numbers, or zeros for an integer dtype."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype)
    return jnp.resize(jax.random.normal(jax.random.key(0), (4096,), dtype), shape)


def synthetic_state(request: Request) -> loop.DecodeState:
    """Returns a state after prefill whose caches hold random numbers."""
    shapes = state_shapes(request)
    drafter_state = synthetic_drafter_state(request, shapes)
    state = jax.tree.map(
        lambda x: _filled(x.shape, x.dtype), dataclasses.replace(shapes, drafter=None)
    )
    return state.replace(
        cache=state.cache.replace(lengths=jnp.array(request.lengths)),
        drafter=drafter_state,
        emitted=jnp.ones_like(request.lengths),
        limits=jnp.array(request.limits),
        rounds_left=jnp.int32(loop.ALL_ROUNDS),
    )


def synthetic_drafter_state(request: Request, shapes: loop.DecodeState) -> Any:
    """Returns the drafter's part of `synthetic_state`."""
    if request.drafter is None:
        return None
    filled = jax.tree.map(lambda x: _filled(x.shape, x.dtype), shapes.drafter)
    return request.drafter.synthetic_state(filled, request.lengths)


def seconds_per_round(request: Request, repeats: int) -> float:
    """Returns the median time of a round."""
    state, times, calls = synthetic_state(request), [], queued_calls()
    step, _ = program_cache.program(
        "step", request.settings, request.target, request.drafter, state
    )
    for _ in range(WARM_UP + repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            state = step(request.target, request.drafter, state)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times[WARM_UP:])


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of the parts of a round at one batch and context.

    Attributes:
      target: T_target.
      verify: T_verify(n) by n.
      draft: T_draft, of one token, by (budget, gamma).
    """

    target: float
    verify: dict[int, float]
    draft: dict[tuple[int, int], float]


def time_parts(
    setup: Setup,
    batch: int,
    context: int,
    nodes: Sequence[int],
    budgets: Sequence[int],
    gammas: Sequence[int],
) -> Times:
    """Returns T_target, T_verify and T_draft; see the module's docstring."""
    free = Synthetic(None, jnp.zeros((batch, 1), jnp.int32), jnp.float32(1))

    def timed(drafter: Any, tree: Any) -> float:
        return seconds_per_round(
            synthetic_request(setup, batch, context, drafter, tree), setup.repeats
        )

    node_counts = dict.fromkeys((*nodes, *(gamma + 1 for gamma in gammas)))
    verify = {n: timed(free, chain(n - 1)) for n in node_counts}
    draft = {
        # A round is a draft and a pass over gamma + 1 nodes.
        (budget, gamma): (timed(SelfSpeculation(budget=budget), chain(gamma)) - verify[gamma + 1])
        / gamma
        for budget in budgets
        for gamma in gammas
    }
    return Times(timed(None, None), verify, draft)


@dataclasses.dataclass(frozen=True)
class LoopRun:
    """A run of the compiled loop.

    Attributes:
      seconds: of the whole run.
      rounds: until the last row ended.
      tau: mean tokens per round and row, over the rounds before the row ended.
    """

    seconds: float
    rounds: int
    tau: float


def zero_logits(target: Model) -> Model:
    """Returns the target with a final norm of zeros: all logits are 0, the next token is 0.

    The text is then known in advance and the same in every pass. With the usual weights, passes of
    one and of several nodes round differently, and rows would diverge from the known text.

    Raises:
      ValueError: the model has no final norm.
    """

    def change(path, x):
        return jnp.zeros_like(x) if FINAL_NORMS & {key.key for key in path} else x

    params = jax.tree_util.tree_map_with_path(change, target.params)
    changed = zip(jax.tree.leaves(params), jax.tree.leaves(target.params), strict=True)
    if all(new is old for new, old in changed):
        raise ValueError(f"{target.name} has no final norm: synthetic acceptance needs one")
    return dataclasses.replace(target, params=params)


def run_loop(setup: Setup, batch: int, context: int, drafter: Any, tree: Any) -> LoopRun:
    """Returns the faster of two runs of the loop, after a warm-up run."""
    request, runs = synthetic_request(setup, batch, context, drafter, tree), []
    for _ in range(3):
        arguments = request.target, request.drafter, synthetic_state(request)
        decode, _ = program_cache.program("decode", request.settings, *arguments)
        jax.block_until_ready(arguments)
        begin = time.perf_counter()
        state = jax.block_until_ready(decode(*arguments))
        seconds = time.perf_counter() - begin
        rounds = np.asarray(state.histogram).sum(1)
        tau = float(state.emitted.sum() - batch) / int(rounds.sum())
        runs.append(LoopRun(seconds, int(rounds.max()), tau))
        del arguments, state  # memory may not hold two caches of a large batch
    return min(runs[1:], key=lambda run: run.seconds)


def synthetic_draft(setup: Setup, batch: int, context: int, budget: int, rate: float) -> Synthetic:
    """Returns a self-speculating draft with synthetic acceptance, for a `zero_logits` target."""
    text = jnp.zeros((batch, context + setup.new_tokens), jnp.int32)
    return Synthetic(SelfSpeculation(budget=budget), text, jnp.float32(rate))


def run_synthetic(
    setup: Setup, batch: int, context: int, budget: int, gamma: int, rate: float
) -> LoopRun:
    """Returns a run with synthetic acceptance; the setup has a `zero_logits` target."""
    drafter = synthetic_draft(setup, batch, context, budget, rate)
    return run_loop(setup, batch, context, drafter, chain(gamma))


def base_parser(prog: str, doc: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that the benchmarks of the loop share."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=doc.split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--target", default="llama-3.1-8b", help="preset or model directory")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and caches")
    parser.add_argument("--backend", help="of attention; None: mosaic on Hopper, else xla")
    parser.add_argument("--out", help="write the results to this JSON file")
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = base_parser("python -m magicjax.benchmarks.bench", __doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[16], help="rows")
    parser.add_argument("--context", type=int, nargs="+", default=[32768], help="tokens per row")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 5, 9, 17], help="for T_verify")
    parser.add_argument("--budget", type=int, nargs="+", default=[512], help="for T_draft")
    parser.add_argument("--gamma", type=int, nargs="+", default=[4], help="draft tokens per round")
    parser.add_argument(
        "--rate", type=float, nargs="*", default=[0.8], help="synthetic acceptance rate"
    )
    parser.add_argument("--new-tokens", type=int, default=96, help="new tokens per row of a loop")
    parser.add_argument("--repeats", type=int, default=10, help="timed calls; the median counts")
    parser.add_argument(
        "--hugging-face",
        action="store_true",
        help="also time Hugging Face's generate with a static cache",
    )
    return parser


def make_setup(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Setup:
    """Returns the setup; invalid options end the process with a message."""
    try:
        target = load(options.target, dtype=options.dtype)
        best = best_backend(target.dtype, target.config.head_dim, jax.devices()[0])
        setup = Setup(target, options.backend or best, options.new_tokens, options.repeats)
        for context in options.context:
            synthetic_request(setup, 1, context, None, None)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return setup


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table of parts and one of loops for each batch and context; returns 0."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if min(options.nodes) < 2 or min(options.gamma) < 1 or options.repeats < 1:
        parser.error("--nodes must be at least 2, --gamma and --repeats at least 1")
    if not all(0 <= rate <= 1 for rate in options.rate):
        parser.error(f"--rate {options.rate}: each must lie between 0 and 1")
    shapes = [(batch, context) for batch in options.batch for context in options.context]
    baselines = _time_hugging_face(options, shapes) if options.hugging_face else {}
    setup = make_setup(parser, options)
    device, read, copy = jax.devices()[0], read_bandwidth(), copy_bandwidth()
    print(
        f"{device.device_kind}, jax {jax.__version__}, attention {setup.backend}, reads "
        f"{read / 1e9:.1f} GB/s, copies {copy / 1e9:.1f} GB/s"
    )
    about = {"device": device.device_kind, "jax": jax.__version__, "target": options.target}
    about |= {"dtype": options.dtype, "backend": setup.backend, "new_tokens": setup.new_tokens}
    about |= {"read_bandwidth": read, "copy_bandwidth": copy, "bandwidth": max(read, copy)}
    rows: list[dict[str, Any]] = []

    def record(shape: tuple[int, int], records: Iterator[dict[str, Any]]) -> None:
        first = len(rows)
        for row in records:
            rows.append(dict(zip(("batch", "context"), shape, strict=True)) | row)
            if options.out:  # after every row, so that an interrupted run keeps its results
                write_atomically(options.out, json.dumps(about | {"rows": rows}, indent=1) + "\n")
        print("\n" + record_table(rows[first:]), flush=True)

    for shape in shapes:
        times = time_parts(setup, *shape, options.nodes, options.budget, options.gamma)
        record(shape, _parts(setup.target, *shape, times, max(read, copy), baselines.get(shape)))
        if options.rate:
            record(shape, _loops(setup, *shape, options.rate, times))
    return 0


def _time_hugging_face(options: argparse.Namespace, shapes: list[tuple[int, int]]) -> dict:
    """Returns the results of Hugging Face's process, which runs before JAX allocates memory."""
    platforms = jax.config.jax_platforms or ""  # does not initialize a backend
    has_gpu = bool(glob.glob("/dev/nvidia[0-9]*"))
    device = "cuda" if has_gpu and platforms != "cpu" else "cpu"
    timed = functools.partial(hf_baseline.time_step, options.target, options.dtype)
    return {shape: timed(*shape, device) for shape in shapes}


def _parts(
    target: Model, batch: int, context: int, times: Times, bandwidth: float, baseline: dict | None
) -> Iterator[dict[str, Any]]:
    """Yields the table of parts at one batch and context."""

    def row(part: str, seconds: float, slots: int | None = None, **columns: Any) -> dict[str, Any]:
        found = {"part": part} | columns | {"ms": 1e3 * seconds}
        if slots is not None:
            floor = cost_model.step_bytes(target, batch, slots, 1) / bandwidth
            found |= {"floor ms": 1e3 * floor, "floor / time": floor / seconds}
        return found | {"time / T_target": seconds / times.target}

    yield row("target", times.target, context)
    if baseline is not None and "ms" in baseline:
        versions = {name: baseline[name] for name in ("torch", "transformers") if name in baseline}
        yield row("hugging face", 1e-3 * baseline["ms"]) | versions
    elif baseline is not None:
        yield {"part": "hugging face"} | baseline
    for n, seconds in times.verify.items():
        yield row(f"verify {n}", seconds)
    for (budget, gamma), seconds in times.draft.items():
        yield row(f"draft {budget}", seconds, budget, gamma=gamma)


def _loops(
    setup: Setup, batch: int, context: int, rates: Sequence[float], times: Times
) -> Iterator[dict[str, Any]]:
    """Yields the plain loop, then a loop for each budget, gamma and rate."""
    setup = dataclasses.replace(setup, target=zero_logits(setup.target))
    plain = run_loop(setup, batch, context, None, None)
    plain_round = plain.seconds / plain.rounds
    row = {"round ms": 1e3 * plain_round, "overhead": 1 - times.target / plain_round}
    yield {"part": "plain loop"} | row
    for (budget, gamma), draft in times.draft.items():
        parts = gamma * draft + times.verify[gamma + 1]
        for rate in rates:
            run = run_synthetic(setup, batch, context, budget, gamma, rate)
            seconds = run.seconds / run.rounds
            yield {
                "part": f"loop {budget}",
                "gamma": gamma,
                "synthetic acceptance": rate,
                "tau": run.tau,
                "round ms": 1e3 * seconds,
                "overhead": 1 - parts / seconds,
                "speedup": plain.seconds / run.seconds,
                # A batch ends with its slowest row; this speedup ignores that.
                "speedup per round": run.tau * plain_round / seconds,
                "predicted speedup": expected_tokens(chain(gamma), [rate]) * times.target / parts,
            }


if __name__ == "__main__":
    raise SystemExit(main())
