"""JSON schemas: all texts are valid, small ones have all valid values, bombs are bounded."""

import datetime
import json
import resource
import time

import hypothesis
import pytest

from magicjax.grammars.grammar import Grammar
from tests.magicjax.grammars.schemas import (
    FORMATS,
    is_valid,
    schemas,
    small_language,
    small_schemas,
)
from tests.magicjax.grammars.walks import accepts, allowed, language, matcher_of, texts

PATTERNS = (
    *("^.*$", "^a.b$", "^a|b$", "x|y", "[^a]", r"\d+", r"\w{2}", r"\s", r"\S\D", r"^\$?[0-9]\$"),
    *(r'^".{2}"+\\\/\-$', r'^["\\a]+$', r"^[\w.-]+@[\w-]+$", "^(a|b)(?:c|d){2,3}$"),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_match_patterns(pattern):
    schema = {"type": "string", "pattern": pattern}
    inside = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    inside["additionalProperties"] = False
    found = texts(Grammar.json_schema(inside))
    assert found
    for text in found:
        assert is_valid(text, inside), text


@pytest.mark.parametrize("name", FORMATS)
def test_texts_have_formats(name):
    schema = {"type": "string", "format": name}
    parsers = {"time": datetime.time, "date-time": datetime.datetime}
    for text in texts(Grammar.json_schema(schema), length=120):
        if "-02-29" in text or ":60" in text:
            continue  # llguidance allows leap days and seconds at any time
        assert is_valid(text, schema), text
        if name in parsers:
            assert parsers[name].fromisoformat(json.loads(text).upper())


def check_texts(schema: dict) -> None:
    try:
        grammar = Grammar.json_schema(schema)
    except ValueError as error:
        hypothesis.assume("nsatisfiable" not in str(error))
        raise
    leap = {"format": "date"}, {"format": "date-time"}
    hypothesis.assume(not any(json.dumps(each)[1:-1] in json.dumps(schema) for each in leap))
    for seed, length in enumerate((0, 30)):
        for text in texts(grammar, 3, length, seed):
            assert is_valid(text, schema), text


@hypothesis.given(schemas())
@pytest.mark.slow
def test_texts_are_valid(schema):
    check_texts(schema)


@pytest.mark.slow
@hypothesis.settings(max_examples=2000)
@hypothesis.given(schemas())
def test_texts_of_many_schemas_are_valid(schema):
    check_texts(schema)


def check_language(schema: dict) -> None:
    expected = small_language(schema)
    closed = schema | ({"additionalProperties": False} if schema.get("type") == "object" else {})
    try:
        found = language(Grammar.json_schema(closed))
        found = {text for text in found if "-0" not in text}  # 0 has a second spelling
    except ValueError as error:
        assert "nsatisfiable" in str(error)
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


TREE = {"type": "object", "properties": {"v": {"type": "integer"}, "below": {"type": "array",
        "items": {"$ref": "#"}}}, "required": ["v"], "additionalProperties": False}  # fmt: skip
OTHERS = {  # a schema, with valid and invalid texts
    "a tree": (TREE, ['{"v":1,"below":[{"v":2,"below":[{"v":3}]}]}'], ['{"v":1,"below":[{}]}']),
    "a list": (
        {"$defs": {"n": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"next": {
            "$ref": "#/$defs/n"}}, "required": ["next"], "additionalProperties": False}]}},
         "$ref": "#/$defs/n"},
        ["null", '{"next":{"next":null}}'],
        ['{"next":{}}'],
    ),
    "two at once": (
        {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                   {"properties": {"b": {"type": "null"}}, "required": ["b"]}]},
        ['{"a":1,"b":null}'],
        ['{"a":1}', '{"b":null}'],
    ),
    "beside a reference": (
        {"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "maxLength": 2},
        ['"ab"'],
        ['"abc"', "1"],
    ),
    "names by pattern": (
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}},
         "additionalProperties": False},
        ["{}", '{"x1":1,"xy":2}'],
        ['{"x":"a"}', '{"y":1}'],
    ),
    "multiples": ({"type": "integer", "multipleOf": 3}, ["9", "-3", "0"], ["10"]),
    "disjoint schemas": ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ['"a"', "null"], ["1"]),
    "any value": ({}, ["1", "null", '{"a":[1,"b"]}', "[[],{}]"], ["a"]),
    "true": (True, ["1"], [""]),
    "an unanchored pattern": ({"type": "string", "pattern": r"\S"}, ['"a b"', '"ab"'], ['" "']),
    "many characters": ({"type": "string", "maxLength": 5000}, ['"' + 300 * "é" + '"'], []),
    "one space": ({"type": "array", "items": {"type": "null"}}, ["[ null , null ]"], ["[  null]"]),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_other_schemas(what):
    schema, valid, invalid = OTHERS[what]
    grammar = Grammar.json_schema(schema)
    assert all(is_valid(text, schema) for text in texts(grammar))
    assert all(is_valid(text, schema) and accepts(grammar, text) for text in valid)
    assert not any(accepts(grammar, text) for text in invalid)


