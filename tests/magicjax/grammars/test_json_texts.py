"""Sampled JSON texts are valid under their schemas, and the command line prints such texts."""

import json
import pathlib

import jax
import jax.numpy as jnp
import jsonschema
import pytest

import magicjax
import models
from tests.magicjax import keywords, tiny
from tests.quick import quick

ZOO = pathlib.Path(magicjax.__file__).parent.parent / "experiments/zoo/target"


def obj(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": [*properties]}


STRING, INTEGER, NUMBER = (
    {"type": "string", "maxLength": 8},
    {"type": "integer"},
    {"type": "number"},
)
BOOLEAN, NULL = {"type": "boolean"}, {"type": "null"}
SCHEMAS = (
    obj(name=STRING, age=INTEGER),
    obj(name=STRING, tags={"type": "array", "items": STRING, "maxItems": 3}),
    obj(x=NUMBER, y=NUMBER, inside=BOOLEAN),
    obj(kind={"enum": ["a", "b b", 'c"', "é", 3, None, True]}),
    obj(fixed={"const": {"a": [1, "x"]}}),
    obj(inner=obj(inner=obj(value=INTEGER))),
    {"type": "object", "properties": {"a": STRING, "b": INTEGER, "c": BOOLEAN}},
    {"type": "object", "properties": {"a": STRING, "b": INTEGER}, "required": ["b"]},
    {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [INTEGER, STRING, BOOLEAN]},
    obj(either={"anyOf": [STRING, INTEGER, NULL]}),
    obj(one={"oneOf": [STRING, INTEGER]}),
    obj(several={"type": ["string", "null", "boolean"], "maxLength": 6}),
    obj(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    obj(day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    obj(nothing=NULL, flag=BOOLEAN),
    {"$defs": {"point": obj(x=INTEGER, y=INTEGER)}, **obj(p={"$ref": "#/$defs/point"})},
    obj(matrix={"type": "array", "items": {"type": "array", "items": INTEGER, "maxItems": 2},
                "maxItems": 2}),
    {"type": "object", "additionalProperties": INTEGER},
    obj(minimum=INTEGER, items=STRING),  # names of keywords
)  # fmt: skip


def random_model() -> magicjax.Model:
    """Returns a random model with the bundled tokenizer of 2,048 tokens."""
    tokenizer = models.load_tokenizer(ZOO)
    shape = tiny.config(vocab_size=len(tokenizer), num_layers=1)
    params = jax.tree.map(lambda x: jnp.asarray(x, "float32"), tiny.drawn(shape, 0))
    return magicjax.Model(models.build(shape), params, tokenizer, "random", (0,))


def check(schemas, rows: int, tokens: int) -> None:
    target = random_model()
    grammars = [magicjax.Grammar.json_schema(schema) for schema in schemas]
    output = keywords.generate(
        target,
        [[row % 2000 + 1] for row in range(rows)],
        drafter=magicjax.SelfSpeculation(budget=24),
        tree=magicjax.expansion((2, 1)),
        max_tokens=tokens,
        temperature=1.0,
        grammar=[grammars[row % len(schemas)] for row in range(rows)],
    )
    finished = 0
    for row, text in enumerate(output.texts):
        if output.finish_reasons[row] == "eos":
            jsonschema.validate(json.loads(text), schemas[row % len(schemas)])
            finished += 1
    print(f"{finished} of {rows} texts ended")
    assert finished > 0.9 * rows


@pytest.mark.slow
def test_500_sampled_texts_are_valid():
    check(SCHEMAS, 500, 160)


@pytest.mark.slow
def test_sampled_texts_are_valid():
    check(SCHEMAS[:4], 12, 128)


@pytest.mark.parametrize("option", quick(["--json", "--regex", "--json-schema"], "--json-schema"))
def test_the_command_prints_a_text_of_the_grammar(run, directory, tmp_path, option):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"enum": ["yes", "no"]}))
    value = {"--json": [], "--regex": ["[a-c]{3}-[0-9]"], "--json-schema": [path]}[option]
    common = ("generate", "--target", directory, "--prompt", "def", "--max-tokens", 12)
    code, out, errors = run(*common, option, *value)
    assert code == 0, errors
    if option == "--json":
        assert out.startswith("def{") or out.startswith("{")
    elif option == "--regex":
        assert out.strip().removeprefix("def")[3] == "-"
    else:
        assert out.strip().removeprefix("def") in ('"yes"', '"no"')


def test_wrong_options_are_errors(run, directory, tmp_path):
    common = ("generate", "--target", directory, "--prompt", "def")
    for arguments, message in (
        (("--regex", "("), "the regular expression is not supported"),
        (("--json-schema", tmp_path / "none"), "--json-schema"),
        (("--json", "--regex", "a"), "not allowed with"),
    ):
        code, _, errors = run(*common, *arguments)
        assert code != 0
        assert message in errors
