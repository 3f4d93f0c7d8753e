"""Suffix lookup on requests that resemble each other, and on different ones.

    python -m experiments.studies.suffix_store [--target PATH] [--requests N] [--lookups]

An engine of one slot for each method serves the requests one after the other. All engines serve a
request before the next one begins, so that a machine that changes its speed does so for all.
"""

import argparse
import json
import statistics
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import magicjax
from experiments.prompts import sources
from experiments.prompts.tasks import record_formats
from magicjax.benchmarks.tables import record_table
from magicjax.decoding.runner import timed
from magicjax.drafters.text_lookup import TextState

METHODS = (
    (None, None),
    ("prompt-lookup:4", "chain:4"),
    ("suffix:store_tokens=0", "chain:4"),
    ("suffix", "chain:4"),
    ("suffix", "dynamic:8,6,2"),
)
TOOLS = [
    {"name": name, "description": description, "parameters": parameters}
    for name, description, parameters in (
        ("find_order", "Returns an order of a customer.", {"order": "integer"}),
        ("refund", "Refunds an amount in euros.", {"order": "integer", "amount": "number"}),
        ("send_mail", "Sends a mail.", {"to": "string", "subject": "string", "text": "string"}),
        ("book_visit", "Books a visit.", {"city": "string", "day": "string"}),
    )
]
SYSTEM = (
    f"You are an agent of a shop. Answer with a call of one of these tools: {json.dumps(TOOLS)}"
)
TEMPLATES = (
    "Refund {number} euros of order {order} to {name}.",
    "Where is the order {order} of {name}?",
    "Write a mail to {name} that order {order} arrives in {number} days in {city}.",
    "Book a visit to {city} on {day} for {name}, and confirm it by mail.",
    "{name} from {city} did not receive order {order}. Explain what you do, step by step.",
    "List the tools that you need to refund {number} euros to {name}, and why.",
    "Answer {name}, who asks whether order {order} can still be changed.",
    "Summarize for the manager: {name} returned order {order} and wants {number} euros.",
    "Write the JSON call that sends {name} a mail about the visit to {city} on {day}.",
    "Apologize to {name} for the late order {order}, and offer {number} euros.",
)
VALUES = {
    "name": ("Anna Weber", "Luis Ortega", "Mei Lin", "Omar Haddad", "Eva Novak", "John Smith"),
    "city": ("Paris", "Lisbon", "Vienna", "Oslo", "Prague"),
    "day": ("Monday", "Tuesday", "Thursday", "Friday"),
}
LOOKUP_TOKENS = (16_384, 65_536, 262_144)  # of the stores that are timed
CONTEXT, REPEATS = 1024, 50  # tokens of a row, and timed lookups


def resembling(count: int) -> list[list[dict[str, str]]]:
    """Returns conversations of an agent: the same tools, and templates with other values."""
    rng, made = np.random.default_rng(0), []
    for number in range(count):
        chosen = {name: str(rng.choice(values)) for name, values in VALUES.items()}
        chosen |= {"order": str(rng.integers(10_000, 99_999)), "number": str(rng.integers(5, 90))}
        user = TEMPLATES[number % len(TEMPLATES)].format(**chosen)
        made.append([{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}])
    return made


def different() -> list[list[dict[str, str]]]:
    """Returns the first questions of the bundled conversations."""
    records = record_formats.read(sources.CHAT, "")
    return [[{"role": "user", "content": record.turns[0]}] for record in records]


def serve(engine: magicjax.Engine, messages: Any, new_tokens: int) -> dict[str, Any]:
    """Returns the text of a request, its seconds in the loop, its rounds, and those that drafted.

    Args:
      engine: of one slot, and one round per step.
      messages: the prompt.
      new_tokens: at most.
    """
    before, drafting = engine.stats.loop_s, 0
    handle = engine.submit(messages, magicjax.SamplingParams(max_tokens=new_tokens))
    while not handle.finished:
        drafted = handle.drafted
        engine.step()
        drafting += handle.drafted > drafted
    seconds, tokens = engine.stats.loop_s - before, handle.result().tokens
    return dict(tokens=tokens.tolist(), loop_s=seconds, rounds=handle.rounds, drafting=drafting)


