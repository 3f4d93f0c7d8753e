"""Bodies: what is supported, what is refused by name, and that nothing malformed is a 5xx."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicjax import EngineConfig, SamplingParams
from magicjax.decoding.text import NewTokens
from magicjax.server import bodies, protocol, responses, tool_calls
from magicjax.server.errors import ApiError
from magicjax.server.protocol import Generation, Served
from tests.magicjax import small_tokenizers
from tests.magicjax.server import serving

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
TEXT = {"prompt": "x", "max_tokens": 1}
PARSERS = {"completions": protocol.parse_completion, "chat/completions": protocol.parse_chat}
VALID = {"completions": TEXT, "chat/completions": CHAT}
CONFIG = EngineConfig(
    slots=2,
    capacity=64,
    max_tokens=32,
    queue_limit=8,
    logprobs=3,
    sampling=True,
    grammars=True,
    logits_processors=True,
    eos_token_id=(0,),
)


def served(config: EngineConfig = CONFIG) -> Served:
    """Returns a model whose tokenizer has a token per character."""

    class Tokenizer:
        chat_template = '<tool_call>{"arguments": }'

        def __init__(self):
            self.added_tokens_decoder = {}

        def __call__(self, text):
            assert len(text) <= CONFIG.capacity, "tokenized before its characters were counted"
            return {"input_ids": [ord(character) % 50 for character in text]}

        def get_vocab(self):
            return {chr(token): token for token in range(50)}

        def apply_chat_template(self, messages, tools=None, **_):
            return self("".join(message["content"] for message in messages) + "f" * bool(tools))

    config_of_target = SimpleNamespace(vocab_size=50)
    target = SimpleNamespace(
        tokenizer=Tokenizer(), config=config_of_target, name="tiny", pad_token_id=None
    )
    return Served("tiny", target, config)


def parse(path: str, config: EngineConfig = CONFIG, **fields) -> Generation:
    return PARSERS[path](json.dumps(VALID[path] | fields).encode(), served(config))


def refused(path: str, config: EngineConfig = CONFIG, **fields) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parse(path, config, **fields)
    assert raised.value.status in (400, 404)
    return raised.value


@pytest.mark.parametrize("path", PARSERS)
def test_fields_become_parameters(path):
    sampled = dict(temperature=0.5, top_p=0.9, top_k=5, seed=7, stop="a")
    assert parse(path, n=2, **sampled).params == SamplingParams(max_tokens=1, **sampled)
    greedy = parse(path, temperature=0, top_p=0.9, top_k=5, seed=7).params
    assert greedy == SamplingParams(max_tokens=1, top_p=0.9, top_k=5, seed=7)
    assert parse(path, temperature=0, top_p=0).params.greedy  # as some clients ask for it
    default = parse(path, top_k=-1).params
    assert (default.temperature, default.top_k, default.top_p) == (1, 0, 1)
    assert parse(path).params.seed != parse(path).params.seed


@pytest.mark.parametrize("path", PARSERS)
@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("n", 0, "n=0: it must be an integer from 1 to 128"),
        ("temperature", -1, "temperature=-1: it must be a number of at least 0"),
        ("top_p", -0.1, "top_p=-0.1: it must be a number from 0 to 1"),
        ("seed", 2**63, "seed=9223372036854775808: it must be an integer in the range of"),
        ("stop", "", "stop='': it must be a string, or a list"),
        (
            "max_tokens",
            33,
            "max_tokens=33: it must be at most 32; reduce it, or start the server with a larger",
        ),
        ("stream", "yes", "stream='yes': it must be true or false"),
        ("stream_options", {"include_usage": True}, "stream_options requires stream=true"),
        ("response_format", {"type": "xml"}, 'it must be {"type": "text"}'),
        ("response_format", {"type": "regex", "regex": "("}, "regular expression"),
        ("ignore_eos", 1, "ignore_eos=1: it must be true or false"),
        ("min_p", 1.5, "min_p=1.5: it must be a number from 0 to 1"),
        ("repetition_penalty", 0, "repetition_penalty=0: it must be a number above 0"),
        ("frequency_penalty", 2.1, "frequency_penalty=2.1: it must be a number from -2 to 2"),
        ("logit_bias", {"5": 101}, "logit_bias={'5': 101}: it must be an object of token ids"),
        ("logit_bias", {"five": 1}, "logit_bias has the name 'five': it must be a token id"),
        ("allowed_token_ids", [], "allowed_token_ids=[]: it must be a list of at least one"),
        ("stop_token_ids", [-1], "stop_token_ids=[-1]: it must be a list of at most 16 token ids"),
        ("stop_token_ids", [1] * 17, "it must be a list of at most 16 token ids"),
        ("bad_words", [""], "bad_words=['']: it must be a list of at most 16 strings"),
        ("min_tokens", -1, "min_tokens=-1: it must be an integer from 0 to 2147483647"),
        (
            "thinking_token_budget",
            -1,
            "thinking_token_budget=-1: it must be an integer of at least 0",
        ),
        ("min_tokens", 33, "min_tokens=33 exceeds the limit of "),
        ("temprature", 1, "unknown field 'temprature'; did you mean 'temperature'?"),
        ("model", "gpt-9", "the model 'gpt-9' is not served here: use 'tiny'"),
    ],
)
def test_wrong_values_are_refused_by_name(path, field, value, text):
    error = refused(path, **{field: value})
    assert text in error.message and error.param == field


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("prompt", None, "prompt=None: it must be a text, a list of texts"),
        ("prompt", [], "prompt=[]: give at least one text or token"),
        ("prompt", [""], "prompt 0 is empty"),
        ("prompt", ["a", 1], "prompt=['a', 1]: it must be"),
        ("prompt", [50], "token 50, outside the target's vocabulary"),
        ("prompt", ["a"] * 9, "9 prompts with n=1 are 9 requests, and the queue holds 8"),
        ("logprobs", 4, "logprobs=4: it must be at most 3; reduce it"),
        ("best_of", 2, "best_of=2 is not supported: omit best_of"),
        ("max_tokens", 0, "max_tokens=0 requires echo=true"),
    ],
)
def test_wrong_completions_are_refused_by_name(field, value, text):
    error = refused("completions", **{field: value})
    assert text in error.message and error.param == field


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (dict(messages=[]), "messages=[]: it must be a list of messages"),
        (dict(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id=None: it"),
        (dict(top_logprobs=2), "top_logprobs requires logprobs=true"),
        (dict(logprobs=True, top_logprobs=4), "top_logprobs=4: it must be at most 3"),
        (dict(max_completion_tokens=2), "max_tokens=1 and max_completion_tokens=2 differ"),
        (dict(max_tokens=0), "max_tokens=0: it must be 1 or more"),
        (dict(n=9), "n=9 is 9 requests, and the queue holds 8"),
    ],
)
def test_wrong_chats_are_refused_by_name(fields, text):
    error = refused("chat/completions", **fields)
    assert text in error.message
    assert error.param.partition("[")[0] in {*fields, "max_tokens"}


USER = {"role": "user", "content": "x"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def called(**fields) -> list[dict]:
    """Returns messages with a call."""
    return [USER, {"role": "assistant", "tool_calls": [CALL, CALL | fields]}]


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("messages", "x", "messages='x': it must be a list of messages such as"),
        ("messages", [USER, "x"], "messages[1]='x': it must be an object"),
        ("messages", [USER | {"content": [5]}], "messages[0].content[0]=5: it must be an object"),
        ("tools", [None], "tools[0]=None: it must be an object"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": {}}},
            "response_format.json_schema.name is missing: it must be a text",
        ),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": "y"}},
            "response_format.json_schema.schema='y': it must be a JSON schema",
        ),
        ("response_format", {"type": "json_schema"}, 'it must be {"type": "text"}'),
        ("messages", [{"content": "x"}], "messages[0].role is missing: it must be system, dev"),
        ("messages", [USER, USER | {"role": "bot"}], "messages[1].role='bot': it must be system, "),
        ("messages", [USER | {"name": 4}], "messages[0].name=4: it must be a text"),
        ("messages", [USER | {"reasoning_content": []}], "messages[0].reasoning_content=[]: it"),
        ("messages", [USER | {"content": 5}], "messages[0].content=5: it must be a text, or a"),
        (
            "messages",
            [USER | {"content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}],
            "messages[0].content[1].type='image_url': it must be text",
        ),
        (
            "messages",
            [USER | {"content": [{"type": "text"}]}],
            "messages[0].content[0].text is missing: it must be a text",
        ),
        (
            "messages",
            [USER | {"content": [{"type": "text", "text": "x", "cache": 1}]}],
            "unknown field 'messages[0].content[0].cache'; supported are type, text",
        ),
        (
            "messages",
            [USER | {"nom": "me"}],
            "unknown field 'messages[0].nom'; supported are role",
        ),
        ("messages", [USER | {"nam": "me"}], "'messages[0].nam'; did you mean 'name'?"),
        ("messages", called(id=None), "messages[1].tool_calls[1].id=None: it must be a text"),
        ("messages", called(type="f"), "messages[1].tool_calls[1].type='f': it must be function"),
        (
            "messages",
            called(function={"name": "f"}),
            "messages[1].tool_calls[1].function.arguments is missing: it must be the JSON text of",
        ),
        (
            "messages",
            called(function={"name": 1, "arguments": "{}"}),
            "messages[1].tool_calls[1].function.name=1: it must be a text",
        ),
        (
            "messages",
            called(function={"name": "f", "arguments": "x"}),
            "messages[1].tool_calls[1].function.arguments='x': it must be the JSON text of an obj",
        ),
        ("tools", [{"type": "function"}], "tools[0].function is missing: it must be an object"),
        (
            "tools",
            [{"type": "function", "function": {"name": "a b"}}],
            "tools[0].function.name='a b': it must be 1 to 64 letters",
        ),
        ("tool_choice", {"type": "function"}, "tool_choice={'type': 'function'}: it must be auto"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage=1: it must be true"),
        ("response_format", {"type": "text", "types": 1}, "'response_format.types'; did you mean"),
    ],
)
def test_wrong_values_within_a_field_are_refused_by_their_path(field, value, text):
    error = refused("chat/completions", **{field: value})
    assert text in error.message and error.param == field


def test_texts_that_cannot_fit_are_refused_before_they_are_tokenized():
    long, parts = "x" * 65, ["x" * 32, "x" * 33]
    chat = [{"role": "user", "content": part} for part in parts]
    for path, fields in (
        ("completions", dict(prompt=long)),
        ("completions", dict(prompt=["x", long])),
        ("chat/completions", dict(messages=[{"role": "user", "content": long}])),
        ("chat/completions", dict(messages=chat)),
        ("chat/completions", dict(chat_template_kwargs={"date": "x" * 64})),
    ):
        error = refused(path, **fields)
        assert (
            "65 characters exceed the 64 tokens of --capacity, which have at most 64"
            in error.message
        )
        assert error.code == "context_length_exceeded" and error.param in ("prompt", "messages")
    assert parse("completions", prompt=["x" * 62] * 2)


@pytest.mark.parametrize("path", PARSERS)
@pytest.mark.parametrize(
    ("field", "value"),
    [("min_tokens", 1), ("bad_words", ["a"]), ("allowed_token_ids", [1]), ("ignore_eos", True)],
)
def test_fields_that_exclude_a_grammar_are_named(path, field, value):
    error = refused(path, response_format={"type": "json_object"}, **{field: value})
    assert error.message.startswith(f"{field} with a grammar may leave no token")
    assert error.param == field


def test_the_engine_limits_what_may_be_asked():
    greedy = dataclasses.replace(CONFIG, logprobs=None, sampling=False)
    for path in PARSERS:
        assert "decoding is greedy" in refused(path, greedy, temperature=0.5).message
        assert parse(path, greedy, n=2).n == 2
        assert parse(path, greedy, temperature=0, top_p=0.5, seed=1).params.greedy
    message = refused("completions", greedy, logprobs=0).message
    assert message == "logprobs=0: it is not supported; omit it"


@pytest.mark.parametrize("path", PARSERS)
def test_values_that_change_nothing_are_accepted(path):
    neutral = bodies.NEUTRAL_CHAT if "chat" in path else bodies.NEUTRAL_COMPLETION
    for name, values in neutral.items():
        for value in (None, *values):
            assert parse(path, **{name: value})
    everything = dict.fromkeys(bodies.WITHOUT_EFFECT, "x")
    assert parse(path, **everything, response_format={"type": "text"}, n=None, stop=None)


def test_an_effort_that_the_template_does_not_read_is_refused():
    path, wrong = "chat/completions", "it must be none, minimal, low, medium, high or xhigh"
    assert parse(path, reasoning_effort=None)
    error = refused(path, reasoning_effort="high")
    assert error.message == ("reasoning_effort='high': the chat template does not read it: omit it")
    assert (error.param, error.code) == ("reasoning_effort", "unsupported_parameter")
    assert refused(path, reasoning_effort="most").message == f"reasoning_effort='most': {wrong}"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("thinking", "which the chat template does not read"),
        ("messages", "which is reserved"),
        ("add_generation_prompt", "which is reserved"),
    ],
)
def test_variables_that_cannot_be_passed_to_the_template_are_refused(name, reason):
    error = refused("chat/completions", chat_template_kwargs={name: 1})
    assert error.message == f"chat_template_kwargs has {name!r}, {reason}: omit it"
    assert (error.param, error.code) == ("chat_template_kwargs", "unsupported_parameter")


def test_fields_are_parameters_of_the_text():
    given = dict(
        min_p=0.1,
        top_n_sigma=1.5,
        repetition_penalty=1.2,
        frequency_penalty=-0.5,
        presence_penalty=2,
    )
    given |= dict(allowed_token_ids=[3, 1], bad_words=["a"], min_tokens=4, ignore_eos=True)
    given |= dict(speculative=False, stop_token_ids=[5, 2], thinking_token_budget=7)
    for path in PARSERS:
        params = parse(path, max_tokens=8, **given, logit_bias={"7": -100, "3": 1.5}).params
        expected = SamplingParams(
            temperature=1.0, max_tokens=8, seed=params.seed, **given, logit_bias={3: 1.5, 7: -100}
        )
        assert params == expected


def test_the_text_of_a_prompt_of_tokens_ends_before_an_incomplete_character():
    """The answer begins with it."""
    model, tokenizer = served(), small_tokenizers.make("byte-level")
    model.target.tokenizer, model.target.config.vocab_size = tokenizer, len(tokenizer)
    ids = tokenizer("a ⌘")["input_ids"]  # a token for each byte of the last character

    def echo(prompt):
        body = dict(prompt=prompt, echo=True, max_tokens=1)
        return protocol.parse_completion(json.dumps(body).encode(), model).echo

    assert echo([ids, ids[:-1], ids[:-2]]) == ["a ⌘", "a ", "a "]
    assert echo(["a ⌘", "<s>"]) == ["a ⌘", "<s>"]  # as it was sent


def test_an_answer_can_be_sent_back_as_the_client_dumps_it():
    answer = {"role": "assistant", "content": "hi", "refusal": None, "annotations": []}
    answer |= {"audio": None, "function_call": None, "tool_calls": None, "reasoning_content": None}
    assert parse("chat/completions", messages=[*CHAT["messages"], answer, *CHAT["messages"]])


def test_calls_that_a_client_joined_from_chunks_can_be_sent_back():
    call = {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    messages = [
        {"role": "user", "content": "x", "name": "me"},
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "f it is"},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "2"},
    ]
    asked, called, result = tool_calls.template_messages(
        bodies.parse_chat({"messages": messages}).messages
    )
    assert asked["name"] == "me" and called["reasoning_content"] == "f it is"
    function = {"name": "f", "arguments": {}}
    assert called["tool_calls"] == [{"id": "1", "type": "function", "function": function}]
    assert result == dict(role="tool", content="2", tool_call_id="1", name="f")


def test_reasoning_is_apart_from_the_answer():
    new = NewTokens(np.zeros(1, np.int32), "Hello!", None, "Hm.")
    answer = responses.ChoiceBuilder(chat=True, stream=False, token_texts=str)
    (choice,) = answer.choices(0, new, "eos")
    assert choice["message"] == dict(role="assistant", content="Hello!", reasoning_content="Hm.")
    (chunk,) = dataclasses.replace(answer, stream=True).choices(0, new, None)
    assert chunk["delta"] == dict(content="Hello!", reasoning_content="Hm.")


def test_settings_that_agree_are_accepted():
    same = parse("chat/completions", max_tokens=2, max_completion_tokens=2, top_logprobs=0)
    assert same.params.max_tokens == 2 and same.params.logprobs is None


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff", b'"\\ud800"', b"[" * 10_000, b'{"n": NaN, "prompt": "x"}']
    + [b'{"prompt": "\\udc00"}', b'{"prompt": "x", "seed": ' + b"9" * 5_000 + b"}"],
)
@pytest.mark.parametrize("path", PARSERS)
def test_what_is_not_a_json_object_is_refused(path, data):
    with pytest.raises(ApiError) as raised:
        PARSERS[path](data, served())
    assert raised.value.status == 400 and "the body" in raised.value.message


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(), x, max_size=3)
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "x"]), VALUES | st.just("user"))
)
TOOLS = st.lists(
    st.builds(
        lambda name, schema, strict: {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object"} | schema, "strict": strict},
        },
        st.sampled_from("fgh"),
        st.dictionaries(st.sampled_from(["properties", "required", "pattern", "x"]), VALUES),
        st.booleans(),
    ),
    max_size=2,
)
RULES = st.dictionaries(st.integers(-2, 90).map(str), st.floats(-120, 120)) | st.lists(
    st.integers(-2, 90) | st.text(max_size=4), max_size=4
)
FIELDS = st.dictionaries(
    st.sampled_from(
        [*bodies.CompletionBody.model_fields, *bodies.ChatBody.model_fields]
        + [*bodies.NEUTRAL_COMPLETION, *bodies.NEUTRAL_CHAT]
    )
    | st.text(),
    VALUES | MESSAGES | RULES | st.integers(0, 4) | st.floats(-3, 3),
    max_size=5,
)
BODIES = st.binary() | st.builds(
    lambda base, fields: json.dumps(base | fields).encode(),
    st.sampled_from([{}, CHAT, TEXT]),
    FIELDS | st.fixed_dictionaries({"tools": TOOLS, "tool_choice": st.just("required") | VALUES}),
)


@pytest.mark.parametrize("path", PARSERS)
@settings(max_examples=50)
@given(data=BODIES)
def test_any_body_is_a_request_or_the_clients_error(path, data):
    try:
        assert isinstance(PARSERS[path](data, served()), Generation)
    except ApiError as error:
        assert 400 <= error.status < 500
        json.dumps(error.body())


@pytest.fixture(scope="module")
def server(directory):
    engine = serving.make_engine(serving.target_of(directory), max_tokens=16)
    with serving.running(engine) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("path", PARSERS)
@settings(max_examples=1000)
@given(data=BODIES)
def test_no_body_is_a_server_error(server, path, data):
    response = server.post(path, content=data, headers={"Content-Type": "application/json"})
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert server.worker.error is None
