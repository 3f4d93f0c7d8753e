"""OpenAI's client, unchanged: its answers are the texts of `magicjax.generate`."""

import json
import logging
import re

import httpx
import numpy as np
import openai
import pytest

import magicjax
from magicjax.decoding.detokenizer import token_texts
from magicjax.decoding.prompts import chat_tokens
from tests.magicjax import keywords
from tests.magicjax.server import serving
from tests.magicjax.server.serving import NAME, NEW, until

PROMPTS = ["def add(first, second):", "    return first"]
MESSAGES = [{"role": "system", "content": "short"}, {"role": "user", "content": "def add("}]
SAMPLED = dict(temperature=0.9, top_p=0.95)


@pytest.fixture(scope="module")
def target(directory):
    return serving.target_of(directory)


@pytest.fixture(scope="module")
def server(target):
    with serving.running(serving.make_engine(target)) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def generate(target, prompt, seed=None, **options) -> magicjax.Output:
    sampling = {} if seed is None else SAMPLED | dict(seed=seed)
    drafting = dict(drafter=magicjax.PromptLookup(), tree=magicjax.chain(4))
    options = dict(max_tokens=NEW) | sampling | drafting | options
    return keywords.generate(target, [prompt], **options)


def text(target, prompt, seed=None, **options) -> str:
    return generate(target, prompt, seed, **options).texts[0]


def completion(client, prompt, **options):
    options = dict(model=NAME, max_tokens=NEW, temperature=0) | options
    return client.completions.create(prompt=prompt, **options)


def chat(client, **options):
    options = dict(model=NAME, max_tokens=NEW, temperature=0, messages=MESSAGES) | options
    return client.chat.completions.create(**options)


def test_greedy_texts_are_those_of_generate(target, client):
    expected = [text(target, prompt) for prompt in PROMPTS]
    assert len({*expected}) == 2
    ids = [target.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    for prompt in (PROMPTS[0], [PROMPTS[0]], ids[0], [ids[0]]):
        answer = completion(client, prompt)
        assert [choice.text for choice in answer.choices] == expected[:1]
    for prompt in (PROMPTS, ids):
        answer = completion(client, prompt, top_p=0.5, seed=4)  # nothing to sample
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.object == "text_completion" and answer.model == NAME


@pytest.mark.slow
def test_sampled_texts_are_those_of_generate_with_the_seed(target, client):
    expected = [text(target, PROMPTS[0], seed) for seed in (3, 4, 5)]
    assert len({*expected}) == 3
    answer = completion(client, PROMPTS[0], n=3, seed=3, **SAMPLED)
    assert [choice.text for choice in answer.choices] == expected
    again = completion(client, PROMPTS[0], seed=3 - 2**32, **SAMPLED)
    assert again.choices[0].text == expected[0]


def test_the_smallest_nucleus_is_the_most_likely_token(target, client):
    answer = completion(client, PROMPTS[0], temperature=0.9, top_p=0)
    assert answer.choices[0].text == text(target, PROMPTS[0])


def test_requests_without_a_seed_differ(client):
    texts = {completion(client, PROMPTS[0], temperature=None).choices[0].text for _ in range(3)}
    assert len(texts) > 1


@pytest.mark.slow
def test_a_chat_is_answered_in_the_template(target, client):
    prompt = np.array(chat_tokens(target.tokenizer, MESSAGES))
    assert target.tokenizer.decode(prompt) == "[system]short[user]def add([assistant]"
    answer = chat(client)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == text(target, prompt)
    parts = [{"type": "text", "text": "def "}, {"type": "text", "text": "add("}]
    again = chat(client, messages=[MESSAGES[0], {"role": "user", "content": parts}])
    assert again.choices[0].message.content == choice.message.content
    named = [message | {"name": "Ada", "reasoning_content": "Hm."} for message in MESSAGES]
    dropped = chat(client, messages=named)  # the template does not read them
    assert dropped.usage.prompt_tokens == answer.usage.prompt_tokens
    assert dropped.choices[0].message.content == choice.message.content


def test_variables_of_the_template(target, client):
    def answer(**variables):
        return chat(client, extra_body={"chat_template_kwargs": variables})

    thinking = np.array(chat_tokens(target.tokenizer, MESSAGES, {"enable_thinking": True}))
    assert target.tokenizer.decode(thinking).endswith("[assistant]<think>")
    choice = answer(enable_thinking=True).choices[0]
    assert choice.message.content == text(target, thinking)
    without = answer(enable_thinking=False).choices[0].message.content
    assert without == chat(client).choices[0].message.content != choice.message.content
    for name, reason in (
        ("thinking", "the chat template does"),
        ("enable", "the chat template does"),
        ("tokenize", "is reserved"),
    ):
        with pytest.raises(openai.BadRequestError, match=f"'{name}', which {reason}"):
            answer(**{name: True})


def test_the_effort_is_a_variable_of_the_template(target, client):
    thinking = np.array(chat_tokens(target.tokenizer, MESSAGES, {"reasoning_effort": "high"}))
    assert target.tokenizer.decode(thinking).endswith("[assistant]<high>")
    high = chat(client, reasoning_effort="high").choices[0].message.content
    assert high == text(target, thinking) != chat(client).choices[0].message.content
    body = {"chat_template_kwargs": {"reasoning_effort": "high"}}  # has precedence
    assert chat(client, reasoning_effort="low", extra_body=body).choices[0].message.content == high


def test_lines_of_a_stream_end_at_line_feeds_only(target, server):
    """Clients that divide text with str.splitlines see whole events, as those of httpx do."""
    ends = "a\u0085b\u2028c\u2029d"
    body = dict(prompt="x", max_tokens=40, temperature=0, stream=True)
    body["response_format"] = {"type": "regex", "regex": ends}
    url, seconds = f"{server.url}/v1/completions", serving.SECONDS
    with httpx.stream("POST", url, json=body, timeout=seconds) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]
    assert "".join(pieces) == ends


