"""Answers of models that reason: in channels (gpt-oss), or between <think> and </think>."""

import contextlib
import functools
import json
import re

import openai
import pytest

from magicjax.decoding.prompts import chat_tokens
from tests.magicjax import tiny
from tests.magicjax.server import serving
from tests.magicjax.small_tokenizers import (
    ANSWER,
    DEEPSEEK,
    QWEN3,
    with_channels,
    with_thinking,
)
from tests.quick import quick

FINAL, ANALYSIS = "Hello!", "A greeting. 你"
THINKING = f"<think>\n{ANALYSIS}\n</think>\n\n"
ARGUMENTS = '{"x": 1}'
CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
# The format of calls is detected in a comment.
RENDERED = '{#<tool_call>"arguments"#}{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}'
USER = {"role": "user", "content": "hi"}
KINDS = {  # the tokenizer with a chat template, and the answer to `USER`
    "channels": (with_channels(), ANSWER),
    "thinking": (with_thinking(), f"{THINKING}{FINAL}"),
    "thinking in the prompt": (
        with_thinking("added", DEEPSEEK),
        f"{ANALYSIS}\n</think>\n\n{FINAL}",
    ),
    "tools": (with_thinking("added", RENDERED + QWEN3), f"{THINKING}{CALL}"),
    "tools at once": (with_thinking("added", RENDERED + DEEPSEEK), CALL),
}
BOTH = pytest.mark.parametrize("kind", quick([*KINDS][:3], "channels"))


def prompt_of(kind: str, **options) -> list[int]:
    tools = TOOLS if kind.startswith("tools") else None
    return chat_tokens(KINDS[kind][0], [USER | options.pop("message", {})], options, tools)


@pytest.fixture(scope="module")
def client_of():
    """Returns a client of a server of a model that gives the answer of a kind."""
    with contextlib.ExitStack() as servers:

        @functools.cache
        def client(kind):
            tokenizer, answer = KINDS[kind]
            text = [*prompt_of(kind), *tokenizer(f"{answer}</s>")["input_ids"]]
            engine = serving.make_engine(tiny.reciting(text, tokenizer), capacity=128)
            return servers.enter_context(serving.running(engine)).client()

        yield client


def usage(kind: str) -> tuple[int, int]:
    """Returns the tokens of (the prompt, the answer), those of reasoning and EOS included."""
    tokenizer, answer = KINDS[kind]
    return len(prompt_of(kind)), len(tokenizer(f"{answer}</s>")["input_ids"])


def chat(client, content: str = USER["content"], **options):
    options = dict(model=serving.NAME, temperature=0) | options
    return client.chat.completions.create(messages=[USER | {"content": content}], **options)


def reasoning_of(message) -> str | None:
    return (message.model_extra or {}).get("reasoning_content")


@BOTH
def test_content_is_the_answer(kind, client_of):
    answer = chat(client_of(kind), logprobs=True)
    (choice,) = answer.choices
    assert (reasoning_of(choice.message), choice.message.content) == (ANALYSIS, FINAL)
    assert choice.finish_reason == "stop" and len(choice.logprobs.content) == usage(kind)[1]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == usage(kind)


@BOTH
def test_streamed_pieces_are_of_one_part_and_add_up(kind, client_of):
    options = dict(stream_options={"include_usage": True}, logprobs=True)
    *chunks, last = chat(client_of(kind), stream=True, **options)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == usage(kind)
    content, pieces, logprobs = "", [], []
    for chunk in chunks:
        (choice,) = chunk.choices
        logprobs += choice.logprobs.content if choice.logprobs else []
        if reasoning := reasoning_of(choice.delta):
            assert not content  # the answer comes last
            pieces.append(reasoning)
        content += choice.delta.content or ""
    assert ("".join(pieces), content) == (ANALYSIS, FINAL)
    assert len(pieces) > 1 and len(logprobs) == usage(kind)[1]
    assert chunks[-1].choices[0].finish_reason == "stop"


@BOTH
def test_an_answer_that_is_cut_within_its_reasoning_has_no_content(kind, client_of):
    (choice,) = chat(client_of(kind), max_tokens=16 if kind == "channels" else 8).choices
    assert choice.message.content == "" and choice.finish_reason == "length"
    reasoning = reasoning_of(choice.message)
    assert reasoning and reasoning != ANALYSIS and ANALYSIS.startswith(reasoning)


