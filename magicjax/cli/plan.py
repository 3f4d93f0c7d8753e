"""`magicjax plan`: predicts the fastest drafter, budget and tree from measured acceptance."""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

from magicjax import placement
from magicjax.cli import model_options
from magicjax.drafters.sparse import BUDGET
from magicjax.drafters.spec import make_drafter, parse_one
from magicjax.loading import abstract_model
from magicjax.model import DTYPES, Model
from magicjax.options import token_count
from magicjax.parallel import offloading
from magicjax.policies import StreamingLLM
from magicjax.prediction import cost_model, planner
from magicjax.prediction.planner import acceptance
from magicjax.prediction.planner.candidates import (
    footprint_on,
    free_memory,
    make_candidate,
    model_sizes,
)
from magicjax.sources import Source
from magicjax.trees.token_tree import TokenTree, chain
from sharding import abstract_mesh, parse_mesh

SHOWN_NODES = 32  # a larger tree is shown by its number of nodes


def add(commands: Any) -> None:
    """Adds the subcommand to those of `magicjax`."""
    parser = commands.add_parser(
        "plan",
        description="Predicts which drafter, budget and tree are fastest on a machine, and whether "
        "they are faster than plain decoding. Requires measured acceptance; runs no model.",
        allow_abbrev=False,
    )
    parser.add_argument("--target", required=True, help=model_options.SOURCE)
    parser.add_argument("--batch", type=int, required=True, help="number of rows")
    parser.add_argument(
        "--context", type=token_count, required=True, help="tokens per row; 8k is 8192"
    )
    parser.add_argument(
        "--device",
        required=True,
        help=f"{', '.join(cost_model.DEVICES)}, or a profile from `magicjax calibrate`",
    )
    parser.add_argument(
        "--mesh",
        default="model=1",
        help="data=2,model=4 divides rows and heads over devices; default: one device",
    )
    parser.add_argument(
        "--acceptance",
        help="measured acceptance: a rate (0.8), rates by rank (0.6,0.2,0.1), or a .csv or .json "
        "table with the columns policy, budget, context, acceptance",
    )
    parser.add_argument(
        "--drafter",
        help="drafter to which --acceptance applies: self:streaming:512, "
        "small:llama-3.2-1b:streaming:512 or prompt-lookup; default: "
        f"self:streaming:{BUDGET}, or the drafters of the table",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of models and caches; default: that of the device's rates",
    )
    model_options.add_weights(parser)
    model_options.add_activations(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the plan.

    Raises:
      ValueError, OSError: invalid input.
    """
    machine = machine_of(arguments)
    arguments.dtype = arguments.dtype or machine.device.dtype
    source = Source(arguments.target)
    model = abstract_model(
        source,
        arguments.dtype,
        weights=arguments.weights,
        kv_dtype=arguments.kv_dtype,
        offload=arguments.offload,
        packed=_is_packed(arguments, machine),
    )
    target = model_sizes(model, arguments.dtype)
    cost_model.check_dtype(machine.device, arguments.dtype, arguments.device)
    model_options.check_context(source, arguments.context)
    candidates, sources = candidates_of(arguments, model, machine)
    batch, context = arguments.batch, arguments.context
    free = free_memory(model, machine, batch, context)
    plan = planner.plan(target, candidates, machine, batch, context, free)
    best = next(candidate for candidate in candidates if candidate.name == plan.best.drafter)
    tree = plan.best.tree
    times = cost_model.sources(
        target, best.draft, machine, batch, context, tree.num_nodes, tree.levels.shape[1]
    )
    if arguments.json:
        print(json.dumps(as_json(arguments, model, machine, plan, sources, times), indent=2))
    else:
        print(as_text(arguments, model, machine, plan, sources, times))


def _is_packed(arguments: argparse.Namespace, machine: cost_model.Machine) -> bool:
    """Returns whether matrices of GGUF files are packed on the machine."""
    one_cpu = machine.device.name == "cpu" and machine.data * machine.model == 1
    return arguments.activations == "int8" and one_cpu


def machine_of(arguments: argparse.Namespace) -> cost_model.Machine:
    """Returns the machine of --device and --mesh."""
    mesh = parse_mesh(arguments.mesh)
    if mesh.stage > 1:
        raise ValueError(
            f"--mesh {arguments.mesh}: the cost model does not support pipeline stages; omit stage"
        )
    return cost_model.Machine(cost_model.device_of(arguments.device), mesh.data, mesh.model)


def candidates_of(
    arguments: argparse.Namespace, target: Model, machine: cost_model.Machine
) -> tuple[list[planner.Candidate], dict[str, str]]:
    """Returns (candidates, the source of each one's acceptance).

    Raises:
      ValueError: no acceptance, or a drafter that cannot run.
    """
    source = arguments.acceptance
    if source is None:
        raise ValueError(f"--acceptance is required and has no default: {acceptance.HOW}")
    drafter = arguments.drafter or f"self:streaming:{BUDGET}"
    if source.endswith((".csv", ".json")):
        if arguments.drafter:
            raise ValueError(
                f"--drafter has no effect with a table, and {source} lists its drafters: remove it"
            )
        measured = acceptance.read_table(source, arguments.target)
    else:
        measured = [acceptance.from_text(source, drafter)]
    at_context = acceptance.at_context(measured, arguments.context)
    packed = _is_packed(arguments, machine)
    load = functools.partial(abstract_model, dtype=arguments.dtype, packed=packed)
    candidates = [
        candidate(name, table, target, machine, arguments.batch, arguments.context, load)
        for name, (table, _) in at_context.items()
    ]
    return candidates, {name: measured_at for name, (_, measured_at) in at_context.items()}


def candidate(
    name: str,
    table: acceptance.Table,
    target: Model,
    machine: cost_model.Machine,
    batch: int,
    context: int,
    load: Callable[..., Model],
) -> planner.Candidate:
    """Returns the candidate of a drafter, whose spec is `name`, with its acceptance.

    Args:
      target: an abstract model, as it will be loaded.
      machine: divides the target.
      batch, context: B, and the tokens of each row's cache.
      load: loads small models.

    Raises:
      ValueError: another vocabulary, a context that is too long, a budget that is too small, a
        target that cannot be copied, or a model that does not divide over the machine.
    """
    drafter = make_drafter(name, load)
    # A small model that streams may read longer texts, with sink_positions=in_cache.
    streams = isinstance(getattr(drafter, "policy", None), StreamingLLM)
    drafter.check(target, chain(1), 1, 0 if streams else context)
    mesh, prepared = abstract_mesh(machine.data, machine.model), drafter.for_target(target)
    for model in filter(None, (target, getattr(prepared, "blocks", None))):
        placement.parameter_shardings(model.module, None, mesh)
    dtype, rates = str(target.dtype), table.tolist()
    memory = footprint_on(machine, target, prepared, batch, context).draft
    result = make_candidate(drafter, model_sizes(target, dtype), dtype, rates, memory=memory)
    return dataclasses.replace(result, name=name)


def tree_spec(tree: TokenTree) -> str:
    """Returns the text of a tree, as --tree takes it."""
    if tree == chain(tree.depth):
        return f"chain:{tree.depth}"
    return "parents:" + ",".join(map(str, tree.parents))


def as_json(
    arguments: argparse.Namespace,
    model: Model,
    machine: cost_model.Machine,
    plan: planner.Plan,
    sources: dict[str, str],
    times: dict[str, str],
) -> dict[str, Any]:
    """Returns the plan as JSON values, times in milliseconds.

    Args:
      arguments: the parsed options.
      model: the target.
      machine, plan: what runs it, and what is predicted.
      sources: where each drafter's acceptance comes from.
      times: the sources of the best prediction's times.
    """
    return {
        "target": arguments.target,
        "dtype": arguments.dtype,
        "device": machine.device.name,
        "mesh": {"data": machine.data, "model": machine.model},
        "weights": str(model.weights) if model.weights else None,
        "kv_dtype": arguments.kv_dtype,
        "offload": arguments.offload,
        "batch": arguments.batch,
        "context": arguments.context,
        "speculate": plan.speculate,
        "plain": {
            "t_target_ms": 1e3 * plan.target,
            "tokens_per_s": arguments.batch / plan.target,
        },
        "best": _prediction(plan.best, sources),
        "runner_up": _prediction(plan.runner_up, sources) if plan.runner_up else None,
        "times_from": times,
        "break_even_acceptance": plan.break_even,
        "too_large": list(plan.too_large),
    }


def _prediction(p: planner.Prediction, sources: dict[str, str]) -> dict[str, Any]:
    values = parse_one(p.drafter).values
    return {
        "drafter": p.drafter,
        "policy": values.get("policy"),
        "budget": values.get("budget"),
        "tree": tree_spec(p.tree),
        "acceptance_from": sources[p.drafter],
        "tokens_per_round": p.tokens,
        "t_draft_ms": 1e3 * p.cost.draft,
        "t_verify_ms": 1e3 * p.cost.verify,
        "round_ms": 1e3 * p.cost.total,
        "speedup": p.speedup,
        "tokens_per_s": p.tokens_per_s,
        "ms_per_token": 1e3 * p.seconds_per_token,
    }


def as_text(
    arguments: argparse.Namespace,
    model: Model,
    machine: cost_model.Machine,
    plan: planner.Plan,
    sources: dict[str, str],
    times: dict[str, str],
) -> str:
    """Returns the plan as lines of text, given `as_json`'s arguments."""
    best = plan.best
    mesh = f"data={machine.data},model={machine.model}"
    lines = [
        f"{arguments.target}, {arguments.dtype}, batch {arguments.batch}, context "
        f"{arguments.context}, on {machine.devices} x {machine.device.name} ({mesh})"
        + offloading.describe(model.offload, model.weights, arguments.kv_dtype),
        f"plain decoding: predicted T_target {1e3 * plan.target:.2f} ms, "
        f"{arguments.batch / plan.target:,.0f} tokens/s",
        _line("fastest drafter" if plan.speculate else "plain is fastest; best drafter", best),
    ]
    if plan.runner_up:
        lines.append(_line("runner-up", plan.runner_up))
    sizes = model_sizes(model, arguments.dtype)
    if sizes.experts:
        rows = machine.rows(arguments.batch)
        one, all_nodes = (
            sizes.experts * sizes.active_share(rows * n) for n in (1, best.tree.num_nodes)
        )
        lines.append(
            f"experts: a step reads {one:.0f} of {sizes.experts} in each layer, a verification of "
            f"{best.tree.num_nodes} nodes about {all_nodes:.0f}"
        )
    lines.append(f"acceptance of {best.drafter}: {sources[best.drafter]}")
    lines.append("times from: " + ", ".join(f"{name} {source}" for name, source in times.items()))
    if machine.device == cost_model.DEVICES.get(machine.device.name):
        lines.append(
            f"{machine.device.name} is not calibrated: the roofline is its datasheet's; run "
            "`magicjax calibrate` there"
        )
    if plan.break_even is None:
        lines.append(
            f"break-even: none; {best.drafter} is slower than plain decoding at any acceptance"
        )
    else:
        lines.append(
            f"break-even: chains of {best.drafter} are faster than plain decoding above acceptance "
            f"{plan.break_even:.2f}"
        )
    if plan.too_large:
        lines.append(f"exceeding memory: {', '.join(plan.too_large)}")
    best_choice = "speculative" if plan.speculate else "plain"
    lines.append(f"recommendation: {best_choice} decoding")
    return "\n".join(lines)


def _line(title: str, p: planner.Prediction) -> str:
    nodes = p.tree.num_nodes
    spec = tree_spec(p.tree) if nodes <= SHOWN_NODES else f"a tree of {nodes} nodes (see --json)"
    return (
        f"{title}: {p.drafter}, {spec}: predicted speedup {p.speedup:.2f}x, "
        f"{p.tokens_per_s:,.0f} tokens/s, {1e3 * p.seconds_per_token:.2f} ms per token\n"
        f"    {p.tokens:.2f} tokens per round, {1e3 * p.cost.total:.2f} ms per round: "
        f"{p.cost.depth} x T_draft {1e3 * p.cost.draft:.2f}, T_verify({nodes}) "
        f"{1e3 * p.cost.verify:.2f}, other {1e3 * p.cost.rest:.2f}"
    )
