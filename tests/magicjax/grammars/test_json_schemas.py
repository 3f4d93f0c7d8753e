"""JSON schemas: all texts are valid, all valid texts of a form occur, the rest is refused."""

import datetime
import json
from decimal import Decimal

import hypothesis
import hypothesis.strategies as st
import pytest

from magicjax.grammars import json_numbers, json_schema, string_pattern, trial
from magicjax.grammars.grammar import Grammar
from magicjax.grammars.json_numbers import Bound
from tests.magicjax.grammars.schemas import (
    FORMATS,
    accepts,
    is_valid,
    language,
    schemas,
    small_language,
    small_schemas,
    texts,
)

PATTERNS = (
    *("^.*$", "a.b", "^a|b$", "x|y", "[^a]", r"\d+", r"\w{2}", r"\s", r"\S\D", r"^\$?[0-9]\$"),
    *(r'^"[^"]{2}"+\\\/\-\<$', r'^["\\a]+$', r"^[\w.-]+@[\w-]+$", "(a|b)(?:c|d){2,3}?", r"\p{Lu}x"),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_match_patterns(pattern):
    schema = {"type": "string", "pattern": pattern}
    inside = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    for text in texts(Grammar.json_schema(inside)):
        value = json.loads(text)["a"]
        assert r"\p" in pattern or is_valid(json.dumps(value), schema), text


@pytest.mark.parametrize("name", FORMATS)
def test_texts_have_formats(name):
    schema = {"type": "string", "format": name}
    parsers = {"time": datetime.time, "date-time": datetime.datetime}
    for text in texts(Grammar.json_schema(schema), length=120):
        assert is_valid(text, schema), text
        if name in parsers:
            assert parsers[name].fromisoformat(json.loads(text))


def check_texts(schema: dict) -> None:
    try:
        grammar = Grammar.json_schema(schema)
    except ValueError as error:
        hypothesis.assume("no text satisfies it" not in str(error))
        hypothesis.assume("states, and at most" not in str(error))
        hypothesis.assume("parts after its references" not in str(error))
        raise
    for seed, length in enumerate((0, 30, 200)):
        for text in texts(grammar, 5, length, seed):
            assert is_valid(text, schema), text


@hypothesis.given(schemas())
def test_texts_are_valid(schema):
    check_texts(schema)


@pytest.mark.slow
@hypothesis.settings(max_examples=2000)
@hypothesis.given(schemas())
def test_texts_of_many_schemas_are_valid(schema):
    check_texts(schema)


def check_language(schema: dict) -> None:
    expected = small_language(schema)
    try:
        found = language(Grammar.json_schema(schema))
    except ValueError as error:
        assert "no text satisfies it" in str(error)
        found = set()
    assert found == expected


@hypothesis.given(small_schemas())
def test_a_small_schema_has_the_texts_of_all_valid_values(schema):
    check_language(schema)


@pytest.mark.slow
@hypothesis.settings(max_examples=500)
@hypothesis.given(small_schemas())
def test_many_small_schemas_have_the_texts_of_all_valid_values(schema):
    check_language(schema)


MISTAKES = {
    "patterns of strings instead of JSON": (string_pattern, "as_json", lambda pattern: pattern),
    "bounds without effect": (json_numbers, "integers", lambda low, high: json_numbers.INTEGER),
    "names that are expressions": (json_schema, "_escaped", lambda text: text),
    "an optional comma": (json_schema, "COMMA", ",?"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_detected(mistake, monkeypatch):
    monkeypatch.setattr(*MISTAKES[mistake])
    schema = {
        "type": "object",
        "properties": {
            "a.b": {"type": "string", "pattern": "x.y"},
            "c": {"type": "integer", "minimum": 5, "maximum": 10},
        },
        "required": ["a.b", "c"],
    }
    assert not all(is_valid(text, schema) for text in texts(Grammar.json_schema(schema), 200))


def is_between(value: Decimal, low: Bound | None, high: Bound | None) -> bool:
    above = low is None or value > low.value or (value == low.value and not low.strict)
    return above and (
        high is None or value < high.value or (value == high.value and not high.strict)
    )


def has(pattern: str | None, text: str) -> bool:
    return pattern is not None and accepts(Grammar.regex(pattern), text)


bounds = st.one_of(
    st.none(),
    st.builds(
        lambda x, places, strict: Bound(Decimal(x).scaleb(-places), strict),
        st.integers(-1000, 1000),
        st.integers(0, 3),
        st.booleans(),
    ),
)


@hypothesis.given(bounds, bounds, st.randoms(use_true_random=False))
def test_numbers_are_between_bounds(low, high, rng):
    integers, numbers = json_numbers.integers(low, high), json_numbers.numbers(low, high)
    near = [round(each.value) for each in (low, high) if each is not None] or [0]
    for value in {x for each in near for x in range(each - 12, each + 13)} | {*range(-30, 30)}:
        assert has(integers, str(value)) == is_between(Decimal(value), low, high)
    for _ in range(100):
        places = rng.randint(0, 4)
        center = rng.choice(
            [each for each in (low, high) if each is not None] or [Bound(Decimal())]
        )
        value = (center.value + Decimal(rng.randint(-30, 30)).scaleb(-places)).normalize()
        assert has(numbers, f"{value:f}" if value else "0") == is_between(value, low, high)
    if numbers is None:
        return
    for text in texts(Grammar.regex(numbers), 20, 12):  # also as a parser rounds them
        for exact in (Decimal(text), Decimal(repr(float(text)))):
            assert is_between(exact, low, high), text


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
REFUSED = {
    "an empty enum": ({"enum": []}, r"enum=\[\]"),
    "no alternatives": ({"anyOf": []}, r"anyOf=\[\]"),
    "no types": ({"type": []}, "an empty 'type'"),
    "a type that does not exist": ({"type": "int"}, "type 'int': use one of object, array, "),
    "no value of a type": ({"enum": [1.5, "a"], "type": "integer"}, "no text satisfies it"),
    "a constant and a length": ({"const": "a", "maxLength": 1}, "'const' with 'maxLength'"),
    "an open class": ({"type": "string", "pattern": "[a"}, "a class"),
    "a class in a class": ({"type": "string", "pattern": "[[a]b]"}, r"write \\\[ in a class"),
    "a backslash at the end": ({"type": "string", "pattern": "a\\"}, "write the character itself"),
    "a syntax error": ({"type": "string", "pattern": "a)"}, "JSON schema is not.*syntax error"),
    "counts that exclude each other": (
        {"type": "array", "items": OBJECT, "minItems": 3, "maxItems": 2},
        "no text satisfies it",
    ),
    "bounds that exclude each other": (
        {"type": "integer", "exclusiveMinimum": 1, "maximum": 1.5},
        "no text satisfies it",
    ),
    "a bound that is null": ({"type": "integer", "minimum": None}, "minimum=None: it must be a"),
    "a bound of draft 4": (
        {"type": "integer", "minimum": 1, "exclusiveMinimum": True},
        "exclusiveMinimum=True: it must be a number",
    ),
    "a negative length": ({"type": "string", "minLength": -1}, "it must be an integer >= 0"),
    "a property that is false": (
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        "no text satisfies it",
    ),
    "a multiple": ({"type": "integer", "multipleOf": 3}, "'multipleOf'"),
    "different items": ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    "a complement": ({"not": {"type": "null"}}, "'not'"),
    "two properties of any name": ({"type": "object", "minProperties": 2}, "minProperties=2"),
    "a count of properties": (OBJECT | {"minProperties": 1}, "'min- or maxProperties' with 'pro"),
    "several schemas": ({"allOf": [OBJECT, OBJECT]}, "'allOf' with several schemas"),
    "schemas that overlap": (
        {"oneOf": [{"type": "number"}, {"type": ["integer", "null"]}]},
        "'oneOf' with schemas that a value may satisfy together",
    ),
    "objects that overlap": ({"oneOf": [OBJECT, {"type": "object"}]}, "'oneOf' with schemas that"),
    "an unknown format": ({"type": "string", "format": "color"}, "the format 'color'"),
    "a required property that cannot be": (
        {"type": "object", "required": ["b"], "additionalProperties": False},
        "no text satisfies it",
    ),
    "schemas without types that overlap": (
        {"oneOf": [{"maxLength": 3}, {"type": "integer"}]},
        "'oneOf' with schemas that",
    ),
    "names that are no strings": (
        {"type": "object", "propertyNames": {"type": "integer"}},
        "propertyNames that are no schema of strings",
    ),
    "no other properties": ({"type": "object", "unevaluatedProperties": False}, "'unevaluatedPro"),
    "a dynamic reference": ({"$dynamicRef": "#a"}, "'[$]dynamicRef'"),
    "another base": (
        {"type": "array", "items": {"$id": "x", "type": "null"}},
        "an '[$]id' inside of it",
    ),
    "many schemas": ({"oneOf": [{"const": i} for i in range(65)]}, "more than 64 schemas"),
    "many values": (
        {"type": "array", "prefixItems": [{"enum": [*range(5000)]}, {"type": "null"}]},
        "more than 4096 parts",
    ),
    "a large bound": (
        {"type": "number", "exclusiveMinimum": 1e17},
        "a bound of 1000000000 or more",
    ),
    "a long number": ({"type": "integer", "minimum": 10**3000}, "minimum with more than 40 digits"),
    "not a schema": ({"type": "array", "items": 3}, "has 3 where a schema must be"),
    "a pattern without text": ({"items": {"pattern": None}}, "pattern=None: it must be a string"),
    "items by name": ({"prefixItems": {}}, "prefixItems={}: it must be a list"),
    "a list of properties": ({"properties": []}, "properties=.*: it must be an object"),
    "names that are none": ({"required": [{}]}, "it must be a list of names"),
    "alternatives and a type": ({"anyOf": [OBJECT], "type": "object"}, "'anyOf' with 'type'"),
    "a reference and a type": (
        {"$defs": {"a": OBJECT}, "$ref": "#/$defs/a", "type": "null"},
        "'[$]ref' with 'type'",
    ),
    "recursion": (
        {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        "the recursive reference '#'",
    ),
    "mutual recursion": (
        {
            "$defs": {
                "a": {"type": "array", "items": {"$ref": "#/$defs/b"}},
                "b": {"type": "array", "items": {"$ref": "#/$defs/a"}},
            },
            "$ref": "#/$defs/a",
        },
        "the recursive reference '#/[$]defs/a'",
    ),
    "another document": ({"$ref": "https://example.com/a"}, "only those like '#/[$]defs/name'"),
    "nothing": ({"$defs": {"a": OBJECT}, "$ref": "#/$defs/b"}, "the schema has no such part"),
    "nothing in a list": ({"anyOf": [{"$ref": "#/anyOf/7"}]}, "the schema has no such part"),
    "references that double": (
        {
            "$defs": {"0": {"type": "null"}}
            | {
                str(i): {"type": "array", "prefixItems": 2 * [{"$ref": f"#/$defs/{i - 1}"}]}
                for i in range(1, 20)
            },
            "$ref": "#/$defs/19",
        },
        "more than 4096 parts after its references are replaced",
    ),
    "a long chain": (
        {
            "$defs": {"0": {"type": "null"}}
            | {str(i): {"$ref": f"#/$defs/{i - 1}"} for i in range(1, 99)},
            "$ref": "#/$defs/98",
        },
        "a chain of more than 64 references",
    ),
    "a pattern and a format": (
        {"type": "string", "pattern": "a", "format": "date"},
        "'pattern' with 'format'",
    ),
    "look-around": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "an anchor inside": ({"type": "string", "pattern": "^a$|^b$"}, "at the begin or at the end"),
    "an escape": ({"type": "string", "pattern": r"\n"}, "write the character itself"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_translated_is_refused(what):
    schema, message = REFUSED[what]
    with pytest.raises(ValueError, match=message) as raised:
        Grammar.json_schema(schema)
    assert "\n" not in str(raised.value)


def nested(depth: int) -> dict:
    """Returns a schema of objects within objects, as data classes within each other have it."""
    parts: dict = {
        "0": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    }
    for i in range(1, depth):
        field = {"$ref": f"#/$defs/{i - 1}"}
        parts[str(i)] = {"type": "object", "properties": {"a": field}, "required": ["a"]}
    return {"$defs": parts, "$ref": f"#/$defs/{depth - 1}"}


@pytest.mark.parametrize("depth", [1, 4, 5, 10])
def test_references_lead_to_whole_parts(depth):
    schema = nested(depth)
    for text in texts(Grammar.json_schema(schema), length=30 * depth):
        assert is_valid(text, schema), text


DISJOINT = {
    "by type": ({"type": "number"}, {"type": ["string", "null"]}),
    "by value": ({"const": 1}, {"enum": [True, "1"]}),
    "by value and type": ({"enum": [1, "a"]}, {"type": "boolean"}),
    "by a property": tuple(
        {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
        for kind in "ab"
    ),
    "by alternatives": ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}]}, {"type": "number"}),
}


@pytest.mark.parametrize("how", DISJOINT)
def test_one_of_several_disjoint_schemas(how):
    schema = {"$defs": {"x": {"type": "string"}}, "oneOf": [*DISJOINT[how]]}
    for text in texts(Grammar.json_schema(schema)):
        assert is_valid(text, schema), text


OTHERS = {  # a schema, with valid texts
    "a required property with a schema for others": (
        {"type": "object", "required": ["b"], "additionalProperties": {"type": "null"}},
        ['{"b":null}'],
    ),
    "names among other values": (
        {"type": "object", "propertyNames": {"enum": [1, "x"]}},
        ["{}", '{"x":2}'],
    ),
    "a property that is required twice": (
        OBJECT | {"required": ["a", "a"], "minProperties": 1},
        ['{"a":1}'],
    ),
    "a required property without a schema": (OBJECT | {"required": ["b"]}, ['{"a":1,"b":[{}]}']),
    "an optional property that is false": (
        {"type": "object", "properties": {"a": False, "b": {"type": "null"}}},
        ["{}", '{"b":null}'],
    ),
    "names": ({"type": "object", "propertyNames": {"enum": ["x"]}}, ["{}", '{ "x" : 1.5e3 }']),
    "a list of schemas": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [OBJECT]},
        ["[]", '[{"a":-5}]'],
    ),
    "a schema for more items": (
        {"type": "array", "prefixItems": [OBJECT], "items": {"type": "null"}, "minItems": 2},
        ["[{},null]", "[{},null,null]"],
    ),
    "no type": ({"maxLength": 1}, ['"a"', '"\\n"']),
    "no keyword": ({"title": "anything"}, ["1", "null", '{"a":[1,"b"]}', "[[],{}]"]),
    "an enum of objects": ({"enum": [{'"': [1.0, "+"]}]}, [r'{"\"": [1, "+"]}']),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_schemas(what):
    schema, valid = OTHERS[what]
    grammar = Grammar.json_schema(schema)
    assert all(is_valid(text, schema) for text in texts(grammar))
    assert all(is_valid(text, schema) and accepts(grammar, text) for text in valid)


def test_references_name_any_part():
    schema = {
        "type": "object",
        "properties": {
            "$ref": {"enum": [{"ref": "#/x"}, "$ref"]},
            "a/~b c": {"type": "boolean"},
            "list": {"type": "array", "prefixItems": [{"$ref": "#/properties/a~1~0b%20c"}]},
            "item": {"$ref": "#/properties/list/prefixItems/0", "title": "an item"},
        },
        "required": ["$ref", "item", "list"],
    }
    for text in texts(Grammar.json_schema(schema), length=200):
        assert is_valid(text, schema), text


def test_a_grammar_that_takes_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(trial, "SECONDS", 1)
    trial.check("[ab]{20}")
    trial.check("(")  # compiling it says what is wrong
    with pytest.raises(ValueError, match="more than 1 s or 1024 MiB"):
        trial.check("[ab]*a[ab]{30}")
    schema = {"type": "string", "minLength": 30_000, "maxLength": 60_000}
    with pytest.raises(ValueError, match="fewer or smaller"):
        trial.check(json_schema.expression(schema))
    monkeypatch.setattr(trial.subprocess, "run", None)  # the result is kept
    with pytest.raises(ValueError, match="more than 1 s"):
        trial.check("[ab]*a[ab]{30}")
