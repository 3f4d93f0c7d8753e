"""Times the parts of a round beside their floors: `python -m magicjax.bench`.

T_target is a step of plain decoding, T_verify(n) a pass of the target over n nodes, T_draft one
token of a self-speculating draft. Each stands beside the time in which its bytes can be read at the
bandwidth measured in the same run. Caches are zeros, so no prompt has to be read first: times do
not depend on what the numbers are.

The last lines are a loop with **synthetic acceptance**: its draft runs as it would, but proposes
the target's own next tokens, each wrong with a given probability. They say what a draft of that
quality would be worth, and nothing about the quality of any draft.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from magicjax import compilation, costs, decode
from magicjax.drafters import Drafter, SelfSpeculation
from magicjax.drafters.base import Round
from magicjax.generation import load
from magicjax.model import Model
from magicjax.proposal import Proposal
from magicjax.queries import Watch
from magicjax.request import Request, prepare
from magicjax.tree import Shape, Tree, chain
from pallas_kernels.bandwidth import read_bandwidth

NEW_TOKENS = 96
WARM_UP = 2


@struct.dataclass
class Synthetic:
    """Proposes a chain of a text that is known beforehand, some of its tokens wrong.

    Attributes:
      inner: a draft that runs too, for its cost; what it proposes is dropped. None: none runs.
      text: int32 [B, M], prompts and their plain continuations, or nothing of interest.
      rate: how often a token is right, given that those before it are.
    """

    inner: Drafter | None
    text: Int[Array, "B M"]
    rate: float = struct.field(pytree_node=False, default=1.0)

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
        keys = jax.random.key(0, impl="threefry2x32")
        draw = jax.vmap(jax.vmap(lambda r, p: jax.random.uniform(_fold(keys, r, p)), (None, 0)))
        right = draw(jnp.arange(places.shape[0]), places) < self.rate
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


def request_of(target: Model, batch: int, context: int, drafter: Any, tree: Any) -> Request:
    """Returns a request of full contexts; nothing runs."""
    rows = np.zeros((batch, context), np.int32)
    return prepare(
        target,
        list(rows),
        drafter=drafter,
        tree=tree,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=[],
    )


def state_of(request: Request) -> decode.DecodeState:
    """Returns a state with caches of zeros that hold the whole context."""

    def shapes() -> decode.DecodeState:
        cache, prefilled = decode.prefill(request.prefill_settings, *request.prefill_arguments)
        return decode.start(request.settings, *request.start_arguments(cache, prefilled))

    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(shapes))
    lengths = request.lengths
    drafter = jax.tree.map(
        lambda x: lengths if x.shape == lengths.shape and x.dtype == jnp.int32 else x,
        state.drafter,
    )
    cache = state.cache.replace(lengths=lengths)
    emitted = jnp.ones_like(lengths)
    state = state.replace(cache=cache, drafter=drafter, emitted=emitted, limits=request.limits)
    return jax.tree.map(jnp.array, state)  # a step takes over each array, so none may stand twice


def seconds_per_step(request: Request, steps: int) -> float:
    """Returns the median time of a round."""
    state, times = state_of(request), []
    arguments = request.target, request.drafter, state
    step, _ = compilation.program("step", request.settings, *arguments)
    for _ in range(WARM_UP + steps):
        begin = time.perf_counter()
        state = jax.block_until_ready(step(request.target, request.drafter, state))
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM_UP:])


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of the parts of a round at one batch and context.

    Attributes:
      target: T_target.
      verify: T_verify(n) by n.
      draft: T_draft, of one token, by budget.
    """

    target: float
    verify: dict[int, float]
    draft: dict[int, float]


def measure(
    target: Model,
    batch: int,
    context: int,
    nodes: Sequence[int],
    budgets: Sequence[int],
    gamma: int,
    steps: int,
) -> Times:
    """Returns the times; see the module."""
    nothing = Synthetic(None, jnp.zeros((batch, 1), jnp.int32))

    def verify(n: int) -> float:
        return seconds_per_step(request_of(target, batch, context, nothing, chain(n - 1)), steps)

    verified = {n: verify(n) for n in dict.fromkeys((*nodes, gamma + 1))}
    drafted = {}
    for budget in budgets:
        own = SelfSpeculation(budget=budget)
        request = request_of(target, batch, context, own, chain(gamma))
        # A round is a draft and a pass over gamma + 1 nodes.
        drafted[budget] = (seconds_per_step(request, steps) - verified[gamma + 1]) / gamma
    plain = seconds_per_step(request_of(target, batch, context, None, None), steps)
    return Times(plain, verified, drafted)