def measure(target: magicjax.Model, conversations: Sequence[Any], new_tokens: int) -> list[dict]:
    """Returns a row for each method, after all conversations; warm-up is not timed."""
    config = magicjax.EngineConfig(
        slots=1, capacity=CONTEXT, max_tokens=new_tokens, rounds_per_step=1
    )
    engines = [magicjax.Engine(target, drafter, tree, config) for drafter, tree in METHODS]
    for engine in engines:
        engine.warm_up()
    served: list[list[dict[str, Any]]] = [[] for _ in engines]
    for messages in conversations:
        for engine, requests in zip(engines, served, strict=True):
            requests.append(serve(engine, messages, new_tokens))
    plain, rows = served[0], []
    for (drafter, tree), requests in zip(METHODS, served, strict=True):
        rounds, seconds, drafting = (
            sum(request[name] for request in requests) for name in ("rounds", "loop_s", "drafting")
        )
        decoded = sum(len(request["tokens"]) - 1 for request in requests)
        equal = [a["tokens"] == b["tokens"] for a, b in zip(requests, plain, strict=True)]
        rows.append(
            {
                "drafter": drafter or "none",
                "tree": tree,
                "hit rate": drafting / rounds if drafter else None,
                "τ": decoded / rounds,
                "tokens/s": decoded / seconds,
                "× plain": sum(request["loop_s"] for request in plain) / seconds,
                "equal": statistics.mean(equal),
            }
        )
    return rows


def lookup_ms(store_tokens: int, batch: int) -> float:
    """Returns the median milliseconds of one proposal of suffix lookup, with a full store."""
    rng = np.random.default_rng(0)
    drafter = magicjax.SuffixLookup(store_tokens=store_tokens)
    drafter = drafter.remember(rng.integers(0, 999, store_tokens))
    text = jnp.asarray(rng.integers(0, 999, (batch, CONTEXT)), jnp.int32)
    state = TextState(text, jnp.full(batch, CONTEXT - 1, jnp.int32))
    settings: Any = types.SimpleNamespace(tree=magicjax.chain(4), capacity=CONTEXT)

    @jax.jit
    def propose(drafter, state, root):
        return drafter.propose(None, state, root, None, None, settings)[0]

    return 1e3 * statistics.median(
        timed(propose, drafter, state, text[:, -1])[1] for _ in range(1 + REPEATS)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.suffix_store",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--target", default="smollm2", help="model with a chat template")
    parser.add_argument("--dtype", default="bfloat16", help="of the model")
    parser.add_argument("--requests", type=int, default=100, help="that resemble each other")
    parser.add_argument("--new-tokens", type=int, default=64, help="of a request, at most")
    parser.add_argument("--lookups", action="store_true", help="only time lookups, without a model")
    options = parser.parse_args(arguments)
    if options.lookups:
        rows: list[dict[str, Any]] = [
            {"batch": batch, "store tokens": size, "store bytes": 4 * size}
            | {"ms": lookup_ms(size, batch)}
            for batch in (1, 8)
            for size in LOOKUP_TOKENS
        ]
        print(record_table(rows))
        return 0
    try:
        target = magicjax.load(options.target, options.dtype)
        workloads = {"resembling": resembling(options.requests), "different": different()}
        for name, conversations in workloads.items():
            rows = measure(target, conversations[: options.requests], options.new_tokens)
            print(f"\n{name}: {min(len(conversations), options.requests)} requests\n")
            print(record_table(rows), flush=True)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"\nstore: {4 * magicjax.SuffixLookup().store_tokens} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
