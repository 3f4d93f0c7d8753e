"""What a client measures of a stream, and what it makes of a wrong one."""

import asyncio
import json
import time

import httpx
import pytest

from magicjax.benchmarks.http_load import client as http
from magicjax.benchmarks.http_load.client import OK, Request, Server, send, time_per_token

SERVER = Server("on", "http://host", "tiny")
REQUEST = Request("completions", {"prompt": "a"})
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"accepted_prediction_tokens": 5},
}


def event(value) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def completion(text: str) -> bytes:
    return event({"choices": [{"index": 0, "text": text}]})


def chat(**delta) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta}]})


DONE = b"data: [DONE]\n\n"


class Parts(httpx.AsyncByteStream):
    """A body that arrives in parts."""

    def __init__(self, parts):
        self.parts = parts

    async def __aiter__(self):
        for part in self.parts:
            yield part
            await asyncio.sleep(0.001)


def answered(*parts: bytes, status=200, requests=None) -> http.Sample:
    """Returns the sample of an answer."""

    def answer(request: httpx.Request) -> httpx.Response:
        if requests is not None:
            requests.append(request)
        return httpx.Response(status, stream=Parts(parts))

    async def sample():
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            now = time.perf_counter()
            return await send(client, SERVER, REQUEST, now - 2, now)

    return asyncio.run(sample())


def test_times_and_counts_of_a_stream():
    requests = []
    usage = event({"choices": [], "usage": USAGE})
    sample = answered(
        *(b": a comment\n\n", completion(""), completion("ab"), completion("c"), usage, DONE),
        requests=requests,
    )
    assert sample.status == OK and sample.error == ""
    assert sample.due_s == pytest.approx(2)
    assert 0.002 <= sample.ttft_s < sample.total_s
    assert sample.tpot_s == pytest.approx((sample.total_s - sample.ttft_s) / 4)  # 12 tokens, 1 of 3
    assert (sample.prompt_tokens, sample.cached_tokens) == (7, 4)
    assert (sample.new_tokens, sample.accepted_tokens) == (12, 5)
    assert str(requests[0].url) == "http://host/v1/completions"
    assert json.loads(requests[0].content) == {
        "prompt": "a",
        "model": "tiny",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("parts", "status", "error"),
    [
        ([completion("a")], "cut stream", "without a finish reason"),
        (
            [completion("a"), event({"error": {"message": "no memory"}}), DONE],
            "error in stream",
            "",
        ),
        ([b"data: {\n\n", DONE], "not OpenAI's", "Expecting"),
        ([event([1]), DONE], "not OpenAI's", "get"),
        ([b"<html>"], "cut stream", ""),
    ],
)
def test_wrong_streams_fail(parts, status, error):
    sample = answered(*parts)
    assert sample.status == status and error in sample.error
    assert sample.ttft_s is sample.tpot_s is sample.new_tokens is None


def test_an_error_of_the_server_is_its_message():
    sample = answered(json.dumps({"error": {"message": "the queue\nis full"}}).encode(), status=429)
    assert (sample.status, sample.error) == ("429", "the queue is full")
    sample = answered(b"<html>bad gateway", status=502)
    assert (sample.status, sample.error) == ("502", "<html>bad gateway")


def test_time_per_token_by_hand():
    assert time_per_token([(1.0, 1), (1.5, 1), (2.0, 1)], 2.0, 3) == pytest.approx(0.5)
    assert time_per_token([(1.0, 40), (2.0, 30), (4.0, 30)], 4.0, 20) == pytest.approx(3 / 12)
    assert time_per_token([(1.0, 40)], 1.0, 20) is None
    assert time_per_token([(1.0, 1), (2.0, 1)], 2.0, None) is None
