"""Random JSON schemas, and an oracle: the package `jsonschema`."""

import functools
import itertools
import json
from typing import Any

import jsonschema
from hypothesis import strategies

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
