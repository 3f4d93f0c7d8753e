"""What outlines-core would mistranslate is rewritten or refused: random texts are valid."""

import json
import random

import jsonschema
import pytest

from magicjax.grammars import json_schema, trial
from magicjax.grammars.grammar import Grammar, byte_automaton

PATTERNS = (
    *("^.*$", "a.b", "^a|b$", "x|y", "[^a]", r"\d+", r"\w{2}", r"\s", r"\S\D", r"^\$?[0-9]\$"),
    *(r'^"[^"]{2}"+\\\/\-\<$', r'^["\\a]+$', r"^[\w.-]+@[\w-]+$", "(a|b)(?:c|d){2,3}?", r"\p{Lu}x"),
)
FORMATS = ("date", "date-time", "email", "time", "uri", "uuid")


def texts(grammar: Grammar, count: int = 40, length: int = 80) -> list[str]:
    """Returns texts of random walks through an automaton, which prefer quotes and brackets."""
    automaton, rng, found = byte_automaton(grammar), random.Random(0), []
    for _ in range(count):
        state, text = 0, bytearray()
        while len(text) < length:
            allowed = (automaton.next[state] >= 0).nonzero()[0].tolist()
            if automaton.final[state] and (not allowed or rng.random() < 0.3):
                found.append(text.decode())
                break
            special = [byte for byte in allowed if byte in b'"\\}]@.']
            byte = rng.choice(special if special and rng.random() < 0.5 else allowed)
            state = automaton.next[state, byte]
            text.append(byte)
    assert len(found) > 5
    return found


def outlines_alone(schema: dict, monkeypatch) -> Grammar:
    """Returns the grammar of outlines-core without the rewriting."""
    with monkeypatch.context() as patched:
        patched.setattr(json_schema, "prepared", json.dumps)
        return Grammar.json_schema(schema)


def is_valid(text: str, schema: dict) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_match_patterns(pattern):
    schema = {"type": "string", "pattern": pattern}
    inside = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    for text in texts(Grammar.json_schema(inside)):
        value = json.loads(text)["a"]
        assert r"\p" in pattern or is_valid(json.dumps(value), schema), text


@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_formats_are_json(name):
    schema = {"type": "string", "format": name}
    for text in texts(Grammar.json_schema(schema), length=120):
        assert isinstance(json.loads(text), str)


@pytest.mark.parametrize("pattern", ["a.b", "x|y", "[^a]"])
def test_patterns_as_outlines_core_inserts_them_are_detected(pattern, monkeypatch):
    schema = {"type": "string", "pattern": pattern}
    grammar = outlines_alone(schema, monkeypatch)
    assert not all(is_valid(text, schema) for text in texts(grammar))


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
REFUSED = {
    "no type": ({"type": "object", "properties": {"a": {}}}, "a part without 'type'"),

    "an empty enum": ({"enum": []}, "an empty 'enum'"),
    "no alternatives": ({"anyOf": []}, "an empty 'anyOf'"),
    "no types": ({"type": []}, "an empty 'type'"),
    "values of another type": ({"enum": [1, "a"], "type": "integer"}, "'enum' with 'type'"),
    "a constant and a length": ({"const": "a", "maxLength": 1}, "'const' with 'maxLength'"),
    "an open class": ({"type": "string", "pattern": "[a"}, "a class"),
    "a class in a class": ({"type": "string", "pattern": "[[a]b]"}, r"write \\\[ in a class"),
    "a backslash at the end": ({"type": "string", "pattern": "a\\"}, "write the character itself"),
    "a syntax error": ({"type": "string", "pattern": "a)"}, "JSON schema is not.*syntax error"),
    "bounds that exclude each other": (
        {"type": "array", "items": OBJECT, "minItems": 3, "maxItems": 2},
        "syntax error",
    ),


    "a quote in a name": ({"type": "object", "properties": {'a"': {"type": "null"}}}, "a quote"),
    "alternatives and a type": ({"anyOf": [OBJECT], "type": "object"}, "'anyOf' with 'type'"),
    "a reference and a type": (
        {"$defs": {"a": OBJECT}, "$ref": "#/$defs/a", "type": "null"},
        "'[$]ref' with 'type'",
    ),


    "an expression in a value": ({"enum": [1, [{"a.b": 1}]]}, "the name 'a.b' in 'enum' or 'co"),
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


    "properties of an array": (OBJECT | {"type": "array"}, "'properties' with type 'array'"),

    "a schema that is false": ({"type": "object", "properties": {"a": False}}, "structure false$"),
}  # fmt: skip


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
def test_references_lead_to_whole_parts(depth, monkeypatch):
    schema, grammar = nested(depth), Grammar.json_schema(nested(depth))
    for text in texts(grammar, length=30 * depth):
        assert is_valid(text, schema), text
    if depth > 4:
        assert not any(
            is_valid(text, schema) for text in texts(outlines_alone(schema, monkeypatch))
        )


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


@pytest.mark.parametrize("schema", [{"enum": []}, REFUSED["a quote in a name"][0]])
def test_schemas_that_outlines_core_mistranslates_are_detected(schema, monkeypatch):
    schema = schema | ({"required": ['a"']} if 'a"' in str(schema) else {})
    grammar = outlines_alone(schema, monkeypatch)
    assert not all(is_valid(text, schema) for text in texts(grammar))


def test_a_grammar_that_takes_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(trial, "SECONDS", 1)
    trial.check("regex", "[ab]{20}")
    trial.check("regex", "(")  # compiling it says what is wrong
    with pytest.raises(ValueError, match="more than 1 s or 1024 MiB"):
        trial.check("regex", "[ab]*a[ab]{30}")
    pair = {"type": "array", "prefixItems": [{"type": "string"}] * 9}
    properties = {str(i): pair for i in range(400)}
    schema = {"type": "object", "properties": properties}
    with pytest.raises(ValueError, match="fewer references"):
        trial.check("json_schema", json_schema.prepared(schema))
