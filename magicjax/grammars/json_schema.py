"""JSON schemas for outlines-core, which translates them to regular expressions.

outlines-core ignores some keywords, inserts patterns into the regular expression as they are, and
does not escape names. What it would ignore or mistranslate is an error here, or is rewritten.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from magicjax.grammars import string_pattern

# Keywords that outlines-core accepts without effect, or with another effect than JSON Schema's.
NOT_ENFORCED = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"),
    *("minProperties", "maxProperties", "patternProperties", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "unevaluatedProperties", "not", "if"),
)
LENGTHS = ("minLength", "maxLength")
# Keywords beside which outlines-core ignores all others, except these.
ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
WITHOUT_EFFECT = frozenset(
    {"$schema", "$id", "$defs", "definitions", "$comment", "title", "description", "default"}
    | {"examples", "deprecated", "readOnly", "writeOnly", "discriminator"}
)
TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
# Formats whose expressions in outlines-core match quotes and backslashes.
_NAME = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
_PART = r"[A-Za-z0-9._~!$&'()*+,;=:@/-]*"
FORMATS = {
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
    r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@({_NAME}\.)+[A-Za-z]{{2,}}",
    "uri": rf"[a-z][a-z0-9+.-]*://{_NAME}(\.{_NAME})*(:[0-9]{{1,5}})?(/{_PART})?(\?{_PART})?(#{_PART})?",
}


def prepared(schema: Mapping[str, Any]) -> str:
    """Returns the JSON text of a schema that outlines-core translates as JSON Schema means it.

    Raises:
      ValueError: a part that outlines-core would ignore or mistranslate, or a schema that cannot be
        written as JSON.
    """
    try:
        copy = json.loads(json.dumps(schema))
    except TypeError as error:
        raise ValueError(f"the schema cannot be written as JSON: {error}") from error
    for part in _parts(copy):
        _check(part)
        if (format_ := part.get("format")) in FORMATS:
            part["pattern"] = FORMATS[format_]
            del part["format"]
        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = f"^{string_pattern.as_json(pattern)}$"
    return json.dumps(copy)


def _check(part: Mapping[str, Any]) -> None:
    """Raises ValueError if outlines-core would ignore or mistranslate a part of a schema."""
    if not part.keys() - WITHOUT_EFFECT:
        raise ValueError(
            "the JSON schema has a part without 'type', which is not supported: add 'type', or use "
            "Grammar.json_object or response_format json_object for any JSON object"
        )
    for keyword in NOT_ENFORCED:
        if part.get(keyword, False) is not False:
            _refuse(f"{keyword!r}", "it would not be enforced")
    for keyword in ("anyOf", "oneOf", "allOf", "enum", "type"):
        if part.get(keyword) == []:
            _refuse(f"an empty {keyword!r}", "no text matches it")
    if len(part.get("allOf", ())) > 1:
        _refuse("'allOf' with several schemas", "their texts would be concatenated")
    for keyword in ("pattern", "format"):
        if keyword in part and any(length in part for length in LENGTHS):
            _refuse(f"{keyword!r} with {' or '.join(LENGTHS)}", "only one would be enforced")
    if "pattern" in part and "format" in part:
        _refuse("'pattern' with 'format'", "only one would be enforced")
    _check_siblings(part)
    properties = part.get("properties")
    names = properties if isinstance(properties, Mapping) else {}
    unknown = sorted({*part.get("required", ())} - {*names})
    if unknown:
        _refuse(f"the required property {unknown[0]!r}", "'properties' does not have it")
    for name in names:
        if re.search(r'["\\\x00-\x1f]', name):
            _refuse(
                f"the property {name!r}", "its name has a quote, backslash or control character"
            )


def _check_siblings(part: Mapping[str, Any]) -> None:
    for keyword, kind in (("properties", "object"), ("prefixItems", "array")):
        if keyword in part and kind not in part.get("type", kind):
            _refuse(f"{keyword!r} with type {part['type']!r}", "only one would be enforced")
    alone = next((keyword for keyword in ALONE if keyword in part), None)
    if alone is None:
        return
    ignored = part.keys() - WITHOUT_EFFECT - {alone}
    if alone in ("enum", "const") and "type" in part:
        given = part["type"] if isinstance(part["type"], list) else [part["type"]]
        values = part["enum"] if alone == "enum" else [part["const"]]
        if all(any(_has_type(value, name) for name in given) for value in values):
            ignored -= {"type"}
    if ignored:
        _refuse(f"{alone!r} with {min(ignored)!r}", "only one would be enforced")


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, TYPES.get(name, ()))


def _refuse(what: str, why: str) -> None:
    raise ValueError(
        f"the JSON schema has {what}, which is not supported, because {why}: remove it, and check "
        "the text afterwards"
    )


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields a schema and all schemas inside it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword in ("properties", "$defs", "definitions"):
        parts = schema.get(keyword)
        for part in parts.values() if isinstance(parts, dict) else ():
            yield from _parts(part)
    for keyword in ("items", "additionalProperties"):
        yield from _parts(schema.get(keyword))
    for keyword in ("prefixItems", "anyOf", "oneOf", "allOf"):
        parts = schema.get(keyword)
        for part in parts if isinstance(parts, list) else ():
            yield from _parts(part)