@pytest.mark.slow
def test_the_counts_of_tokens_are_those_of_the_loop(target, client):
    output = generate(target, PROMPTS[0], max_tokens=40)
    usage = completion(client, PROMPTS[0], max_tokens=40).usage
    assert usage.prompt_tokens == len(target.tokenizer(PROMPTS[0])["input_ids"])
    assert usage.completion_tokens == output.lengths[0]
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.completion_tokens_details
    accepted = output.stats.emitted - output.stats.target_passes
    assert 0 < details.accepted_prediction_tokens == accepted <= output.stats.accepted
    drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens
    assert drafted == output.stats.drafted > 0
    several = completion(client, PROMPTS[0], n=2, seed=1, **SAMPLED).usage
    assert several.prompt_tokens == usage.prompt_tokens  # of n samples it counts once


def test_streamed_completions_add_up(target, client):
    chunks = [*completion(client, PROMPTS, stream=True, stream_options={"include_usage": True})]
    *pieces, last = chunks
    assert all(chunk.id == last.id and chunk.object == "text_completion" for chunk in chunks)
    assert all(chunk.usage is None for chunk in pieces) and last.choices == []
    assert last.usage == completion(client, PROMPTS).usage or last.usage.prompt_tokens
    for index, prompt in enumerate(PROMPTS):
        choice_chunks = [c for chunk in pieces for c in chunk.choices if c.index == index]
        assert "".join(choice.text for choice in choice_chunks) == text(target, prompt)
        assert [choice.finish_reason for choice in choice_chunks[:-1]] == [None] * (
            len(choice_chunks) - 1
        )
        assert choice_chunks[-1].finish_reason == "length"


def test_streamed_chats_add_up(client):
    whole = chat(client, n=2, seed=6, **SAMPLED)
    chunks = [*chat(client, n=2, seed=6, stream=True, **SAMPLED)]
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    for choice in whole.choices:
        choice_chunks = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert choice_chunks[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in choice_chunks) == choice.message.content
        assert choice_chunks[-1].finish_reason == choice.finish_reason


def test_texts_end_before_a_stop_string(target, client):
    whole = text(target, PROMPTS[0])
    stop = whole[7:10]
    answer = completion(client, PROMPTS[0], stop=[stop, "never said"])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    streamed = [*chat(client, stop=stop, stream=True)]
    assert stop not in "".join(chunk.choices[0].delta.content or "" for chunk in streamed)


