"""Random JSON schemas, the texts of their automata, and an oracle: the package `jsonschema`."""

import functools
import itertools
import json
import random
from typing import Any

import jsonschema
import numpy as np
from hypothesis import strategies

from magicjax.grammars.grammar import Grammar, byte_automaton

NAMES = ("a", "b", "c")
SMALL = [None, True, False, -1, 0, 1, 2, "", "a", "b"]  # the scalars of small schemas
FORMATS = ("date", "date-time", "duration", "email", "ipv4", "time", "uri", "uuid")


def is_valid(text: str, schema: Any) -> bool:
    """Returns whether a text is JSON and satisfies a schema."""
    try:
        _validator(json.dumps(schema)).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@functools.lru_cache(maxsize=8)
def _validator(text: str) -> Any:
    schema, newest = json.loads(text), jsonschema.Draft202012Validator
    validator = jsonschema.validators.validator_for(schema, newest)
    return validator(schema, format_checker=newest.FORMAT_CHECKER)


def texts(grammar: Grammar, count: int = 40, length: int = 80, seed: int = 0) -> list[str]:
    """Returns texts of random walks through an automaton, which end soon after `length` bytes.

    They prefer quotes, brackets and other special characters to letters.
    """
    automaton, rng, found = byte_automaton(grammar), random.Random(seed), []
    left = _bytes_left(grammar)
    for _ in range(count):
        state, text = 0, bytearray()
        while not (automaton.final[state] and (len(text) >= length or rng.random() < 0.3)):
            allowed = (automaton.next[state] >= 0).nonzero()[0].tolist()
            if not allowed:
                break
            if len(text) >= length:
                allowed = [min(allowed, key=lambda byte: left[automaton.next[state, byte]])]
            special = [byte for byte in allowed if byte in b'"\\}]@.']
            byte = rng.choice(special if special and rng.random() < 0.5 else allowed)
            state = automaton.next[state, byte]
            text.append(byte)
        assert automaton.final[state]
        found.append(text.decode())
    return found


def _bytes_left(grammar: Grammar) -> np.ndarray:
    """Returns the fewest bytes from each state to the end of a text."""
    automaton = byte_automaton(grammar)
    left = np.where(automaton.final, 0, 2**20)
    while True:
        after = np.where(automaton.next < 0, 2**20, left[automaton.next]).min(axis=1)
        closer = np.minimum(left, after + 1)
        if (closer == left).all():
            return left
        left = closer


def accepts(grammar: Grammar, text: str) -> bool:
    """Returns whether a grammar has a text."""
    automaton, state = byte_automaton(grammar), 0
    for byte in text.encode():
        state = automaton.next[state, byte]
        if state < 0:
            return False
    return bool(automaton.final[state])


def language(grammar: Grammar, most: int = 10_000) -> set[str]:
    """Returns all texts of a grammar that have no blanks between tokens of JSON."""
    automaton, found, open_ = byte_automaton(grammar), set(), [(0, b"")]
    while open_:
        state, text = open_.pop()
        if automaton.final[state]:
            found.add(text.decode())
        for byte in (automaton.next[state] >= 0).nonzero()[0].tolist():
            if byte != ord(" "):
                open_.append((automaton.next[state, byte], text + bytes([byte])))
        assert len(open_) + len(found) < most
    return found


@functools.cache
def small_values() -> tuple[Any, ...]:
    """Returns the values that small schemas may have: scalars, lists and objects of two levels."""
    lists = [[*x] for n in range(3) for x in itertools.product(SMALL, repeat=n)]
    objects = [
        dict(zip(names, x, strict=True))
        for n in range(4)
        for names in itertools.combinations(NAMES, n)
        for x in itertools.product(SMALL, repeat=n)
    ]
    return (*SMALL, *lists, *objects)


def small_language(schema: dict) -> set[str]:
    """Returns the texts of the small values that satisfy a schema, with its properties only."""
    dump = functools.partial(json.dumps, separators=(",", ":"))
    return {
        text
        for value in small_values()
        if not (isinstance(value, dict) and value.keys() - schema.get("properties", {}).keys())
        if is_valid(text := dump(value), schema)
    }


