"""Tools: calls that are valid under their schemas, and texts split while they arrive."""

import copy
import dataclasses
import json
import re

import jsonschema
import numpy as np
import openai
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import magicjax
import models
from magicjax.cli.serve import TOOL_FORMATS
from magicjax.decoding.text import NewTokens
from magicjax.grammars import trial
from magicjax.grammars.grammar import Grammar
from magicjax.server import bodies, protocol, tool_calls
from magicjax.server.bodies import Function
from magicjax.server.errors import ApiError
from magicjax.server.protocol import Served
from magicjax.server.responses import ChoiceBuilder
from magicjax.server.tool_calls import FORMATS, HERMES, LLAMA3, CallParser, Tools
from tests.magicjax import tiny
from tests.magicjax.grammars import walks
from tests.magicjax.grammars.walks import accepts
from tests.magicjax.server import serving

TEMPLATE = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{% for m in messages %}"
    "[{{ m.role }}{{ m.name }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ BEGIN }}"
    "{% endfor %}{% endfor %}[assistant]"
)
CALL = '{"name": "{{ c.function.name }}", "ARGUMENTS": {{ c.function.arguments | tojson }}}'
TEMPLATES = {
    "hermes": TEMPLATE.replace(
        "{{ BEGIN }}", "<tool_call>\n" + CALL.replace("ARGUMENTS", "arguments") + "\n</tool_call>"
    ),
    "llama3": TEMPLATE.replace(
        "{{ BEGIN }}", "{#ipython#}" + CALL.replace("ARGUMENTS", "parameters")
    ),
}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
CITY["properties"]["days"]["type"] = "integer"
SWITCH = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": CITY, "turn-light": SWITCH}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
UNSUPPORTED = {"type": "object", "not": {}}
USER = {"role": "user", "content": "Rome?"}


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


def function(name: str, **fields) -> dict:
    return {"type": "function", "function": {"name": name, **fields}}


