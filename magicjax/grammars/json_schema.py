r"""JSON schemas as regular expressions of JSON text.

Every text of an expression is valid under its schema; what no expression can describe is refused.
Of the valid texts, the expression has those that are written as follows: properties are in the
order of the schema, others do not occur, at most one space separates tokens of JSON, strings have
no \u escapes, bounded numbers no exponents, and values that the schema does not describe are
nested at most ANY_DEPTH deep.
"""

import json
import re
import urllib.parse
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NoReturn

from magicjax.grammars import json_numbers, string_formats, string_pattern
from magicjax.grammars.json_numbers import Bound, either

MAX_PARTS = 4096  # of a schema whose references are replaced, values of enums included
MAX_ALTERNATIVES = 64  # of `oneOf`, each of which is compared with the others
MAX_CHAIN = 64  # of references, each within what the one before refers to
MAX_LENGTH = 2**20  # of an expression, in characters
MAX_DIGITS = 40  # of a bound
MAX_BOUND = 10**9  # outlines-core takes exponential time in the digits
ANY_DEPTH = 2  # of objects and arrays
BLANK = " ?"  # between tokens of JSON
COMMA, COLON = f"{BLANK},{BLANK}", f"{BLANK}:{BLANK}"
CHARACTER = r'(?:[^"\\\x00-\x1f\x7f-\x9f]|\\["\\/bfnrt])'
STRING = f'"{CHARACTER}*"'
NOT_SUPPORTED = {  # why
    "not": "the texts of a regular expression have no complement",
    "if": "the texts of a regular expression have no complement",
    "$dynamicRef": "only '$ref' is known",
    "$recursiveRef": "only '$ref' is known",
    "multipleOf": "its automaton would be too large",
    "uniqueItems": "a regular expression cannot compare items",
    **dict.fromkeys(
        ("contains", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties"),
        "it depends on several items or parts at once",
    ),
    **dict.fromkeys(
        ("patternProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        "it depends on several properties at once",
    ),
}
VALUES: dict[str, tuple[type, str]] = {  # of keywords that are not checked elsewhere
    "properties": (dict, "an object"),
    "propertyNames": (dict, "an object"),
    "required": (list, "a list of names"),
    "prefixItems": (list, "a list"),
    "pattern": (str, "a string"),
    "format": (str, "a string"),
}
ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
LENGTHS, ITEMS = ("minLength", "maxLength"), ("minItems", "maxItems")
PROPERTIES = ("minProperties", "maxProperties")
OF_TYPE = {
    "object": {"properties", "required", "additionalProperties", "propertyNames", *PROPERTIES},
    "array": {"items", "prefixItems", "additionalItems", *ITEMS},
    "string": {"pattern", "format", *LENGTHS},
    "number": {*LOWER, *UPPER},
    "integer": {*LOWER, *UPPER},
    "boolean": set[str](),
    "null": set[str](),
}
KEYWORDS = {"type", *ALONE, *NOT_SUPPORTED}.union(*OF_TYPE.values())


def expression(schema: Any) -> str:
    """Returns the regular expression of the JSON texts that a schema describes.

    Raises:
      ValueError: a keyword or a combination that cannot be expressed, an invalid schema, or one
        that no text satisfies.
    """
    try:
        whole = json.loads(json.dumps(schema), parse_float=Decimal)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the JSON schema cannot be written as JSON: {error}") from error
    try:
        return _Translation(whole).of(whole)
    except RecursionError:
        raise ValueError("the JSON schema is nested too deeply") from None


class _Translation:
    """Translates the parts of a schema."""

    def __init__(self, whole: Any):
        """Starts without parts; references are looked up in the whole schema."""
        self._whole, self._parts, self._length = whole, 0, 0

    def of(self, part: Any, chain: tuple[str, ...] = ()) -> str:
        """Returns the expression of a part, to which a chain of references led."""
        self._parts += 1
        if self._parts > MAX_PARTS:
            _refuse(f"more than {MAX_PARTS} parts after its references are replaced", "too large")
        found = self._of(part, chain)
        self._length += len(found)
        if len(found) > MAX_LENGTH or self._length > 16 * MAX_LENGTH:
            _refuse(f"an expression of more than {MAX_LENGTH} characters", "too large")
        return found

    def _of(self, part: Any, chain: tuple[str, ...]) -> str:
        if part is True or part == {}:
            return _anything(ANY_DEPTH)
        _check(part)
        if "$id" in part and part is not self._whole:
            _refuse("an '$id' inside of it", "references are looked up in the whole schema")
        if "$ref" in part:
            return self.of(*self._named(part["$ref"], chain))
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in part:
                parts = _list(part, keyword)
                if keyword == "allOf" and len(parts) > 1:
                    _refuse("'allOf' with several schemas", "expressions have no intersection")
                found = [self.of(each, chain) for each in parts]  # refuses recursion
                if keyword == "oneOf":
                    self._check_disjoint(parts, chain)
                return either(found)
        if _has_values(part):
            self._parts += len(_values(part))
            return either([_literal(value) for value in _values(part)])
        types = _types(part)
        if types is None:
            return _anything(ANY_DEPTH)
        of_type = {
            "object": self._object,
            "array": self._array,
            "string": lambda part, _: _string(part),
            "number": lambda part, _: _number(part, json_numbers.numbers),
            "integer": lambda part, _: _number(part, json_numbers.integers),
            "boolean": lambda *_: "(?:true|false)",
            "null": lambda *_: "null",
        }
        return either([of_type[name](part, chain) for name in types])

    def _named(self, reference: Any, chain: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
        """Returns the part that a reference such as #/$defs/name names, and its chain."""
        if reference in chain:
            _refuse(f"the recursive reference {reference!r}", "its texts have no greatest depth")
        if len(chain) == MAX_CHAIN:
            _refuse(f"a chain of more than {MAX_CHAIN} references", "too large")
        if not isinstance(reference, str) or re.match("#(/|$)", reference) is None:
            _refuse(f"the reference {reference!r}", "only those like '#/$defs/name' are known")
        part: Any = self._whole
        for escaped in reference.split("/")[1:]:
            name = urllib.parse.unquote(escaped).replace("~1", "/").replace("~0", "~")
            try:
                part = part[int(name) if isinstance(part, list) else name]
            except (LookupError, TypeError, ValueError):
                _refuse(f"the reference {reference!r}", "the schema has no such part")
        return part, (*chain, reference)

    def _object(self, part: Mapping[str, Any], chain: tuple[str, ...]) -> str:
        properties = dict(part.get("properties", {}))
        required = [*dict.fromkeys(part.get("required", []))]
        for name in required:
            properties.setdefault(name, part.get("additionalProperties", True))
        low, high = _counts(part, PROPERTIES)
        if not properties:
            return self._map(part, low, high, chain)
        if "propertyNames" in part or low > len(required) or high < len(properties):
            keyword = "propertyNames" if "propertyNames" in part else "min- or maxProperties"
            _refuse(f"{keyword!r} with 'properties'", NOT_SUPPORTED["dependencies"])
        occurring = {k: v for k, v in properties.items() if v is not False or k in required}
        entries = [_literal(name) + COLON + self.of(x, chain) for name, x in occurring.items()]
        is_required = [name in required for name in occurring]
        first = is_required.index(True) if True in is_required else len(entries)
        if sum(map(len, entries)) * (len(entries) if first == len(entries) else 1) > MAX_LENGTH:
            _refuse(f"an expression of more than {MAX_LENGTH} characters", "too large")
        following = [
            f"{COMMA}{entry}" if needed else f"(?:{COMMA}{entry})?"
            for entry, needed in zip(entries, is_required, strict=True)
        ]
        if first < len(entries):  # those before it have a comma after them
            before = [f"(?:{entry}{COMMA})?" for entry in entries[:first]]
            inside = "".join([*before, entries[first], *following[first + 1 :]])
        else:
            inside = _optional([e + "".join(following[i + 1 :]) for i, e in enumerate(entries)])
        return rf"\{{{BLANK}{inside}{BLANK}\}}"

    def _map(self, part: Mapping[str, Any], low: int, high: float, chain: tuple[str, ...]) -> str:
        """Returns the expression of objects that may have any properties."""
        value = part.get("additionalProperties", True)
        if low > 1:
            _refuse(f"minProperties={low}", "a regular expression cannot compare names")
        if value is False or high == 0:
            return _repeated(r"\{", "", 0, 0, r"\}") if not low else _nothing(part)
        names = STRING
        if "propertyNames" in part:
            given = part["propertyNames"]
            if not isinstance(given, Mapping) or "string" not in (_types(given) or ["string"]):
                _refuse("propertyNames that are no schema of strings", "all names are strings")
            names = self.of({**given, "type": "string"}, chain)
        value = _anything(ANY_DEPTH - 1) if value is True else self.of(value, chain)
        return _repeated(r"\{", f"{names}{COLON}{value}", low, high, r"\}")

    def _array(self, part: Mapping[str, Any], chain: tuple[str, ...]) -> str:
        first, rest = part.get("prefixItems", []), part.get("items", True)
        if isinstance(rest, list):  # of JSON schema's draft 7
            first, rest = rest, part.get("additionalItems", True)
        low, high = _counts(part, ITEMS)
        if rest is False or (rest is True and first):
            high = min(high, len(first))
        if low > high:
            _nothing(part)
        first = [self.of(each, chain) for each in first[: int(min(high, len(first)))]]
        if high > len(first):
            item = _anything(ANY_DEPTH - 1) if rest is True else self.of(rest, chain)
            if not first:
                return _repeated(r"\[", item, low, high, r"\]")
            least, most = max(0, low - len(first)), high - len(first)
            inside = _count(f"(?:{COMMA}{item})", least, most)
        else:
            inside = ""
        for i in reversed(range(len(first))):
            inside = ("" if i == 0 else COMMA) + first[i] + inside
            inside = inside if i < low else f"(?:{inside})?"
        return rf"\[{BLANK}{inside}{BLANK}\]"

    def _check_disjoint(self, parts: list[Any], chain: tuple[str, ...]) -> None:
        """Raises ValueError if a value may satisfy several parts of a `oneOf`."""
        if len(parts) > MAX_ALTERNATIVES:
            _refuse(f"'oneOf' with more than {MAX_ALTERNATIVES} schemas", "use anyOf")
        for i, first in enumerate(parts):
            for second in parts[:i]:
                if not self._are_disjoint(first, second, chain):
                    _refuse(
                        "'oneOf' with schemas that a value may satisfy together",
                        "expressions have no complement (use anyOf)",
                    )

    def _are_disjoint(self, first: Any, second: Any, chain: tuple[str, ...]) -> bool:
        """Returns whether it is certain that no value satisfies two parts."""
        (first, chain), (second, _) = self._resolved(first, chain), self._resolved(second, chain)
        if not isinstance(first, Mapping) or not isinstance(second, Mapping):
            return False
        for one, other in ((first, second), (second, first)):
            for keyword in ("anyOf", "oneOf", "allOf"):
                if keyword in one:
                    parts = _list(one, keyword)
                    return all(self._are_disjoint(each, other, chain) for each in parts)
        if _has_values(first) and _has_values(second):
            texts = [
                {json.dumps(_plain(value), sort_keys=True) for value in _values(part)}
                for part in (first, second)
            ]
            return not texts[0] & texts[1]
        shared = _kinds(first) & _kinds(second)
        if not shared:
            return True
        if shared != {"object"} or _has_values(first) or _has_values(second):
            return False
        both = {*first.get("required", ())} & {*second.get("required", ())}
        properties = first.get("properties", {}), second.get("properties", {})
        return any(
            self._are_disjoint(properties[0].get(name), properties[1].get(name), chain)
            for name in sorted(both)
        )

    def _resolved(self, part: Any, chain: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
        while isinstance(part, Mapping) and "$ref" in part:
            part, chain = self._named(part["$ref"], chain)
        return part, chain


def _check(part: Any) -> None:
    """Raises ValueError if a part has a keyword that is not supported, or has no effect here."""
    if part is False:
        _refuse("a part that is false", "no text satisfies it")
    if not isinstance(part, Mapping):
        raise ValueError(f"the JSON schema has {part!r} where a schema must be")
    for keyword, (kind, described) in VALUES.items():
        if not isinstance(part.get(keyword, kind()), kind):
            _wrong(keyword, part[keyword], described)
    if not all(isinstance(name, str) for name in part.get("required", ())):
        _wrong("required", part["required"], "a list of names")
    for keyword, why in NOT_SUPPORTED.items():
        if keyword in part and not (keyword == "uniqueItems" and part[keyword] is False):
            _refuse(f"{keyword!r}", why)
    keywords = KEYWORDS & {*part}
    alone = next((keyword for keyword in ALONE if keyword in part), None)
    others = keywords - {alone, *({"type"} if alone in ("enum", "const") else ())}
    if alone and others - {*NOT_SUPPORTED}:
        _refuse(f"{alone!r} with {min(others)!r}", "expressions have no intersection")


def _types(part: Mapping[str, Any]) -> list[str] | None:
    """Returns the types of a part's values, or those of its keywords; None: any."""
    if "type" not in part:
        implied = [name for name, keywords in OF_TYPE.items() if keywords & {*part}]
        return [name for name in implied if name != "integer"] or None
    types = part["type"] if isinstance(part["type"], list) else [part["type"]]
    for name in types:
        if name not in OF_TYPE:
            raise ValueError(f"the JSON schema has type {name!r}: use one of {', '.join(OF_TYPE)}")
    if not types:
        _refuse("an empty 'type'", "no text satisfies it")
    return [name for name in dict.fromkeys(types) if name != "integer" or "number" not in types]


def _kinds(part: Mapping[str, Any]) -> set[str]:
    """Returns the types of a part's values; a whole number has type integer only."""
    if _has_values(part):
        return {_type_of(value) for value in _values(part)}
    kinds = {*((_types(part) if "type" in part else None) or OF_TYPE)}
    return kinds | {"integer"} if "number" in kinds else kinds


def _has_values(part: Mapping[str, Any]) -> bool:
    return "enum" in part or "const" in part


def _type_of(value: Any) -> str:
    """Returns the type of a JSON value."""
    if isinstance(value, bool):
        return "boolean"
    by_type = {str: "string", int: "integer", list: "array", dict: "object", type(None): "null"}
    if isinstance(value, Decimal):
        return "integer" if value == int(value) else "number"
    return by_type[type(value)]


def _values(part: Mapping[str, Any]) -> list[Any]:
    """Returns the values of `enum` or `const` that have the part's type."""
    values = _list(part, "enum") if "enum" in part else [part["const"]]
    if "type" in part:
        kinds = _kinds({"type": part["type"]})
        values = [value for value in values if _type_of(value) in kinds]
    if not values:
        _nothing(part)
    return values


def _string(part: Mapping[str, Any]) -> str:
    low, high = _counts(part, LENGTHS)
    given = [keyword for keyword in ("pattern", "format") if keyword in part]
    if len(given) + any(keyword in part for keyword in LENGTHS) > 1:
        others = [keyword for keyword in ("format", *LENGTHS) if keyword in part]
        _refuse(f"{given[0]!r} with {others[-1]!r}", "expressions have no intersection")
    if "pattern" in part:
        return f'"{string_pattern.as_json(part["pattern"])}"'
    if "format" in part:
        if part["format"] not in string_formats.FORMATS:
            known = ", ".join(string_formats.FORMATS)
            _refuse(f"the format {part['format']!r}", f"only {known} are known")
        return f'"{string_formats.FORMATS[part["format"]]}"'
    if low > high:
        _nothing(part)
    return f'"{_count(CHARACTER, low, high)}"'


def _number(part: Mapping[str, Any], between: Any) -> str:
    """Returns the expression of numbers with the bounds of a part."""
    low = max(_bounds(part, LOWER), default=None)  # at the same number, a strict one is larger
    high = min(_bounds(part, UPPER), key=lambda x: (x.value, not x.strict), default=None)
    bounds = [x.value for x in (low, high) if x is not None]
    is_slow = len(bounds) == 1 or between is json_numbers.numbers
    if is_slow and any(abs(value) >= MAX_BOUND for value in bounds):
        _refuse(
            f"a bound of {MAX_BOUND} or more",
            "its expression takes too long, except for integers with both bounds",
        )
    return between(low, high) or _nothing(part)


def _bounds(part: Mapping[str, Any], keywords: tuple[str, str]) -> list[Bound]:
    bounds = []
    for keyword in keywords:
        if keyword in part:
            value = part[keyword]
            if isinstance(value, bool) or not isinstance(value, int | Decimal):
                _wrong(keyword, value, "a number")
            number = Decimal(value)
            if len(f"{number:f}") > MAX_DIGITS:
                _refuse(f"{keyword} with more than {MAX_DIGITS} digits", "too large")
            bounds.append(Bound(number, keyword.startswith("exclusive")))
    return bounds


def _counts(part: Mapping[str, Any], keywords: tuple[str, str]) -> tuple[int, float]:
    """Returns the least and the most of a number of characters, items or properties."""
    counts = [part.get(keywords[0], 0), part.get(keywords[1], float("inf"))]
    for keyword, count in zip(keywords, counts, strict=True):
        if count != float("inf") and (not isinstance(count, int) or count < 0):
            _wrong(keyword, count, "an integer >= 0")
    return counts[0], counts[1]


def _list(part: Mapping[str, Any], keyword: str) -> list[Any]:
    if not isinstance(part[keyword], list) or not part[keyword]:
        _refuse(f"{keyword}={part[keyword]!r}", "it must be a list with at least one element")
    return part[keyword]


def _literal(value: Any) -> str:
    """Returns the expression of one JSON value."""
    if isinstance(value, list):
        inside = COMMA.join(map(_literal, value))
        return rf"\[{BLANK}{inside}{BLANK}\]"
    if isinstance(value, dict):
        inside = COMMA.join(_literal(name) + COLON + _literal(x) for name, x in value.items())
        return rf"\{{{BLANK}{inside}{BLANK}\}}"
    return _escaped(json.dumps(_plain(value), ensure_ascii=False))


def _plain(value: Any) -> Any:
    """Returns a JSON value whose numbers are int or float, and int if they are whole."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, Decimal):
        return int(value) if value == int(value) else float(value)
    return value


def _escaped(text: str) -> str:
    """Returns the expression of a text."""
    return re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", text)


def _anything(depth: int) -> str:
    """Returns the expression of any JSON value whose objects and arrays are nested so deep."""
    parts = [STRING, json_numbers.NUMBER, "true", "false", "null"]
    if depth:
        value = _anything(depth - 1)
        parts.append(_repeated(r"\{", f"{STRING}{COLON}{value}", 0, float("inf"), r"\}"))
        parts.append(_repeated(r"\[", value, 0, float("inf"), r"\]"))
    return either(parts)


def _repeated(begin: str, item: str, low: int, high: float, end: str) -> str:
    """Returns the expression of brackets around `low` to `high` items with commas between."""
    inside = "" if high == 0 else item + _count(f"(?:{COMMA}{item})", max(0, low - 1), high - 1)
    return f"{begin}{BLANK}{inside if low or not inside else f'(?:{inside})?'}{BLANK}{end}"


def _count(item: str, low: int, high: float) -> str:
    """Returns the expression of `low` to `high` repetitions."""
    if high == float("inf"):  # outlines-core takes exponential time for {n,}
        return (f"{item}{{{low}}}" if low else "") + f"{item}*"
    return f"{item}{{{low},{int(high)}}}"


def _optional(parts: list[str]) -> str:
    return f"(?:{either(parts)})?" if parts else ""


def _nothing(part: Any) -> NoReturn:
    text = json.dumps(part, default=float)
    _refuse(f"the part {text[:80]}{'…' * (len(text) > 80)}", "no text satisfies it")


def _wrong(keyword: str, value: Any, described: str) -> NoReturn:
    raise ValueError(f"the JSON schema has {keyword}={value!r}: it must be {described}")


def _refuse(what: str, why: str) -> NoReturn:
    raise ValueError(f"the JSON schema has {what}, which is not supported: {why}")