@BOTH
@pytest.mark.slow
def test_a_completion_of_the_prompt_of_a_chat_is_divided_too(kind, client_of):
    options = dict(model=serving.NAME, prompt=prompt_of(kind), temperature=0, max_tokens=80)
    client = client_of(kind)
    (choice,) = client.completions.create(**options).choices
    assert (choice.text, choice.reasoning_content) == (FINAL, ANALYSIS)
    pieces = [chunk.choices[0] for chunk in client.completions.create(stream=True, **options)]
    assert "".join(piece.text for piece in pieces) == FINAL
    assert "".join(reasoning_of(piece) or "" for piece in pieces) == ANALYSIS


@pytest.mark.slow
def test_an_answer_without_thinking_is_content_at_once(client_of):
    off = {"enable_thinking": False}
    # The model says what follows so many tokens: a longer message takes the place of reasoning.
    end = len(prompt_of("thinking")) + len(with_thinking()(THINKING)["input_ids"])
    contents = ("a" * n for n in range(end))
    longer = next(
        x for x in contents if len(prompt_of("thinking", message={"content": x}, **off)) == end
    )
    options = dict(extra_body={"chat_template_kwargs": off})
    (choice,) = chat(client_of("thinking"), longer, **options).choices
    assert (reasoning_of(choice.message), choice.message.content) == (None, FINAL)
    chunks = [*chat(client_of("thinking"), longer, stream=True, **options)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == FINAL
    assert not any(reasoning_of(chunk.choices[0].delta) for chunk in chunks)


@pytest.mark.parametrize(
    ("kind", "options", "reasoning"),
    [
        ("tools", {}, ANALYSIS),
        ("tools", dict(extra_body={"min_tokens": 1}), ANALYSIS),  # calls are not constrained
        pytest.param("tools at once", {}, None, marks=pytest.mark.slow),
        ("tools", dict(tool_choice="required"), ANALYSIS),
    ],
)
def test_calls_after_reasoning(kind, options, reasoning, client_of):
    options = dict(tools=TOOLS) | options
    (choice,) = chat(client_of(kind), **options).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert reasoning_of(choice.message) == reasoning
    assert (call.function.name, call.function.arguments) == ("f", ARGUMENTS)
    thoughts, arguments, content = "", "", ""
    for chunk in chat(client_of(kind), stream=True, **options):
        delta = chunk.choices[0].delta
        thoughts, content = thoughts + (reasoning_of(delta) or ""), content + (delta.content or "")
        assert not (thoughts and arguments and reasoning_of(delta))
        arguments += "".join(call.function.arguments for call in delta.tool_calls or ())
    assert (thoughts or None, json.loads(arguments), content) == (reasoning, {"x": 1}, "")


@pytest.mark.parametrize("kind", quick([*KINDS][1:3], "thinking"))
@pytest.mark.slow
def test_a_budget_ends_the_reasoning(kind, client_of):
    tokenizer = KINDS[kind][0]
    begin = "" if kind == "thinking in the prompt" else "<think>\n"
    tokens = tokenizer(f"{begin}{ANALYSIS}")["input_ids"][: 4 + bool(begin)]
    (choice,) = chat(client_of(kind), extra_body={"thinking_token_budget": 4}).choices
    begun = tokenizer.decode(tokens).removeprefix(begin)
    assert begun and begun != ANALYSIS and reasoning_of(choice.message) == begun.rstrip("\n")


def test_a_budget_of_a_model_without_thinking_is_refused(client_of):
    with pytest.raises(openai.BadRequestError, match="requires a tokenizer with the tokens"):
        chat(client_of("channels"), extra_body={"thinking_token_budget": 4})


@BOTH
@pytest.mark.slow
def test_a_grammar_constrains_the_content(kind, client_of):
    regex = {"type": "regex", "regex": "[a-z]{3}"}
    client = client_of(kind)
    options = dict(seed=1, extra_body={"response_format": regex})  # of equally likely letters
    (choice,) = chat(client, **options).choices
    assert re.fullmatch("[a-z]{3}", choice.message.content) and choice.finish_reason == "stop"
    assert reasoning_of(choice.message) == ANALYSIS
    deltas = [chunk.choices[0].delta for chunk in chat(client, stream=True, **options)]
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert "".join(reasoning_of(delta) or "" for delta in deltas) == ANALYSIS


def test_a_grammar_constrains_all_text_without_thinking(client_of):
    regex = {"type": "regex", "regex": "[a-z]{3}"}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    (choice,) = chat(client_of("thinking"), extra_body=off | {"response_format": regex}).choices
    assert re.fullmatch("[a-z]{3}", choice.message.content)
    assert reasoning_of(choice.message) is None