@strategies.composite
def small_schemas(draw: Any) -> dict:
    """Draws a schema whose values are small."""

    def scalar() -> dict:
        values = strategies.lists(strategies.sampled_from(SMALL), min_size=1, max_size=4)
        lows = strategies.sampled_from([{"minimum": -1}, {"exclusiveMinimum": -1.5}])
        highs = strategies.sampled_from([{"maximum": 2}, {"exclusiveMaximum": 2}])
        return draw(
            strategies.one_of(
                strategies.builds(lambda x: {"enum": x}, values),
                strategies.builds(lambda x: {"const": x}, strategies.sampled_from(SMALL)),
                strategies.just({"type": ["boolean", "null"]}),
                strategies.builds(lambda x, y: {"type": "integer"} | x | y, lows, highs),
                strategies.builds(lambda x: {"anyOf": [{"type": "null"}, {"enum": x}]}, values),
            )
        )

    kind = draw(strategies.sampled_from(["scalar", "array", "tuple", "object"]))
    if kind == "scalar":
        return scalar()
    if kind == "array":
        low, high = sorted([draw(strategies.integers(0, 2)), draw(strategies.integers(0, 2))])
        return {"type": "array", "items": scalar(), "minItems": low, "maxItems": high}
    if kind == "tuple":
        items = [scalar() for _ in range(draw(strategies.integers(1, 2)))]
        low = draw(strategies.integers(0, len(items)))
        return {"type": "array", "prefixItems": items, "items": False, "minItems": low}
    names = [name for name in NAMES if draw(strategies.booleans())] or ["b"]
    required = [name for name in names if draw(strategies.booleans())]
    properties = {name: scalar() for name in names}
    return {"type": "object", "properties": properties, "required": required}


@strategies.composite
def schemas(draw: Any, depth: int = 10) -> dict:
    """Draws a schema with definitions that refer to each other, up to `depth` of them."""
    count = draw(strategies.integers(0, depth))
    definitions: dict[str, Any] = {}
    for i in range(count):
        definitions[f"d{i}"] = draw(_parts(tuple(definitions)))
    return {"$defs": definitions} | draw(_parts(tuple(definitions)[-1:]))


def _parts(definitions: tuple[str, ...]) -> Any:
    """Returns a strategy of parts that may refer to the newest definitions."""
    numbers = strategies.one_of(
        strategies.integers(-300, 300),
        strategies.floats(-99, 99, allow_subnormal=False).map(lambda x: round(x, 3)),
    )
    lows = strategies.sampled_from(["minimum", "exclusiveMinimum", None])
    highs = strategies.sampled_from(["maximum", "exclusiveMaximum", None])

    def number(name: str, low: str | None, x: float, high: str | None, y: float) -> dict:
        x, y = min(x, y), max(x, y) + 2
        return {"type": name} | ({low: x} if low else {}) | ({high: y} if high else {})

    leaves = [
        strategies.builds(
            number, strategies.sampled_from(["integer", "number"]), lows, numbers, highs, numbers
        ),
        strategies.sampled_from(
            [{"type": "boolean"}, {"type": ["string", "null"], "maxLength": 5}, {"type": "string"}]
        ),
        strategies.sampled_from([{"type": "string", "format": name} for name in FORMATS]),
        strategies.lists(
            strategies.one_of(strategies.none(), strategies.text(max_size=3), numbers),
            min_size=1,
            max_size=3,
        ).map(lambda values: {"enum": values}),
    ]
    references = [{"$ref": f"#/$defs/{name}"} for name in definitions[-2:]]
    if references:
        leaves.append(strategies.sampled_from(references))

    def containers(inner: Any) -> Any:
        names = strategies.text('ab/~"\\.é{ ', min_size=1, max_size=3)
        return strategies.one_of(
            strategies.builds(
                lambda parts, flags: {
                    "type": "object",
                    "properties": parts,
                    "required": [n for n, flag in zip(parts, flags, strict=False) if flag],
                },
                strategies.dictionaries(names, inner, max_size=4),
                strategies.lists(strategies.booleans(), min_size=4, max_size=4),
            ),
            strategies.builds(
                lambda item, x, y: {
                    "type": "array",
                    "items": item,
                    "minItems": min(x, y),
                    "maxItems": max(x, y),
                },
                inner,
                strategies.integers(0, 3),
                strategies.integers(0, 3),
            ),
            strategies.lists(inner, min_size=1, max_size=3).map(
                lambda items: {"type": "array", "prefixItems": items}
            ),
            strategies.builds(
                lambda value, low: {
                    "type": "object",
                    "additionalProperties": value,
                    "minProperties": low,
                },
                inner,
                strategies.integers(0, 1),
            ),
            strategies.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
        )

    return strategies.recursive(strategies.one_of(leaves), containers, max_leaves=5)
