"""Times the parts of a round beside their floors: `python -m magicjax.benchmarks.bench`.

T_target is a step of plain decoding, T_verify(n) a pass of the target over n nodes, T_draft one
token of a self-speculating draft. Each stands beside the time in which its bytes can be moved at
the bandwidth measured in the same run. Caches hold random numbers, so no prompt has to be read
first: times do not depend on what the numbers are. Rounds are queued, so the host's share of a
step is hidden, as it is in the compiled loop.

The last lines are a loop with **synthetic acceptance**: its draft runs as it would, but proposes
the target's own next tokens, each wrong with a given probability. They say what a draft of that
quality would be worth, and nothing about the quality of any draft.
"""

import argparse
import dataclasses
import functools
import glob
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from magicjax import cost_model
from magicjax.benchmarks import hf_baseline
from magicjax.decoding import loop, program_cache
from magicjax.decoding.request import Request, prepare
from magicjax.decoding.runner import state_shapes
from magicjax.drafters import Drafter, SelfSpeculation
from magicjax.drafters.base import Round
from magicjax.generation import load
from magicjax.kv_cache.attention_stats import Watch
from magicjax.model import Model
from magicjax.trees.proposal import Proposal
from magicjax.trees.token_tree import Shape, Tree, chain
from pallas_kernels.benchmarks.bandwidth import copy_bandwidth, read_bandwidth
from pallas_kernels.benchmarks.bench import best_backend, write_json
from pallas_kernels.benchmarks.timing import calls_in_a_row

WARM_UP = 2
FINAL_NORMS = {"norm", "final_norm"}  # of the families' modules


@struct.dataclass
class Synthetic:
    """Proposes a chain of a text that is known beforehand, some of its tokens wrong; greedy only.

    Attributes:
      inner: a draft that runs too, for its cost; what it proposes is dropped. None: none runs.
      text: int32 [B, M], prompts and their plain continuations, or nothing of interest.
      rate: how often a token is right, given that those before it are; one number, or one for each
        position of the text.
    """

    inner: Drafter | None
    text: Int[Array, "B M"]
    rate: Float[Array, "*M"]

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        if self.inner is not None:
            self.inner.check(target, tree, depth, context)

    def shape(self, tree: Tree) -> Shape:
        return tree.shape

    def drawings(self, tree: Tree) -> set[str]:
        return {"top"}

    def watch(self) -> Watch:
        return Watch() if self.inner is None else self.inner.watch()

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
        places = cache.lengths[:, None] + 1 + jnp.arange(gamma)
        places = jnp.minimum(places, self.text.shape[1] - 1)
        following = jnp.take_along_axis(self.text, places, axis=1)
        # A number for each row and position, the same however the round came there.
        key = jax.random.key(0, impl="threefry2x32")
        draw = jax.vmap(jax.vmap(lambda r, p: jax.random.uniform(_fold(key, r, p)), (None, 0)))
        rate = jnp.broadcast_to(self.rate, self.text.shape[1:])[places]
        right = draw(jnp.arange(places.shape[0]), places) < rate
        vocabulary = target.config.vocab_size
        tokens = jnp.where(right, following, (following + 1) % vocabulary)
        # 0, but the compiler must run the draft to know it.
        nothing = jnp.minimum(dropped.min(1, keepdims=True), 0)
        tokens = jnp.concatenate([root[:, None], tokens + nothing], axis=1)
        return Proposal(tokens, settings.tree.array), draft

    def commit(self, target, state, draft, proposal: Proposal, of_round: Round) -> Any:
        if self.inner is None:
            return state
        return self.inner.commit(target, state, draft, proposal, of_round)


def _fold(key: Array, row: Array, place: Array) -> Array:
    return jax.random.fold_in(jax.random.fold_in(key, row), place)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all timings of a run share.

    Attributes:
      target: the model.
      backend: of the attention.
      new_tokens: of a loop.
      steps: timed rounds; the median counts.
    """

    target: Model
    backend: str | None = None
    new_tokens: int = 96
    steps: int = 10


def request_of(setup: Setup, batch: int, context: int, drafter: Any, tree: Any) -> Request:
    """Returns a request of full contexts; nothing runs."""
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
    """Returns random numbers, or zeros where they are whole: a few thousand, again and again."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype)
    return jnp.resize(jax.random.normal(jax.random.key(0), (4096,), dtype), shape)


def state_of(request: Request) -> loop.DecodeState:
    """Returns a state with caches of random numbers that hold the whole context."""
    shapes = state_shapes(request)
    held = drafter_state_of(request, shapes)
    state = jax.tree.map(
        lambda x: _filled(x.shape, x.dtype), dataclasses.replace(shapes, drafter=None)
    )
    return state.replace(
        cache=state.cache.replace(lengths=jnp.array(request.lengths)),
        drafter=held,
        emitted=jnp.ones_like(request.lengths),
        limits=jnp.array(request.limits),
        rounds_left=jnp.int32(loop.ALL_ROUNDS),
    )