def speed_up(
    target: Model, batch: int, context: int, budget: int, gamma: int, rate: float
) -> tuple[float, float]:
    """Returns (the speed-up of a loop with synthetic acceptance, its tau)."""

    def run(drafter: Any, tree: Any) -> tuple[float, decode.DecodeState]:
        request = request_of(target, batch, context, drafter, tree)
        found = []
        for _ in range(WARM_UP + 1):
            arguments = request.target, request.drafter, state_of(request)
            loop, _ = compilation.program("decode", request.settings, *arguments)
            jax.block_until_ready(arguments)
            begin = time.perf_counter()
            state = jax.block_until_ready(loop(*arguments))
            found.append((time.perf_counter() - begin, state))
        return min(seconds for seconds, _ in found), found[-1][1]

    plain_s, plain = run(None, None)
    text = jnp.concatenate([jnp.zeros((batch, context), jnp.int32), plain.output], axis=1)
    drafter = Synthetic(SelfSpeculation(budget=budget), text, rate)
    seconds, state = run(drafter, chain(gamma))
    rounds = int(state.histogram.sum())
    return plain_s / seconds, float(state.emitted.sum() - batch) / rounds


def expected_tokens(rate: float, gamma: int) -> float:
    """Returns Omega, the tokens of a round of a chain whose tokens are each right at a rate."""
    return sum(rate**i for i in range(gamma + 1))


def floors(target: Model, batch: int, context: int, budget: int, bandwidth: float) -> dict:
    """Returns the seconds in which the bytes of a step, and of a draft's, can be read."""
    of_draft = costs.step_bytes(target, batch, budget, 1)
    return {
        "target": costs.step_bytes(target, batch, context, 1) / bandwidth,
        "draft": of_draft / bandwidth,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m magicjax.bench",
        description=__doc__.split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--target", default="llama-3.1-8b", help="preset or model directory")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[16])
    parser.add_argument("--context", type=int, nargs="+", default=[32768])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 5, 9, 17], help="of T_verify")
    parser.add_argument("--budget", type=int, nargs="+", default=[512], help="of T_draft")
    parser.add_argument("--gamma", type=int, default=4, help="drafted tokens of a round")
    parser.add_argument("--rate", type=float, nargs="*", default=[0.8], help="synthetic acceptance")
    parser.add_argument("--steps", type=int, default=10, help="timed; the median counts")
    parser.add_argument("--out", help="write the results to this JSON file")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 after printing the table; wrong arguments end the process with a message."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if min(options.nodes) < 2 or options.gamma < 1 or options.steps < 1:
        parser.error("--nodes must be at least 2, --gamma and --steps at least 1")
    if not all(0 <= rate <= 1 for rate in options.rate):
        parser.error(f"--rate {options.rate}: each must lie between 0 and 1")
    try:
        target = load(options.target, dtype=options.dtype)
        for context in options.context:
            request_of(target, 1, context, None, None)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    device, bandwidth = jax.devices()[0], read_bandwidth()
    print(f"{device.device_kind}, jax {jax.__version__}, reads {bandwidth / 1e9:.1f} GB/s")
    rows = []
    for batch in options.batch:
        for context in options.context:
            for row in _rows(target, batch, context, options, bandwidth):
                rows.append(row)
                print("  ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
    if options.out:
        about = {"device": device.device_kind, "jax": jax.__version__, "target": options.target}
        content = about | {"dtype": options.dtype, "bandwidth": bandwidth, "rows": rows}
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
    return 0


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _rows(target: Model, batch: int, context: int, options: argparse.Namespace, bandwidth: float):
    """Yields the lines of one batch and context."""
    at = {"batch": batch, "context": context}
    gamma = options.gamma
    times = measure(target, batch, context, options.nodes, options.budget, gamma, options.steps)
    floor = floors(target, batch, context, 0, bandwidth)["target"]
    plain = {"ms": 1e3 * times.target, "floor ms": 1e3 * floor, "of floor": floor / times.target}
    yield at | {"part": "target"} | plain
    for n, seconds in times.verify.items():
        yield at | {"part": f"verify {n}", "ms": 1e3 * seconds, "of target": seconds / times.target}
    for budget, seconds in times.draft.items():
        floor = floors(target, batch, context, budget, bandwidth)["draft"]
        row = {"ms": 1e3 * seconds, "floor ms": 1e3 * floor, "of target": seconds / times.target}
        yield at | {"part": f"draft {budget}"} | row
        for rate in options.rate:
            found, tau = speed_up(target, batch, context, budget, gamma, rate)
            of_parts = gamma * seconds + times.verify[gamma + 1]
            foretold = expected_tokens(rate, gamma) * times.target / of_parts
            row = {"synthetic acceptance": rate, "tau": tau, "speed-up": found}
            yield at | {"part": f"loop {budget}"} | row | {"by its parts": foretold}


if __name__ == "__main__":
    raise SystemExit(main())