@pytest.mark.slow
def test_log_probabilities_are_those_of_generate(target, client):
    output = generate(target, PROMPTS[0], logprobs=2)
    expected = output.logprobs[0]
    tokens = output.tokens[0, : output.lengths[0]]
    answer = completion(client, PROMPTS[0], logprobs=2)
    found = answer.choices[0].logprobs
    np.testing.assert_allclose(found.token_logprobs, expected.chosen, atol=1e-4)
    names = token_texts(target.tokenizer)
    assert found.tokens == [names(int(token)).name for token in tokens]
    for top, logs, tops in zip(found.top_logprobs, expected.top, expected.top_tokens):
        pairs = {names(int(token)).name: log for log, token in zip(logs, tops)}
        assert len(pairs) == 2 and {name: top[name] for name in pairs} == pytest.approx(
            pairs, abs=1e-4
        )
    assert found.text_offset[0] == 0 and any(name.startswith("bytes:") for name in found.tokens)
    for name, start in zip(found.tokens[:-1], found.text_offset[:-1], strict=True):
        assert name.startswith("bytes:") or answer.choices[0].text[start:].startswith(name)
    chunks = [c.choices[0] for c in completion(client, PROMPTS[0], logprobs=2, stream=True)]
    assert [t for c in chunks if c.logprobs for t in c.logprobs.tokens] == found.tokens
    assert [o for c in chunks if c.logprobs for o in c.logprobs.text_offset] == found.text_offset


def test_a_prompt_is_echoed_with_its_log_probabilities(target, server, client):
    tokens = target.tokenizer(PROMPTS[0])["input_ids"]
    alone = completion(client, PROMPTS[0], logprobs=2).choices[0]
    for prompt, text in ((PROMPTS[0], PROMPTS[0]), (tokens, target.tokenizer.decode(tokens))):
        (choice,) = completion(client, prompt, logprobs=2, echo=True).choices
        assert choice.text == text + alone.text
        found, length = choice.logprobs, len(tokens)
        assert found.token_logprobs[0] is found.top_logprobs[0] is None
        assert found.tokens[length:] == alone.logprobs.tokens
        np.testing.assert_allclose(
            found.token_logprobs[length:], alone.logprobs.token_logprobs, atol=1e-4
        )
        check = dict(max_tokens=1, prompt_logprobs=2)
        expected = generate(target, prompt, **check).prompt_logprobs[0]
        np.testing.assert_allclose(found.token_logprobs[1:length], expected.chosen, atol=1e-4)
        assert found.text_offset[0] == 0 and len(found.text_offset) == len(found.tokens)
    (choice,) = completion(client, tokens[:1], logprobs=0, echo=True, max_tokens=1).choices
    assert choice.logprobs.token_logprobs[0] is None and len(choice.logprobs.tokens) == 2
    only = completion(client, tokens, logprobs=0, echo=True, max_tokens=0)
    (choice,) = only.choices
    assert choice.text == target.tokenizer.decode(tokens) and choice.finish_reason == "length"
    assert len(choice.logprobs.tokens) == len(tokens) and only.usage.completion_tokens == 0
    incomplete = target.tokenizer("⌘")["input_ids"][:1]
    (choice,) = completion(client, tokens + incomplete, echo=True, max_tokens=0).choices
    assert choice.text == f"{PROMPTS[0]}\N{REPLACEMENT CHARACTER}"
    capacity = server.engine.config.capacity
    full = completion(client, [5] * capacity, logprobs=0, echo=True, max_tokens=0)
    assert len(full.choices[0].logprobs.tokens) == full.usage.total_tokens == capacity
    for size, limit in ((capacity, 1), (capacity, None), (capacity + 1, 0)):
        with pytest.raises(openai.BadRequestError, match=f"the prompt has {size} tokens"):
            completion(client, [5] * size, echo=True, max_tokens=limit)
    with pytest.raises(openai.BadRequestError, match="echo=true with stream=true"):
        completion(client, PROMPTS[0], echo=True, stream=True)