REFUSED = {
    "a complement": {"not": {"type": "null"}},
    "different items": {"type": "array", "uniqueItems": True},
    "schemas that overlap": {"oneOf": [{"type": "number"}, {"type": ["integer", "null"]}]},
    "an unknown format": {"type": "string", "format": "color"},
    "another document": {"$ref": "https://example.com/a"},
    "nothing": {"$ref": "#/$defs/b"},
    "no value": {"type": "integer", "minimum": 3, "maximum": 2},
    "a type that does not exist": {"type": "int"},
    "look-around": {"type": "string", "pattern": "(?=a)b"},
    "names by schema": {"type": "object", "propertyNames": {"maxLength": 3}},
    "parts of an array": {"type": "array", "contains": {"type": "null"}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_enforced_is_refused(what):
    with pytest.raises(ValueError, match="the JSON schema is not supported: ") as raised:
        Grammar.json_schema(REFUSED[what])
    assert "\n" not in str(raised.value)


def nested(count: int, inner: dict) -> dict:
    for _ in range(count):
        inner = {"type": "array", "items": inner, "minItems": 0, "maxItems": 1000}
    return inner


BOMBS = {
    "a late choice": lambda: Grammar.regex("(a|b)*a(a|b){25}"),
    "nested repetitions": lambda: Grammar.regex("((a{0,1000}){0,1000}){0,1000}"),
    "a long repetition": lambda: Grammar.regex("([ab]{0,100000}c){0,1000}"),
    "classes": lambda: Grammar.regex(r"(\w{1,500}\s){1,500}"),
    "many characters": lambda: Grammar.json_schema(
        {"type": "string", "minLength": 30_000, "maxLength": 60_000}
    ),
    "nested lists": lambda: Grammar.json_schema(nested(6, {"type": "string", "maxLength": 1000})),
    "references that double": lambda: Grammar.json_schema(
        {"$defs": {"0": {"type": "null"}} | {
            str(i): {"type": "array", "prefixItems": 2 * [{"$ref": f"#/$defs/{i - 1}"}]}
            for i in range(1, 40)}, "$ref": "#/$defs/39"}),
    "many values": lambda: Grammar.json_schema({"enum": [f"{i:06}" for i in range(50_000)]}),
    "many properties": lambda: Grammar.json_schema(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}),
    "a pattern of repetitions": lambda: Grammar.json_schema(
        {"type": "string", "pattern": "^(([a-z]{1,300})+[0-9]{1,300}){1,300}$"}),
    "an ambiguous grammar": lambda: Grammar.lark('start: a\na: a a | "x" | a a a'),
    "many schemas": lambda: Grammar.json_schema(
        {"allOf": [{"anyOf": [{"type": "object", "properties": {f"{i}{j}": {"const": j}}}
                              for j in range(6)]} for i in range(8)]}),
}  # fmt: skip


@pytest.mark.parametrize("what", BOMBS)
def test_the_work_of_a_grammar_is_bounded(what):
    """It is refused, or 50 masks of a text are computed; the limits are 1 s and 500 MB."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        matcher = matcher_of(BOMBS[what]())
    except ValueError as error:
        assert "supported" in str(error)
    else:
        for _ in range(50):
            following = [byte for byte in allowed(matcher).tolist() if byte != 256]
            if matcher.error or not following:
                break
            matcher.push(following[:1])
    print(f"{what}: {time.process_time() - begin:.2f} s")
    assert time.process_time() - begin < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB
