"""`magicjax plan`: which drafter, budget and tree pay on a machine, given measured acceptance."""

import argparse
import dataclasses
import json
from typing import Any

from magicjax import cost_model, planner
from magicjax.drafters import SmallModel
from magicjax.drafters.sparse import BUDGET
from magicjax.drafters.spec import make_drafter, parts
from magicjax.generation import config_of, skeleton
from magicjax.model import DTYPES
from magicjax.parallel import offloading
from magicjax.planner import acceptance
from magicjax.planner.candidates import candidate_of, deepest_of
from magicjax.policies import StreamingLLM
from magicjax.trees.token_tree import TokenTree, chain
from sharding import parse_mesh


def add(commands: Any) -> None:
    """Adds the sub-command to those of `magicjax`."""
    parser = commands.add_parser(
        "plan",
        help="what speculation is worth on a machine, foretold",
        description="Foretells which drafter, budget and tree pay most on a machine, or that none "
        "does. Acceptance must be measured and given; nothing is loaded or run.",
        allow_abbrev=False,
    )
    parser.add_argument("--target", required=True, help="preset or model directory")
    parser.add_argument("--batch", type=int, required=True, help="rows")
    parser.add_argument("--context", type=int, required=True, help="tokens of each row")
    parser.add_argument(
        "--device",
        required=True,
        help=f"{', '.join(cost_model.DEVICES)}, or a profile that `magicjax calibrate` wrote",
    )
    parser.add_argument(
        "--mesh",
        default="model=1",
        help="data=2,model=4: rows and heads are divided among devices; one if not given",
    )
    parser.add_argument(
        "--acceptance",
        help="measured: 0.8, by rank 0.6,0.2,0.1, or a .csv or .json table with the columns "
        "policy, budget, context, acceptance",
    )
    parser.add_argument(
        "--drafter",
        help="whose acceptance a number is: self:streaming:512, small:llama-3.2-1b:streaming:512 "
        f"or look-up; self:streaming:{BUDGET} if not given. A table names its drafters",
    )
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of models and caches")
    offloading.add_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the plan.

    Raises:
      ValueError, OSError: what `magicjax` prints before it ends.
    """
    machine = machine_of(arguments)
    target = cost_model.sizes_of(
        config_of(arguments.target), arguments.dtype, arguments.target, arguments.offload
    )
    cost_model.check_dtype(machine.device, arguments.dtype)
    check_context(arguments.target, arguments.context)
    candidates, sources = candidates_of(arguments, target)
    where = machine, arguments.batch, arguments.context
    found = planner.plan(target, candidates, *where)
    best = next(way for way in candidates if way.name == found.best.drafter)
    tree = found.best.tree
    times = cost_model.sources(target, best.draft, *where, tree.num_nodes, tree.levels.shape[1])
    if arguments.json:
        print(json.dumps(as_json(arguments, machine, found, sources, times), indent=2))
    else:
        print(as_text(arguments, machine, found, sources, times))


def machine_of(arguments: argparse.Namespace) -> cost_model.Machine:
    """Returns the machine of --device and --mesh."""
    mesh = parse_mesh(arguments.mesh)
    if mesh.stage > 1:
        raise ValueError(f"--mesh {arguments.mesh}: the cost model knows no stages; leave them out")
    return cost_model.Machine(cost_model.device_of(arguments.device), mesh.data, mesh.model)


def check_context(source: str, context: int) -> None:
    """Raises ValueError if a model has fewer positions than the context."""
    limit = config_of(source).max_positions
    if context > limit:
        raise ValueError(
            f"--context {context} is more than the {limit} positions of {source}: use a shorter one"
        )


def candidates_of(
    arguments: argparse.Namespace, target: cost_model.Sizes
) -> tuple[list[planner.Candidate], dict[str, str]]:
    """Returns (ways to draft, where the acceptance of each comes from).

    Raises:
      ValueError: no acceptance, or a drafter that could not run.
    """
    given = arguments.acceptance
    if given is None:
        raise ValueError(f"--acceptance is missing, and is never assumed: {acceptance.HOW}")
    drafter = arguments.drafter or f"self:streaming:{BUDGET}"
    if given.endswith((".csv", ".json")):
        if arguments.drafter:
            raise ValueError(
                f"--drafter says whose a number is, and the table {given} names its own drafters: "
                "leave --drafter out"
            )
        measured = acceptance.read_table(given, arguments.target)
    else:
        measured = [acceptance.from_text(given, drafter)]
    at_context = acceptance.at_context(measured, arguments.context)
    found = [
        candidate(name, table, target, arguments.dtype, arguments.context)
        for name, (table, _) in at_context.items()
    ]
    return found, {name: source for name, (_, source) in at_context.items()}


def candidate(
    name: str, table: acceptance.Table, target: cost_model.Sizes, dtype: str, context: int
) -> planner.Candidate:
    """Returns the drafter of that name as a way to draft.

    Args:
      name: as commands write it.
      table: its acceptance.
      target, dtype, context: what it drafts for.

    Raises:
      ValueError: its vocabulary is another, the context too long for it, or its budget too small.
    """
    drafter = make_drafter(name, skeleton)
    if isinstance(drafter, SmallModel):
        vocabulary = drafter.model.config.vocab_size
        if vocabulary != target.vocab_size:
            raise ValueError(
                f"{name}: its vocabulary has {vocabulary} tokens and the target's "
                f"{target.vocab_size}: they must be the same, so pick a drafter of its family"
            )
        if not isinstance(drafter.policy, StreamingLLM):  # it can, --sink-positions in_cache
            check_context(drafter.model.name, context)
    if (sparse := getattr(drafter, "sparse", None)) is not None:
        pins = sparse.budget - sparse.ring
        if deepest_of(drafter) < 1 or pins < 1:
            raise ValueError(
                f"{name}: a budget of {sparse.budget} leaves {sparse.ring} slots for the newest "
                f"tokens and {pins} to pin: use a larger one"
            )
    return dataclasses.replace(candidate_of(drafter, target, dtype, table.tolist()), name=name)


def written_tree(tree: TokenTree) -> str:
    """Returns the tree as commands write it."""
    if tree == chain(tree.depth):
        return f"chain:{tree.depth}"
    return "parents:" + ",".join(map(str, tree.parents))


def as_json(
    arguments: argparse.Namespace,
    machine: cost_model.Machine,
    found: planner.Plan,
    sources: dict[str, str],
    times: dict[str, str],
) -> dict[str, Any]:
    """Returns the plan as numbers; times are in milliseconds.

    `sources` says of each drafter where its acceptance comes from, `times` where those of the best
    plan do.
    """
    return {
        "target": arguments.target,
        "dtype": arguments.dtype,
        "device": machine.device.name,
        "mesh": {"data": machine.data, "model": machine.model},
        "offload": arguments.offload,
        "batch": arguments.batch,
        "context": arguments.context,
        "speculate": found.pays,
        "plain": {
            "t_target_ms": 1e3 * found.target,
            "tokens_per_s": arguments.batch / found.target,
        },
        "best": _prediction(found.best, sources),
        "runner_up": _prediction(found.runner_up, sources) if found.runner_up else None,
        "times_from": times,
        "break_even_acceptance": found.break_even,
        "too_large": list(found.too_large),
    }


def _prediction(p: planner.Prediction, sources: dict[str, str]) -> dict[str, Any]:
    written = parts(p.drafter)
    return {
        "drafter": p.drafter,
        "policy": written["policy"],
        "budget": int(written["budget"]) if written["budget"] else None,
        "tree": written_tree(p.tree),
        "acceptance_from": sources[p.drafter],
        "tokens_per_round": p.tokens,
        "t_draft_ms": 1e3 * p.cost.draft,
        "t_verify_ms": 1e3 * p.cost.verify,
        "round_ms": 1e3 * p.cost.total,
        "speed_up": p.speed_up,
        "tokens_per_s": p.tokens_per_s,
        "ms_per_token": 1e3 * p.seconds_per_token,
    }


def as_text(
    arguments: argparse.Namespace,
    machine: cost_model.Machine,
    found: planner.Plan,
    sources: dict[str, str],
    times: dict[str, str],
) -> str:
    """Returns the plan as a few lines; arguments as for `as_json`."""
    best = found.best
    mesh = f"data={machine.data},model={machine.model}"
    lines = [
        f"{arguments.target}, {arguments.dtype}, batch {arguments.batch}, context "
        f"{arguments.context}, on {machine.devices} x {machine.device.name} ({mesh})"
        + offloading.in_words(arguments.offload),
        f"plain decoding: T_target {1e3 * found.target:.2f} ms, "
        f"{arguments.batch / found.target:,.0f} tokens/s",
        _line("best" if found.pays else "off; the least slow", best),
    ]
    if found.runner_up:
        lines.append(_line("runner-up", found.runner_up))
    lines.append(f"acceptance of {best.drafter}: {sources[best.drafter]}")
    lines.append("times: " + ", ".join(f"{name} {source}" for name, source in times.items()))
    if found.break_even is None:
        lines.append(f"break-even: none, {best.drafter} would not pay if all it drafts were right")
    else:
        pays = "pays" if found.pays else "would pay"
        lines.append(
            f"break-even: a chain of {best.drafter} {pays} from acceptance "
            f"{found.break_even:.2f} on"
        )
    if found.too_large:
        lines.append(f"does not fit into memory: {', '.join(found.too_large)}")
    if not found.pays:
        lines.append("Speculation does not pay here: decode plainly.")
    return "\n".join(lines)


def _line(what: str, p: planner.Prediction) -> str:
    return (
        f"{what}: {p.drafter}, {written_tree(p.tree)}: speed-up {p.speed_up:.2f}, "
        f"{p.tokens_per_s:,.0f} tokens/s, {1e3 * p.seconds_per_token:.2f} ms a token\n"
        f"    {p.tokens:.2f} tokens a round of {1e3 * p.cost.total:.2f} ms: "
        f"{p.cost.depth} x T_draft {1e3 * p.cost.draft:.2f}, T_verify({p.tree.num_nodes}) "
        f"{1e3 * p.cost.verify:.2f}, the rest {1e3 * p.cost.rest:.2f}"
    )