def test_log_probabilities_of_a_chat(target, client):
    prompt = [int(token) for token in chat_tokens(target.tokenizer, MESSAGES)]
    expected = completion(client, prompt, logprobs=2).choices[0].logprobs
    content = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [c.token for c in content] == expected.tokens
    np.testing.assert_allclose([c.logprob for c in content], expected.token_logprobs, atol=1e-4)
    for one, tops in zip(content, expected.top_logprobs, strict=True):
        assert len(one.top_logprobs) == 2
        assert {top.token for top in one.top_logprobs} <= tops.keys()
        readable = not one.token.startswith("bytes:")
        assert not readable or one.bytes == list(one.token.encode())
    alone = chat(client, logprobs=True).choices[0].logprobs.content
    assert [one.token for one in alone] == [one.token for one in content]
    assert not any(one.top_logprobs for one in alone)


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="the model 'gpt-9' is not served here"):
        completion(client, PROMPTS[0], model="gpt-9")


def test_errors_reach_the_client_in_its_shape(client):
    with pytest.raises(openai.BadRequestError) as raised:
        chat(client, tools=[{"type": "function", "function": {"name": "f"}}])
    error = raised.value.body
    assert error["param"] == "tools" and error["type"] == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="the chat template rejects"):
        chat(client, messages=[{"role": "assistant", "content": "Hello"}])
    with pytest.raises(openai.BadRequestError, match="the prompt has 260 tokens") as raised:
        completion(client, [5] * 260)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="the prompt has ") as raised:
        chat(client, messages=[{"role": "user", "content": "abc " * 100}])
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "messages")


def test_the_access_log_has_a_line_for_each_request(server, client):
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("magicjax.server.access")
    logger.addHandler(handler)
    try:
        prompt_tokens = completion(client, PROMPTS).usage.prompt_tokens
        [*chat(client, stream=True)]
        httpx.get(f"{server.url}/v1/a%0Ab?secret=1")
        completion(client, PROMPTS, echo=True, max_tokens=0)
        until(lambda: len(records) == 4)
    finally:
        logger.removeHandler(handler)
    lines = [record.getMessage() for record in records]
    times = r"ttft_s=\d+\.\d{3} total_s=\d+\.\d{3}"
    tokens = f"prompt_tokens={prompt_tokens} new_tokens={2 * NEW}"
    assert re.fullmatch(rf"127.0.0.1 POST /v1/completions 200 {times} {tokens}", lines[0])
    assert re.match(rf"127.0.0.1 POST /v1/chat/completions 200 {times} prompt_tokens=", lines[1])
    assert lines[1].endswith(f"new_tokens={NEW}")
    assert re.fullmatch(r"127.0.0.1 GET /v1/a%0Ab 404 total_s=\d+\.\d{3}", lines[2])
    tokens = f"prompt_tokens={prompt_tokens} new_tokens=0"
    assert re.fullmatch(rf"\S+ POST /v1/completions 200 total_s=\d+\.\d{{3}} {tokens}", lines[3])


def test_health_status_page_and_metrics(server, client):
    completion(client, PROMPTS[0], max_tokens=40)
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert "EventSource" in httpx.get(server.url).text
    with httpx.stream("GET", f"{server.url}/status") as events:
        line = next(events.iter_lines())
    state = json.loads(line.removeprefix("data: "))
    assert state["model"] == serving.NAME and state["slots"] == serving.SLOTS
    for name in ("queue", "ttft", "tpot", "itl"):
        times = state["times"][name]
        assert 0 <= times["p50"] <= times["p90"] <= times["p99"]
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    of_model = f'model="{serving.NAME}"'
    values = {name.replace(f"{{{of_model}}}", ""): value for name, value in values.items()}
    stats = server.worker.snapshot.stats
    finished = values[f'magicjax_requests_finished_total{{{of_model},reason="length"}}']
    assert float(finished) == stats.finished["length"] > 0
    assert float(values["magicjax_new_tokens_total"]) > 0
    assert float(values["magicjax_loop_tokens_total"]) > float(values["magicjax_rounds_total"])
    assert float(values["magicjax_time_to_first_token_seconds_count"]) > 0
    assert float(values["magicjax_inter_token_latency_seconds_count"]) > 0
    accepted = [
        float(values[f'magicjax_accepted_rounds_total{{depth="{d}",{of_model}}}'])
        for d in (1, 2, 3, 4)
    ]
    assert accepted == sorted(accepted, reverse=True)
    assert sum(accepted) == float(values["magicjax_accepted_tokens_total"]) > 0
