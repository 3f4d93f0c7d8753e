"""JSON schemas as regular expressions, by outlines-core; what it would ignore is an error."""

from collections.abc import Iterator, Mapping
from typing import Any

# Keywords that outlines-core accepts without effect, or with another effect than JSON Schema's.
NOT_ENFORCED = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"),
    *("minProperties", "maxProperties", "patternProperties", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "unevaluatedProperties", "not", "if"),
)
LENGTHS = ("minLength", "maxLength")


def check(schema: Mapping[str, Any]) -> None:
    """Raises ValueError if outlines-core would ignore a part of a schema."""
    for part in _parts(schema):
        for keyword in NOT_ENFORCED:
            if part.get(keyword, False) is not False:
                _refuse(f"{keyword!r}", "it would not be enforced")
        if len(part.get("allOf", ())) > 1:
            _refuse("'allOf' with several schemas", "their texts would be concatenated")
        for keyword in ("pattern", "format"):
            if keyword in part and any(length in part for length in LENGTHS):
                _refuse(f"{keyword!r} with {' or '.join(LENGTHS)}", "only one would be enforced")
        unknown = sorted({*part.get("required", ())} - {*part.get("properties", ())})
        if unknown:
            _refuse(f"the required property {unknown[0]!r}", "'properties' does not have it")


def _refuse(what: str, why: str) -> None:
    raise ValueError(
        f"the JSON schema has {what}, which is not supported, because {why}: remove it, and check "
        "the text afterwards"
    )


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yields a schema and all schemas inside it."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for keyword in ("properties", "$defs", "definitions"):
        parts = schema.get(keyword)
        for part in parts.values() if isinstance(parts, Mapping) else ():
            yield from _parts(part)
    for keyword in ("items", "additionalProperties"):
        yield from _parts(schema.get(keyword))
    for keyword in ("prefixItems", "anyOf", "oneOf", "allOf"):
        parts = schema.get(keyword)
        for part in parts if isinstance(parts, list) else ():
            yield from _parts(part)
