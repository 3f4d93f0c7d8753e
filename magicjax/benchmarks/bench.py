"""Times the parts of a round against their floors: `python -m magicjax.benchmarks.bench`.

T_target is a step of plain decoding, T_verify(n) a pass of the target over n nodes, T_draft one
token of a self-speculating draft. The floor of a part is the time to move its bytes at the
bandwidth measured in the same run.

The second table is a loop with **synthetic acceptance**: its draft runs, but proposes the target's
own next tokens, each wrong with a given probability. It gives the speedup of a draft with that
acceptance rate, and says nothing about the acceptance of any real draft.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from magicjax.benchmarks.step_times import StepTimes, new_tokens, step_times
from magicjax.benchmarks.synthetic import (
    Setup,
    synthetic_draft,
    synthetic_request,
    synthetic_state,
    zero_logits,
)
from magicjax.benchmarks.tables import record_table
from magicjax.decoding.decoder import Decoder
from magicjax.drafters import SelfSpeculation
from magicjax.loading import load
from magicjax.model import DTYPES, Model, softcap_of
from magicjax.options import token_count
from magicjax.prediction.planner.candidates import model_sizes
from magicjax.trees.sequoia import expected_tokens
from magicjax.trees.token_tree import chain
from pallas_kernels.benchmarks.bandwidth import copy_bandwidth, read_bandwidth
from pallas_kernels.benchmarks.bench import best_backend, write_json


def part_times(setup: Setup, shape: tuple[int, int], options: argparse.Namespace) -> StepTimes:
    """Returns the times of the parts, those of drafts by (budget, gamma).

    Passes over --nodes and rounds of each --gamma are timed apart: a draft cache need not have room
    for the largest tree.
    """
    times = step_times(setup, *shape, options.nodes, {}, options.repeats)
    for gamma in options.gamma:
        drafts = {(n, gamma): (SelfSpeculation(budget=n), gamma) for n in options.budget}
        gamma_times = step_times(setup, *shape, (), drafts, options.repeats)
        passes = times.passes | gamma_times.passes  # a draft counts beside its own session's pass
        times = StepTimes(
            passes, times.drafts | gamma_times.drafts, times.rounds | gamma_times.rounds
        )
    return times


@dataclasses.dataclass(frozen=True)
class LoopRun:
    """A run of the compiled loop.

    Attributes:
      seconds: duration of the whole run.
      rounds: until the last row ended.
      tau: mean tokens per round and row, over the rounds before the row ended.
    """

    seconds: float
    rounds: int
    tau: float


def run_loop(setup: Setup, batch: int, context: int, drafter: Any, tree: Any) -> LoopRun:
    """Returns the faster of two runs of the loop, after a warm-up run."""
    request, runs = synthetic_request(setup, batch, context, drafter, tree), []
    decoder = Decoder(request)
    for _ in range(3):
        state = decoder.decode(jax.block_until_ready(synthetic_state(request)))
        seconds = decoder.clock.newest_s
        rounds = np.asarray(state.histogram).sum(1)
        tau = float(state.emitted.sum() - batch) / int(rounds.sum())
        runs.append(LoopRun(seconds, int(rounds.max()), tau))
        del state  # memory may not hold two caches of a large batch
    return min(runs[1:], key=lambda run: run.seconds)


def base_parser(prog: str, doc: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that the benchmarks of the loop share."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=doc.split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--target", default="llama-3.1-8b", help="preset, model directory or GGUF file"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="dtype of weights and caches"
    )
    parser.add_argument(
        "--weights", help="format of the target's matrices, as of `magicjax generate`"
    )
    parser.add_argument("--backend", help="None: mosaic on Hopper if it supports the target")
    parser.add_argument("--out", help="write the results to this JSON file")
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = base_parser("python -m magicjax.benchmarks.bench", __doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[16], help="rows")
    parser.add_argument(
        "--context", type=token_count, nargs="+", default=[32768], help="tokens per row"
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 5, 9, 17], help="for T_verify")
    parser.add_argument("--budget", type=int, nargs="+", default=[512], help="for T_draft")
    parser.add_argument("--gamma", type=int, nargs="+", default=[4], help="draft tokens per round")
    parser.add_argument(
        "--rate", type=float, nargs="*", default=[0.8], help="synthetic acceptance rate"
    )
    parser.add_argument("--new-tokens", type=int, default=96, help="new tokens per row of a loop")
    parser.add_argument("--repeats", type=int, default=10, help="timed calls; the median counts")
    return parser


def make_setup(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    contexts: Sequence[int],
    nodes: int = 1,
) -> Setup:
    """Returns the setup for passes over at most `nodes` nodes.

    Invalid options end the process with a message.
    """
    try:
        target = load(options.target, dtype=options.dtype, weights=options.weights)
        default_backend = None  # the default: mosaic does not support windows and capped scores
        if not any(target.windows) and softcap_of(target.config) is None:
            default_backend = best_backend(target.dtype, target.kv_head_dims[-1], jax.devices()[0])
        setup = Setup(target, options.backend or default_backend, options.new_tokens)
        longest = max(setup.new_tokens, new_tokens(nodes))
        for context in contexts:
            synthetic_request(
                dataclasses.replace(setup, new_tokens=longest), 1, context, None, None
            )
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
    deepest = max(*options.nodes, *(gamma + 1 for gamma in options.gamma))
    setup = make_setup(parser, options, options.context, deepest)
    device, read, copy = jax.devices()[0], read_bandwidth(), copy_bandwidth()
    print(
        f"{device.device_kind}, jax {jax.__version__}, attention {setup.backend}, reads "
        f"{read / 1e9:.1f} GB/s, copies {copy / 1e9:.1f} GB/s"
    )
    metadata = {"device": device.device_kind, "jax": jax.__version__, "target": options.target}
    metadata |= {"dtype": options.dtype, "weights": str(setup.target.weights or "")}
    metadata |= {"backend": setup.backend, "new_tokens": setup.new_tokens}
    metadata |= {"read_bandwidth": read, "copy_bandwidth": copy, "bandwidth": max(read, copy)}
    rows: list[dict[str, Any]] = []

    def record(shape: tuple[int, int], records: Iterator[dict[str, Any]]) -> None:
        first = len(rows)
        for row in records:
            rows.append(dict(zip(("batch", "context"), shape, strict=True)) | row)
            if options.out:  # after every row, so that an interrupted run keeps its results
                write_json(options.out, metadata | {"rows": rows})
        print("\n" + record_table(rows[first:]), flush=True)

    for shape in shapes:
        times = part_times(setup, shape, options)
        record(shape, _parts(setup.target, *shape, times, max(read, copy)))
        if options.rate:
            record(shape, _loops(setup, *shape, options.rate, times))
    return 0


def _parts(
    target: Model,
    batch: int,
    context: int,
    times: StepTimes,
    bandwidth: float,
) -> Iterator[dict[str, Any]]:
    """Yields the table of parts at one batch and context."""
    sizes, plain = model_sizes(target, None), times.passes[1]

    def row(part: str, seconds: float, slots: int | None = None, **columns: Any) -> dict[str, Any]:
        cells = {"part": part} | columns | {"ms": 1e3 * seconds}
        if slots is not None:
            entries = batch * sizes.slots_per_layer(slots) * sizes.kv_bytes
            floor = (sizes.read_bytes(batch) + entries) / bandwidth
            cells |= {"floor ms": 1e3 * floor, "floor / time": floor / seconds}
        return cells | {"time / T_target": seconds / plain}

    yield row("target", plain, context)
    for n, seconds in sorted(times.passes.items())[1:]:
        yield row(f"verify {n}", seconds)
    for (budget, gamma), seconds in sorted(times.drafts.items()):
        yield row(f"draft {budget}", seconds, budget, gamma=gamma)


def _loops(
    setup: Setup, batch: int, context: int, rates: Sequence[float], times: StepTimes
) -> Iterator[dict[str, Any]]:
    """Yields the plain loop, then a loop for each budget, gamma and rate."""
    setup = dataclasses.replace(setup, target=zero_logits(setup.target))
    plain = run_loop(setup, batch, context, None, None)
    plain_round = plain.seconds / plain.rounds
    target_s = times.passes[1]
    yield {"part": "plain loop", "round ms": 1e3 * plain_round}
    for (budget, gamma), draft in sorted(times.drafts.items()):
        predicted_s = gamma * draft + times.passes[gamma + 1]
        for rate in rates:
            drafter = synthetic_draft(setup, batch, context, budget, rate)
            run = run_loop(setup, batch, context, drafter, chain(gamma))
            seconds = run.seconds / run.rounds
            yield {
                "part": f"loop {budget}",
                "gamma": gamma,
                "synthetic acceptance": rate,
                "tau": run.tau,
                "round ms": 1e3 * seconds,
                "speedup": plain.seconds / run.seconds,
                # A batch ends with its slowest row; this speedup ignores that.
                "speedup per round": run.tau * plain_round / seconds,
                "predicted speedup": expected_tokens(chain(gamma), [rate]) * target_s / predicted_s,
            }


if __name__ == "__main__":
    raise SystemExit(main())