def drafter_state_of(request: Request, shapes: loop.DecodeState) -> Any:
    """Returns the drafter's part of such a state."""
    lengths = request.lengths

    def filled(path: tuple, x: jax.ShapeDtypeStruct) -> Array:
        # A step takes over each array, so none may stand twice. A lead is empty.
        counts = x.shape == lengths.shape and x.dtype == jnp.int32 and "lead" not in str(path)
        return jnp.array(lengths) if counts else _filled(x.shape, x.dtype)

    return jax.tree_util.tree_map_with_path(filled, shapes.drafter)


def seconds_per_step(request: Request, steps: int) -> float:
    """Returns the median time of a round, of several in a row where work is queued."""
    state, times, calls = state_of(request), [], calls_in_a_row()
    step, _ = program_cache.program(
        "step", request.settings, request.target, request.drafter, state
    )
    for _ in range(WARM_UP + steps):
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


def measure(
    setup: Setup,
    batch: int,
    context: int,
    nodes: Sequence[int],
    budgets: Sequence[int],
    gammas: Sequence[int],
) -> Times:
    """Returns the times; see the module."""
    nothing = Synthetic(None, jnp.zeros((batch, 1), jnp.int32), jnp.float32(1))

    def timed(drafter: Any, tree: Any) -> float:
        return seconds_per_step(request_of(setup, batch, context, drafter, tree), setup.steps)

    passes = dict.fromkeys((*nodes, *(gamma + 1 for gamma in gammas)))
    verified = {n: timed(nothing, chain(n - 1)) for n in passes}
    drafted = {
        # A round is a draft and a pass over gamma + 1 nodes.
        (budget, gamma): (timed(SelfSpeculation(budget=budget), chain(gamma)) - verified[gamma + 1])
        / gamma
        for budget in budgets
        for gamma in gammas
    }
    return Times(timed(None, None), verified, drafted)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A run of the compiled loop.

    Attributes:
      seconds: of all of it.
      rounds: until the last row had ended.
      tau: tokens of a round and row, while the row had not ended.
    """

    seconds: float
    rounds: int
    tau: float


def muted(target: Model) -> Model:
    """Returns the target with a final norm of zeros: all logits are equal, the next token is 0.

    So the text is known beforehand, and the same in every pass: with the usual weights, passes of
    one and of several nodes round differently, and rows would leave the text for good.

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


def run_loop(setup: Setup, batch: int, context: int, drafter: Any, tree: Any) -> Loop:
    """Returns the faster of two runs of the loop, after one that is not counted."""
    request, found = request_of(setup, batch, context, drafter, tree), []
    for _ in range(3):
        arguments = request.target, request.drafter, state_of(request)
        loop, _ = program_cache.program("decode", request.settings, *arguments)
        jax.block_until_ready(arguments)
        begin = time.perf_counter()
        state = jax.block_until_ready(loop(*arguments))
        seconds = time.perf_counter() - begin
        counted = np.asarray(state.histogram).sum(1)
        tau = float(state.emitted.sum() - batch) / int(counted.sum())
        found.append(Loop(seconds, int(counted.max()), tau))
        del arguments, state  # two caches of a large batch would not fit
    return min(found[1:], key=lambda loop: loop.seconds)


def synthetic_draft(setup: Setup, batch: int, context: int, budget: int, rate: float) -> Synthetic:
    """Returns a self-speculating draft with synthetic acceptance, for a `muted` target."""
    text = jnp.zeros((batch, context + setup.new_tokens), jnp.int32)
    return Synthetic(SelfSpeculation(budget=budget), text, jnp.float32(rate))


def synthetic(setup: Setup, batch: int, context: int, budget: int, gamma: int, rate: float) -> Loop:
    """Returns a run with synthetic acceptance; the setup's target is a `muted` one."""
    drafter = synthetic_draft(setup, batch, context, budget, rate)
    return run_loop(setup, batch, context, drafter, chain(gamma))


def expected_tokens(rate: float, gamma: int) -> float:
    """Returns Omega, the tokens of a round of a chain whose tokens are each right at a rate."""
    return sum(rate**i for i in range(gamma + 1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m magicjax.benchmarks.bench",
        description=__doc__.split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--target", default="llama-3.1-8b", help="preset or model directory")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[16])
    parser.add_argument("--context", type=int, nargs="+", default=[32768])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 5, 9, 17], help="of T_verify")
    parser.add_argument("--budget", type=int, nargs="+", default=[512], help="of T_draft")
    parser.add_argument("--gamma", type=int, nargs="+", default=[4], help="drafts of a round")
    parser.add_argument("--rate", type=float, nargs="*", default=[0.8], help="synthetic acceptance")
    parser.add_argument("--new-tokens", type=int, default=96, help="of a loop, for each row")
    parser.add_argument("--steps", type=int, default=10, help="timed; the median counts")
    parser.add_argument("--backend", help="of the attention; None: mosaic on Hopper, else xla")
    parser.add_argument(
        "--hugging-face", action="store_true", help="beside generate with a static cache"
    )
    parser.add_argument("--out", help="write the results to this JSON file")
    return parser