@pytest.fixture(scope="module")
def tokenizer(directory):
    """A tokenizer in which the markers are tokens with text, as Qwen's."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = TEMPLATES["hermes"]
    return tokenizer


@pytest.fixture(scope="module")
def target(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tools"
    config = tiny.config(vocab_size=len(tokenizer), num_layers=1, max_positions=1024)
    module = models.build(config)
    params = models.init_params(module, 0)
    models.save_checkpoint(path, module, params, eos_token_ids=[0], tokenizer=tokenizer)
    return magicjax.load(path, dtype="float32")


@pytest.fixture(scope="module")
def client(target):
    engine = serving.make_engine(target, capacity=1024, max_tokens=256)
    with serving.running(engine) as server:
        yield server.client()


def chat(client, messages=(USER,), **options):
    options = dict(model=serving.NAME, max_tokens=200, temperature=0, tools=TOOLS) | options
    return client.chat.completions.create(messages=[*messages], **options)


def check_call(call) -> None:
    assert re.fullmatch("call_[0-9a-f]{24}", call.id) and call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [dict(temperature=1, seed=5)])
def test_a_conversation_of_five_turns(client, sampling):
    conversation = [{"role": "developer", "content": "short"}]
    options = dict(parallel_tool_calls=False, **sampling)
    choices = ["required", named("get_weather"), named("turn-light"), "required", "none"]
    for choice in choices:
        conversation.append(USER)
        answer = chat(client, conversation, tool_choice=choice, **options).choices[0]
        conversation.append(answer.message)
        if choice == "none":
            assert answer.message.tool_calls is None and answer.message.content
            continue
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        (call,) = answer.message.tool_calls
        check_call(call)
        if choice != "required":
            assert call.function.name == choice["function"]["name"]
        conversation.append({"role": "tool", "tool_call_id": call.id, "content": "yes"})


@pytest.mark.slow
def test_a_stream_has_the_calls_of_the_answer(client):
    options = dict(tool_choice="required", temperature=1, seed=3, n=3, max_tokens=120)
    whole = chat(client, logprobs=True, **options)
    chunks = [*chat(client, logprobs=True, stream=True, **options)]
    for choice in whole.choices:
        choice_chunks = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert all(not c.delta.content for c in choice_chunks)
        assert [c.finish_reason for c in choice_chunks if c.finish_reason] == [choice.finish_reason]
        assert choice_chunks[-1].finish_reason == choice.finish_reason
        tokens = [t.token for c in choice_chunks if c.logprobs for t in c.logprobs.content]
        assert tokens == [t.token for t in choice.logprobs.content]
        found = []
        for call in (call for c in choice_chunks for call in c.delta.tool_calls or ()):
            if call.id:
                assert call.index == len(found) and call.function.arguments == ""
                found.append([call.function.name, ""])
            else:
                assert call.index == len(found) - 1 and call.function.name is None
                found[-1][1] += call.function.arguments
        calls = choice.message.tool_calls or []
        assert found == [[call.function.name, call.function.arguments] for call in calls]
        for call in calls[:-1] if choice.finish_reason == "length" else calls:
            check_call(call)
    assert any(choice.message.tool_calls for choice in whole.choices)


@pytest.mark.slow
def test_the_client_collects_a_stream(client):
    strict = [function(**tool["function"], strict=True) for tool in TOOLS]
    options = dict(model=serving.NAME, messages=[USER], tools=strict, max_tokens=200, temperature=0)
    with client.chat.completions.stream(
        tool_choice="required", parallel_tool_calls=False, **options
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    check_call(call)
    assert [(event.name, event.arguments) for event in done] == [
        (call.function.name, call.function.arguments)
    ]


@pytest.mark.slow
def test_texts_are_those_of_generate_with_the_grammar(target, client):
    answer = chat(client, tool_choice=named("get_weather"))
    tools = tools_of(target.tokenizer, tool_choice=named("get_weather"))
    prompt = target.tokenizer.apply_chat_template(
        [USER], tools=TOOLS, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    params = magicjax.SamplingParams(max_tokens=200, grammar=tools.grammar())
    text = magicjax.generate(target, [prompt], params).texts[0]
    found = answer.choices[0].message.tool_calls[0].function
    assert f'"arguments": {found.arguments}}}\n</tool_call>' in text


def test_auto_text_is_content_or_calls(client):
    texts = 0
    for seed in range(4):
        answer = chat(client, temperature=1, seed=seed, max_tokens=60).choices[0]
        for call in answer.message.tool_calls or ():
            assert call.function.name in SCHEMAS
        texts += answer.message.content is not None
        assert "<tool_call>" not in (answer.message.content or "")
    assert texts
    pieces = [*chat(client, temperature=1, seed=0, max_tokens=60, stream=True)]
    answer = chat(client, temperature=1, seed=0, max_tokens=60).choices[0].message.content
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert streamed == (answer or "")


def test_content_beside_calls_matches_the_response_format(client, target):
    schema = {"name": "light", "schema": SWITCH}
    response_options = dict(response_format={"type": "json_schema", "json_schema": schema})
    marker = target.tokenizer.convert_tokens_to_ids("<tool_call>")
    for bias in (-100, 100):
        options = dict(logit_bias={marker: bias}, temperature=1, seed=1, **response_options)
        options |= dict(parallel_tool_calls=False)
        message = chat(client, **options).choices[0].message
        assert bool(message.tool_calls) == (message.content is None) == (bias > 0)
        for call in message.tool_calls or ():
            check_call(call)
        if message.content:
            jsonschema.validate(json.loads(message.content), SWITCH)
        deltas = [chunk.choices[0].delta for chunk in chat(client, stream=True, **options)]
        assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
        assert any(delta.tool_calls for delta in deltas) == (bias > 0)
    message = chat(client, tool_choice=named("turn-light"), **response_options).choices[0].message
    (call,) = message.tool_calls
    check_call(call)


def test_a_call_that_reaches_the_limit_is_partial(client):
    choice = named("get_weather")
    whole = chat(client, tool_choice=choice)
    expected, tokens = (
        whole.choices[0].message.tool_calls[0].function,
        whole.usage.completion_tokens,
    )
    begun = set()
    for limit in (1, 20, *range(tokens - 24, tokens, 4)):
        answer = chat(client, tool_choice=choice, max_tokens=limit).choices[0]
        assert answer.finish_reason == "length" and answer.message.content is None
        for call in answer.message.tool_calls or ():
            assert call.function.name == expected.name
            assert expected.arguments.startswith(call.function.arguments)
            begun.add(call.function.arguments)
    assert begun - {expected.arguments}


@pytest.mark.slow
def test_calls_that_need_not_follow_are_not_constrained_beside_fields_without_a_grammar(client):
    fields = dict(min_tokens=3, bad_words=["zz"])
    answer = chat(client, extra_body=fields, max_tokens=8)
    assert answer.usage.completion_tokens == 8
    message = "may leave no token, as the tools constrain the text"
    with pytest.raises(openai.BadRequestError, match=message) as raised:
        chat(client, tool_choice="required", extra_body=fields)
    assert raised.value.param == "bad_words"
    strict = [function(**tool["function"], strict=True) for tool in TOOLS]
    for name, value in (("min_tokens", 3), ("ignore_eos", True)):
        with pytest.raises(openai.BadRequestError, match=message) as raised:
            chat(client, tools=strict, extra_body={name: value})
        assert raised.value.param == name


def test_the_format_of_llama_3(target):
    tokenizer = target.tokenizer
    engine = serving.make_engine(target, capacity=1024, max_tokens=256)
    tokenizer.chat_template = TEMPLATES["llama3"]
    try:
        with serving.running(engine) as server:
            call = chat(server.client(), tool_choice="required").choices[0].message.tool_calls[0]
    finally:
        tokenizer.chat_template = TEMPLATES["hermes"]
    check_call(call)


# Texts without a model.


def parse(pieces, tool_format, complete=True, parallel=True) -> dict:
    parser = CallParser(tool_format, parallel)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    found = tool_calls.message(deltas + parser.finish(complete))
    calls = [call["function"] for call in found.get("tool_calls", ())]
    return found["content"], [(call["name"], call["arguments"]) for call in calls]


F = '{"name": "f", "arguments": {"x": "}\\"{ </tool_call>", "y": [{}]}}'
G = '{ "name" : "g","arguments":{} }'
ARGUMENTS = F[len('{"name": "f", "arguments": ') : -1]
FIRST = ("f", ARGUMENTS)
LLAMA = '{"name": "f", "parameters": {"x": "é\\\\"}}'
LLAMA_CALL = ("f", '{"x": "é\\\\"}')
CASES = {
    "one": (HERMES, f"<tool_call>\n{F}\n</tool_call>", None, [FIRST]),
    "two": (
        HERMES,
        f"Hi. \n<tool_call>{F}</tool_call>\n<tool_call>\n{G}\n</tool_call>\n",
        "Hi.",
        [FIRST, ("g", "{}")],
    ),
    "no end": (HERMES, f"<tool_call>{F}\n<tool_call>{G}", None, [FIRST, ("g", "{}")]),
    "text around": (HERMES, f" a\n<tool_call>{G}</tool_call>\nb ", " a\nb", [("g", "{}")]),
    "text": (HERMES, "a <b <tool_cal\n", "a <b <tool_cal\n", []),
    "not JSON": (HERMES, "a <tool_call> f() </tool_call>", "a <tool_call> f() </tool_call>", []),
    "arguments as text": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{}"}',
        '<tool_call>{"name": "f", "arguments": "{}"}',
        [],
    ),
    "no character": (
        HERMES,
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        [],
    ),
    "an incomplete one": (HERMES, 'a\n<tool_call>{"na', 'a\n<tool_call>{"na', []),
    "llama": (LLAMA3, LLAMA, None, [LLAMA_CALL]),
    "llama, tag": (LLAMA3, f"<|python_tag|>\n{LLAMA} ", None, [LLAMA_CALL]),
    "llama, text": (LLAMA3, f" Hi {LLAMA}", f" Hi {LLAMA}", []),
    "llama, JSON": (LLAMA3, '{"a": 1}', '{"a": 1}', []),
    "llama, a bracket": (LLAMA3, "{", "{", []),
}


@pytest.mark.parametrize("name", CASES)
def test_texts_are_split_the_same_however_they_arrive(name):
    tool_format, text, content, calls = CASES[name]
    assert parse([text], tool_format) == (content, calls)
    assert parse(text, tool_format) == (content, calls)
    for cut in range(len(text)):
        assert parse([text[:cut], text[cut:]], tool_format) == (content, calls)
        partial, some = parse([text[:cut]], tool_format, complete=False)
        assert (content or "").startswith(partial or "")
        names, found = [name for name, _ in calls], [name for name, _ in some]
        assert names[: len(found)] == found
        for (_, whole), (_, begun) in zip(calls, some):
            assert whole.startswith(begun) and begun


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "\n", F, G, "<", "a", '{"', "}"])))
@settings(max_examples=200)
def test_any_text_is_split_the_same_in_pieces(parts):
    text = "".join(parts)
    for tool_format in (HERMES, LLAMA3):
        assert parse(parts, tool_format) == parse([text], tool_format) == parse(text, tool_format)


NAMES = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
CONTENTS = {"switch": SWITCH, "city": CITY, "name": NAMES | {"additionalProperties": False}}


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", CONTENTS)
def test_a_text_is_content_of_the_grammar_or_calls(tool_format, name):
    functions = [Function(name="f", parameters=SWITCH), Function(name="g", parameters=CITY)]
    tools = Tools(tool_format, [], functions, required=False, parallel=True)
    content = Grammar.json_schema(CONTENTS[name])
    required = dataclasses.replace(tools, required=True)
    assert required.grammar(content) == required.grammar()
    both = tools.grammar(content)
    for grammar in (content, required.grammar()):
        for text in walks.texts(grammar):
            assert accepts(both, text)
    for text in ('{"name": "f"}', '{"name":"f"}', '{"name": "fg"}', '{"name": "h"}', '{"on": 1}'):
        assert accepts(both, text) == accepts(content, text)
    header = f'{{"name": "f", "{tool_format.field}": '
    for text in ("Hi.", f"Hi.{tool_format.begin}", header, f'{header}{{"city": "Rome"}}}}'):
        assert not accepts(both, text)


def test_without_parallel_calls_the_first_one_ends_the_text():
    text = f"<tool_call>{F}</tool_call><tool_call>{G}</tool_call> more"
    assert parse(text, HERMES, parallel=False) == (None, [FIRST])


def test_a_cut_call_has_no_reason_tool_calls():
    tools = Tools(HERMES, [], [], required=False, parallel=True)

    def reason(text, why):
        builder = ChoiceBuilder(chat=True, stream=False, token_texts=str, tools=tools)
        new = NewTokens(np.zeros(0, np.int32), text, None)
        return builder.choices(0, new, why)[0]["finish_reason"]

    whole = f"<tool_call>{G}</tool_call>"
    assert reason(whole, "eos") == "tool_calls" and reason(whole, "length") == "length"
    assert reason("<tool_call>" + F[:-5], "stop") == "stop" and reason("a", "eos") == "stop"


def test_the_last_chunk_of_a_stream_has_the_reason_only():
    """Text that was held back, as it could become a call, is in a chunk before it."""
    tools = Tools(HERMES, [], [], required=False, parallel=True)
    builder = ChoiceBuilder(chat=True, stream=True, token_texts=str, tools=tools)
    none = np.zeros(0, np.int32)
    chunks = builder.choices(0, NewTokens(none, "1 <tool", None), None)
    chunks += builder.choices(0, NewTokens(none, "", None), "eos")
    assert [chunk["delta"] for chunk in chunks] == [{"content": "1"}, {"content": " <tool"}, {}]
    assert [chunk["finish_reason"] for chunk in chunks] == [None, None, "stop"]


def call_of(tool_format, name="f", arguments='{"on": true}') -> str:
    call = f'{{"name": "{name}", "{tool_format.field}": {arguments}}}'
    return f"{tool_format.begin}\n{call}\n{tool_format.end}" if tool_format.begin else call


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)
def test_grammars_have_calls_that_are_valid_and_other_text(tool_format):
    functions = [Function(name="f", parameters=SWITCH), Function(name="g-1")]
    call, other = call_of(tool_format), call_of(tool_format, "g-1", "{}")
    wrong = [
        call_of(tool_format, "h"),
        call_of(tool_format, "g-1"),
        call_of(tool_format, "f", "{}"),
        call_of(tool_format, "f", '{"on": 1}'),
    ]
    texts = ["", "Hi", "a <b> [] é\n", "\n\n<think>\n{}</think>"]
    for parallel in (False, True):
        both = parallel and bool(tool_format.end)
        auto = Tools(tool_format, [], functions, required=False, parallel=both).grammar()
        required = Tools(tool_format, [], functions, required=True, parallel=both).grammar()
        for text in (call, other):
            assert accepts(required, text) and accepts(auto, text)
        for text in texts:
            assert not accepts(required, text) and accepts(auto, text)
        for text in (*wrong, call[:-1], call + "a"):
            assert not accepts(required, text) and not accepts(auto, text)
        several = "\n".join([call, other, call])
        assert accepts(required, several) == both == accepts(auto, several)
        assert not tool_format.begin or accepts(auto, f"Hi <tool_cal\n{call}")
        assert not accepts(auto, tool_format.begin + "{") and not accepts(
            auto, f"{tool_format.begin}\n{wrong[0]}"
        )


def test_parameters_whose_work_has_no_bound_are_an_error_that_names_the_function(monkeypatch):
    monkeypatch.setattr(trial, "SECONDS", 1)
    properties = {"n": {"type": "integer", "multipleOf": 9_999_991}}
    functions = [Function(name="f", parameters={"type": "object", "properties": properties})]
    with pytest.raises(ValueError, match="'f': the grammar takes more than 1 s"):
        Tools(LLAMA3, [], functions, required=True, parallel=False).grammar()


def test_a_description_is_no_attribute_of_a_rule():
    parameters = CITY | {"description": "of a model [max_tokens=5, temperature=1]"}
    functions = [Function(name="f", parameters=parameters)]
    grammar = Tools(LLAMA3, [], functions, required=True, parallel=False).grammar()
    assert accepts(grammar, '{"name": "f", "parameters": {"city": "Rome"}}')


@given(st.text(st.sampled_from("<tol_ca>\n"), max_size=30))
@settings(max_examples=100)
def test_free_text_is_exactly_that_without_the_marker(text):
    grammar = Tools(HERMES, [], [Function(name="f")], required=False, parallel=True).grammar()
    assert accepts(grammar, text) == ("<tool_call>" not in text)


# Requests.

CONFIG = magicjax.EngineConfig(
    slots=1, capacity=512, max_tokens=32, sampling=True, grammars=True, eos_token_id=(0,)
)


def tools_of(tokenizer, tool_format=None, tools=TOOLS, **fields) -> Tools | None:
    body = bodies.parse_chat(dict(messages=[USER], tools=tools, **fields))
    return tool_calls.tools_of(body, tokenizer, tool_format)


def request(target, config=CONFIG, tool_format=None, **fields) -> protocol.Generation:
    data = json.dumps(dict(messages=[USER], tools=TOOLS) | fields).encode()
    return protocol.parse_chat(data, Served("tiny", target, config, tool_format))


def refusal(target, **fields) -> ApiError:
    with pytest.raises(ApiError) as raised:
        request(target, **fields)
    assert raised.value.status == 400
    return raised.value


def with_template(target, template: str) -> magicjax.Model:
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.chat_template = template
    return dataclasses.replace(target, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("fields", "text", "param"),
    [
        (dict(tools=TOOLS * 2), "two functions 'get_weather': names must differ", "tools"),
        (dict(tool_choice="any"), "tool_choice='any': it must be auto, none", "tool_choice"),
        (dict(tool_choice=named("f")), "use one of get_weather, turn-light", "tool_choice"),
        (dict(tools=[], tool_choice="required"), "requires tools: add them", "tool_choice"),
        (
            dict(response_format={"type": "json_object"}, min_tokens=2),
            "min_tokens may leave no token, as the tools constrain the text",
            "min_tokens",
        ),
        (
            dict(
                response_format={"type": "json_object"},
                tools=[function("f", parameters=UNSUPPORTED)],
            ),
            "tools: the function 'f': the JSON schema is not supported: ",
            "tools",
        ),
        (
            dict(tools=[function("f", parameters=UNSUPPORTED, strict=True)]),
            "tools: the function 'f': the JSON schema is not supported: ",
            "tools",
        ),
        (
            dict(tools=[function("f", parameters=UNSUPPORTED)], tool_choice="required"),
            "the JSON schema is not supported: ",
            "tools",
        ),
        (
            dict(tools=[function("f", parameters={"type": "string"}, strict=True)]),
            'parameters must have "type": "object"',
            "tools",
        ),
        (
            dict(config=dataclasses.replace(CONFIG, grammars=False), tool_choice="required"),
            "the server has no grammars",
            "tools",
        ),
        (dict(functions=[{"name": "f"}]), "is not supported: use tools", "functions"),
        (dict(function_call="auto"), "use tools and tool_choice", "function_call"),
    ],
)
def test_wrong_tools_are_refused_by_name(target, fields, text, param):
    error = refusal(target, **fields)
    assert text in error.message and error.param == param


def called(**fields) -> dict:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"} | fields}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


RESULT = {"role": "tool", "tool_call_id": "1", "content": "yes"}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([RESULT], "messages[0].tool_call_id='1': it must be the id of a call in an earlier"),
        (
            [USER, called(arguments="{")],
            "messages[1].tool_calls[0].function.arguments='{': it",
        ),
        ([USER, called(arguments="[]")], "must be the JSON text of an object"),
        ([called() | {"role": "user"}], "messages[0] of role user has tool_calls"),
        ([USER | {"tool_call_id": "1"}], "messages[0] of role user has a tool_call_id"),
        ([{"role": "user", "content": None}], "messages[0] has no content"),
        ([called(), {"role": "tool", "tool_call_id": "1"}], "messages[1] has no content"),
    ],
)
def test_wrong_messages_are_refused_by_name(target, messages, text):
    error = refusal(target, messages=messages)
    assert text in error.message and error.param == "messages"


def test_the_template_reads_tools_and_their_results(target):
    messages = [{"role": "developer", "content": "short"}, USER, called(arguments='{"x":1}')]
    generation = request(target, messages=[*messages, RESULT], tool_choice="auto")
    assert target.tokenizer.decode(generation.prompts[0]) == (
        "<get_weather><turn-light>[system]short[user]Rome?[assistant]<tool_call>\n"
        '{"name": "f", "arguments": {"x": 1}}\n</tool_call>[toolf]yes[assistant]'
    )
    assert generation.tools.format is HERMES and generation.params.grammar is not None
    without = request(target, tool_choice="none", response_format={"type": "json_object"})
    assert target.tokenizer.decode(without.prompts[0]) == "[user]Rome?[assistant]"
    assert without.tools is None and without.params.grammar == Grammar.json_object()


def test_auto_calls_are_unconstrained_where_grammars_do_not_support_them(target):
    unsupported = [function("f", parameters=UNSUPPORTED)]
    without = dataclasses.replace(CONFIG, grammars=False)
    for fields in (dict(tools=unsupported), dict(config=without)):
        generation = request(target, **fields)
        assert generation.params.grammar is None and generation.tools is not None


def test_formats_are_those_of_templates_or_of_the_option(target, tokenizer):
    assert {*FORMATS} == {*TOOL_FORMATS} == {*TEMPLATES}
    for name, template in TEMPLATES.items():
        assert tool_calls.detected(template).name == name
    quoted = r'"\n<tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call>"'
    assert tool_calls.detected(quoted) is HERMES
    assert tool_calls.detected("{% if builtin_tools %}<|python_tag|>{% endif %}") is LLAMA3
    assert tool_calls.detected("<tool_call>\n<function={{ name }}>") is None
    plain = with_template(target, TEMPLATE.replace("{{ BEGIN }}", ""))
    assert "the server with --tool-format hermes or llama3" in refusal(plain).message
    assert request(plain, tool_format=LLAMA3).tools.format is LLAMA3
    ignoring = with_template(target, serving.TEMPLATE)
    for tool_format in (HERMES, None):
        error = refusal(ignoring, tool_format=tool_format)
        assert (error.param, error.message) == ("tools", tool_calls.IGNORED)


def test_markers_that_texts_omit_are_refused(target, directory):
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    tokenizer.chat_template = TEMPLATES["hermes"]
    error = refusal(dataclasses.replace(target, tokenizer=tokenizer))
    assert 'omits <tool_call> from texts, as a special token: set its "special"' in error.message
