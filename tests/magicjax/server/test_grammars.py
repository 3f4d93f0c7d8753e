"""`response_format`: texts that match, and are those of `magicjax.generate` with the grammar."""

import json

import jsonschema
import openai
import pytest

import magicjax
from magicjax.grammars import trial
from tests.magicjax.server import serving
from tests.magicjax.server.test_openai_client import chat, completion, text

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA, "strict": True}}
PROMPT = "def add("


@pytest.fixture(scope="module")
def target(directory):
    return serving.target_of(directory)


@pytest.fixture(scope="module")
def client(target):
    with serving.running(serving.make_engine(target)) as made:
        yield made.client()


@pytest.mark.slow
def test_texts_match_and_are_those_of_generate(target, client):
    seed = 3
    sampling = dict(temperature=0.9, top_p=0.95, seed=seed)
    grammar = magicjax.Grammar.json_schema(SCHEMA)
    expected = text(target, PROMPT, seed, max_tokens=64, grammar=grammar)
    options = dict(max_tokens=64, **sampling)
    found = completion(client, PROMPT, extra_body={"response_format": FORMAT}, **options)
    assert found.choices[0].text == expected
    jsonschema.validate(json.loads(expected), SCHEMA)


@pytest.mark.slow
def test_other_formats_and_requests_in_one_batch(target, client):
    plain = completion(client, PROMPT).choices[0].text
    answer = chat(client, response_format=FORMAT, max_tokens=64)
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    digits = {"response_format": {"type": "regex", "regex": "[0-9]{3}"}}
    found = completion(client, PROMPT, extra_body=digits).choices[0]
    assert found.text.isdigit() and len(found.text) == 3 and found.finish_reason == "stop"
    pieces = chat(client, stream=True, extra_body=digits)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert streamed.isdigit() and len(streamed) == 3
    assert completion(client, PROMPT).choices[0].text == plain


def test_an_invalid_expression_is_one_clear_error(client):
    given = {"response_format": {"type": "regex", "regex": "["}}
    with pytest.raises(openai.BadRequestError, match="regular expression"):
        chat(client, extra_body=given)


def test_a_context_free_grammar(client):
    lark = 'start: "(" start ")" | /[0-9]/'
    found = chat(client, extra_body={"response_format": {"type": "lark", "lark": lark}})
    text = found.choices[0].message.content
    assert text.count("(") == text.count(")") or found.choices[0].finish_reason == "length"


def test_a_grammar_beyond_the_limits_is_refused(client):
    values = [f"{i:06}" for i in range(10_000)]
    schema = {"name": "many", "schema": {"enum": values}}
    given = {"type": "json_schema", "json_schema": schema}
    with pytest.raises(openai.BadRequestError, match="characters, and at most") as raised:
        chat(client, extra_body={"response_format": given})
    assert raised.value.param == "response_format"


BOMBS = {
    "states": {"type": "integer", "multipleOf": 9_999_991},
    "references": {
        "$defs": {f"{i:x}": {"items": {"$ref": f"#/$defs/{i + 1:x}"}} for i in range(1200)}
        | {"4b0": {}},
        "$ref": "#/$defs/0",
    },
    "intersections": "start: A\nA: "
    + " & ".join(f"/(.{{{n}}})*/" for n in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)),
    "parentheses": "start: a0\n"
    + "\n".join(f"a{i}: {'(' * 25}a{i + 1}{')' * 25}" for i in range(400))
    + '\na400: "x"',
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_grammar_that_would_hang_or_end_the_process_is_refused(client, monkeypatch, name):
    monkeypatch.setattr(trial, "SECONDS", 1)
    if isinstance(bomb := BOMBS[name], str):
        given = {"type": "lark", "lark": bomb}
    else:
        given = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": bomb}}
    with pytest.raises(openai.BadRequestError, match="1024 MiB to compile"):
        chat(client, extra_body={"response_format": given})


def test_a_grammar_beyond_the_limits_in_the_middle_of_a_text_is_an_error_of_the_client(client):
    rules = [f"a{i}" for i in range(1000)]  # all may follow the digits
    lark = "\n".join([f"start: /[0-9]{{9}}/ {' '.join(rules)}", *(f'{x}: "{x}"?' for x in rules)])
    given = {"response_format": {"type": "lark", "lark": lark}}
    with pytest.raises(openai.BadRequestError, match="exceeds the limits of its parser"):
        chat(client, extra_body=given, max_tokens=100)
    assert completion(client, PROMPT).choices[0].text


def test_a_server_without_grammars_refuses_them(target):
    engine = serving.make_engine(target, grammars=False)
    with (
        serving.running(engine) as made,
        pytest.raises(openai.BadRequestError, match="the server has no grammars"),
    ):
        chat(made.client(), response_format={"type": "json_object"})
