"""Answers in channels, as gpt-oss writes them: only the final channel is content."""

import copy

import pytest

from tests.magicjax import tiny
from tests.magicjax.server import serving
from tests.magicjax.small_tokenizers import ANSWER, ASKED, with_channels

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant"
)
FINAL, ANALYSIS = "Hello!", "A greeting. 你"


@pytest.fixture(scope="module")
def tokenizer():
    made = copy.deepcopy(with_channels())
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def client(tokenizer):
    target = tiny.reciting(tokenizer(f"{ASKED}{ANSWER}</s>")["input_ids"], tokenizer)
    with serving.running(serving.make_engine(target, capacity=128)) as server:
        yield server.client()


@pytest.fixture(scope="module")
def usage(tokenizer):
    """The tokens of (the prompt, the answer), those of all channels and EOS included."""
    return tuple(len(tokenizer(text)["input_ids"]) for text in (ASKED, f"{ANSWER}</s>"))


def chat(client, **options):
    options = dict(model=serving.NAME, temperature=0) | options
    return client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **options)


def test_content_is_the_final_channel(client, usage):
    answer = chat(client)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.reasoning_content) == (FINAL, ANALYSIS)
    assert choice.finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == usage


def test_streamed_pieces_are_of_one_channel_and_add_up(client, usage):
    *chunks, last = chat(client, stream=True, stream_options={"include_usage": True})
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == usage
    content = reasoning = ""
    for chunk in chunks:
        delta = chunk.choices[0].delta
        more = getattr(delta, "reasoning_content", None) or ""
        assert not (more and content)  # the answer comes last
        content, reasoning = content + (delta.content or ""), reasoning + more
    assert (content, reasoning) == (FINAL, ANALYSIS)
    assert sum("reasoning_content" in chunk.choices[0].delta.model_extra for chunk in chunks) > 1
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_an_answer_that_is_cut_before_its_final_channel_has_no_content(client):
    (choice,) = chat(client, max_tokens=16).choices
    assert choice.message.content == "" and choice.finish_reason == "length"
    assert ANALYSIS.startswith(choice.message.reasoning_content)


def test_the_text_of_a_completion_is_the_final_channel(client):
    options = dict(model=serving.NAME, prompt=ASKED, temperature=0, max_tokens=80)
    (choice,) = client.completions.create(**options).choices
    assert (choice.text, choice.reasoning_content) == (FINAL, ANALYSIS)
    pieces = [chunk.choices[0] for chunk in client.completions.create(stream=True, **options)]
    assert "".join(piece.text for piece in pieces) == FINAL
    assert "".join(piece.model_extra.get("reasoning_content", "") for piece in pieces) == ANALYSIS