def setup_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Setup:
    """Returns the setup, every request checked; wrong arguments end the process."""
    try:
        target = load(options.target, dtype=options.dtype)
        best = best_backend(target.dtype, target.config.head_dim, jax.devices()[0])
        setup = Setup(target, options.backend or best, options.new_tokens, options.steps)
        for context in options.context:
            request_of(setup, 1, context, None, None)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return setup


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 after printing the table; wrong arguments end the process with a message."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if min(options.nodes) < 2 or min(options.gamma) < 1 or options.steps < 1:
        parser.error("--nodes must be at least 2, --gamma and --steps at least 1")
    if not all(0 <= rate <= 1 for rate in options.rate):
        parser.error(f"--rate {options.rate}: each must lie between 0 and 1")
    shapes = [(batch, context) for batch in options.batch for context in options.context]
    theirs = _theirs(options, shapes) if options.hugging_face else {}
    setup = setup_of(parser, options)
    device, read, copy = jax.devices()[0], read_bandwidth(), copy_bandwidth()
    print(
        f"{device.device_kind}, jax {jax.__version__}, attention {setup.backend}, reads "
        f"{read / 1e9:.1f} GB/s, copies {copy / 1e9:.1f} GB/s"
    )
    about = {"device": device.device_kind, "jax": jax.__version__, "target": options.target}
    about |= {"dtype": options.dtype, "backend": setup.backend, "new_tokens": setup.new_tokens}
    about |= {"read_bandwidth": read, "copy_bandwidth": copy, "bandwidth": max(read, copy)}
    rows = []
    for shape in shapes:
        for row in _rows(setup, *shape, options, max(read, copy), theirs.get(shape)):
            rows.append(row)
            print("  ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
            if options.out:  # after every row, so that a kill loses one
                write_json(options.out, about | {"rows": rows})
    return 0


def _theirs(options: argparse.Namespace, shapes: list[tuple[int, int]]) -> dict:
    """Returns the answers of Hugging Face's process, which comes before JAX takes the memory."""
    platforms = jax.config.jax_platforms or ""  # no device is asked for yet
    device = "cpu" if platforms == "cpu" or not _has_gpu() else "cuda"
    ask = functools.partial(hf_baseline.ask, options.target, options.dtype)
    return {shape: ask(*shape, device) for shape in shapes}


def _has_gpu() -> bool:
    """Returns whether an NVIDIA GPU is here, without JAX, which would take its memory."""
    return bool(glob.glob("/dev/nvidia[0-9]*"))


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _rows(setup: Setup, batch: int, context: int, options, bandwidth: float, theirs: dict | None):
    """Yields the lines of one batch and context."""
    at = {"batch": batch, "context": context}
    times = measure(setup, batch, context, options.nodes, options.budget, options.gamma)
    floor = cost_model.step_bytes(setup.target, batch, context, 1) / bandwidth
    plain = {"ms": 1e3 * times.target, "floor ms": 1e3 * floor, "of floor": floor / times.target}
    yield at | {"part": "target"} | plain
    if theirs is not None:
        compared = {"of target": theirs["ms"] * 1e-3 / times.target} if "ms" in theirs else {}
        yield at | {"part": "hugging face"} | theirs | compared
    for n, seconds in times.verify.items():
        yield at | {"part": f"verify {n}", "ms": 1e3 * seconds, "of target": seconds / times.target}
    for (budget, gamma), seconds in times.draft.items():
        floor = cost_model.step_bytes(setup.target, batch, budget, 1) / bandwidth
        row = {"gamma": gamma, "ms": 1e3 * seconds, "floor ms": 1e3 * floor}
        yield at | {"part": f"draft {budget}"} | row | {"of target": seconds / times.target}
    if options.rate:
        yield from _loops(setup, at, options.rate, times)


def _loops(setup: Setup, at: dict[str, int], rates: Sequence[float], times: Times):
    """Yields a line for the plain loop, and one for each budget, gamma and rate."""
    silent = dataclasses.replace(setup, target=muted(setup.target))
    plain = run_loop(silent, **at, drafter=None, tree=None)
    a_round = plain.seconds / plain.rounds
    row = {"round ms": 1e3 * a_round, "overhead": 1 - times.target / a_round}
    yield at | {"part": "plain loop"} | row
    for (budget, gamma), drafted in times.draft.items():
        of_parts = gamma * drafted + times.verify[gamma + 1]
        for rate in rates:
            loop = synthetic(silent, **at, budget=budget, gamma=gamma, rate=rate)
            a_round = loop.seconds / loop.rounds
            row = {"gamma": gamma, "synthetic acceptance": rate, "tau": loop.tau}
            row |= {"round ms": 1e3 * a_round, "overhead": 1 - of_parts / a_round}
            # A batch is done when its slowest row is: `of a round` is the gain without that.
            row |= {"speed-up": plain.seconds / loop.seconds}
            row |= {"of a round": loop.tau * plain.seconds / plain.rounds / a_round}
            foretold = expected_tokens(rate, gamma) * times.target / of_parts
            yield at | {"part": f"loop {budget}"} | row | {"by its parts": foretold}


if __name__ == "__main__":
    raise SystemExit(main())
