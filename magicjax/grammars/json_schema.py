"""JSON schemas for outlines-core, which translates them to regular expressions.

outlines-core ignores some keywords, inserts patterns into the regular expression as they are, does
not escape names, and omits what a chain of more than three references leads to. What it would
ignore or mistranslate is an error here, or is rewritten.
"""

import copy
import itertools
import json
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

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
MAX_PARTS = 4096  # of a schema whose references are replaced
MAX_CHAIN = 64  # of references, each within what the one before refers to
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
        whole = json.loads(json.dumps(schema))
    except TypeError as error:
        raise ValueError(f"the schema cannot be written as JSON: {error}") from error
    replaced = _without_references(copy.deepcopy(whole), whole, itertools.count(1))
    for part in _parts(replaced):
        _check(part)
        if (format_ := part.get("format")) in FORMATS:
            part["pattern"] = FORMATS[format_]
            del part["format"]
        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = f"^{string_pattern.as_json(pattern)}$"
    return json.dumps(replaced)


def _without_references(
    part: Any, whole: dict[str, Any], parts: Iterator[int], chain: tuple[str, ...] = ()
) -> Any:
    """Returns a part of a schema, changed in place, with each reference replaced by what it names.

    Args:
      part: of the schema; anything but a mapping has no references.
      whole: the schema, in which references are looked up.
      parts: counts them.
      chain: the references that led to the part.
    """
    if not isinstance(part, dict):
        return part
    if next(parts) > MAX_PARTS:
        _refuse(f"more than {MAX_PARTS} parts after its references are replaced", "it is too large")
    if "$ref" in part:
        _check_siblings(part)
        reference = part["$ref"]
        if reference in chain:
            _refuse(f"the recursive reference {reference!r}", "its texts have no greatest depth")
        if len(chain) == MAX_CHAIN:
            _refuse(f"a chain of more than {MAX_CHAIN} references", "it is too large")
        named = copy.deepcopy(_named(reference, whole))
        return _without_references(named, whole, parts, (*chain, reference))
    for container, key in [*_inside(part)]:
        container[key] = _without_references(container[key], whole, parts, chain)
    for keyword in ("$defs", "definitions"):
        part.pop(keyword, None)
    return part


def _named(reference: Any, whole: dict[str, Any]) -> Any:
    """Returns the part of a schema that a reference such as #/$defs/name names."""
    if not isinstance(reference, str) or re.match("#(/|$)", reference) is None:
        _refuse(f"the reference {reference!r}", "only those like '#/$defs/name' are known")
    part: Any = whole
    for escaped in reference.split("/")[1:]:
        name = urllib.parse.unquote(escaped).replace("~1", "/").replace("~0", "~")
        try:
            part = part[int(name) if isinstance(part, list) else name]
        except (LookupError, TypeError, ValueError):
            _refuse(f"the reference {reference!r}", "the schema has no such part")
    return part


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
    for name in _names([part.get("enum"), part.get("const")]):
        if re.fullmatch(r"[\w -]*", name) is None:
            _refuse(f"the name {name!r} in 'enum' or 'const'", "it would be read as an expression")
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


def _names(value: Any) -> Iterator[str]:
    """Yields the names of all objects inside a JSON value."""
    if isinstance(value, dict):
        yield from value
        value = [*value.values()]
    for inside in value if isinstance(value, list) else ():
        yield from _names(inside)


def _refuse(what: str, why: str) -> NoReturn:
    raise ValueError(
        f"the JSON schema has {what}, which is not supported, because {why}: remove it, and check "
        "the text afterwards"
    )


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields a schema and all schemas inside it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for container, key in _inside(schema):
        yield from _parts(container[key])


def _inside(part: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yields (a container, the key in it) of each schema directly inside a schema."""
    if isinstance(properties := part.get("properties"), dict):
        yield from ((properties, name) for name in properties)
    yield from ((part, keyword) for keyword in ("items", "additionalProperties") if keyword in part)
    for keyword in ("prefixItems", "anyOf", "oneOf", "allOf"):
        parts = part.get(keyword)
        yield from ((parts, i) for i in range(len(parts) if isinstance(parts, list) else 0))
