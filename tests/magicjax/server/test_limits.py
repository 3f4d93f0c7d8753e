"""Keys, limits, full queues, clients that disconnect, draining, and a device that fails."""

import http.client
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.magicjax.server import serving
from tests.magicjax.server.serving import NAME, paused, running, slow, until

KEY = "a key of 16 byte"
MAX_BYTES = 20_000
BASIC = {"Authorization": f"Basic {KEY}"}
LONG = {"prompt": "def add(", "max_tokens": 128, "seed": 1}


@pytest.fixture(scope="module")
def engine(directory):
    target = serving.target_of(directory)
    return serving.make_engine(target, eos_token_id=[], rounds_per_step=1)


@pytest.fixture(scope="module")
def server(engine):
    with running(engine, max_body_bytes=MAX_BYTES) as made:
        yield made


def connect(server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), serving.SECONDS)


def message(response: httpx.Response) -> str:
    return response.json()["error"]["message"]


def test_requests_need_the_key(engine):
    with running(engine, api_key=KEY) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, BASIC):
            for response in (
                server.post("completions", json=LONG, headers=headers),
                httpx.get(f"{server.url}/v1/models", headers=headers),
            ):
                assert response.status_code == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert response.json()["error"]["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            server.client().models.list()
        assert server.client(api_key=KEY).models.list().data
        for scheme in ("bearer", "BEARER", "Bearer "):
            headers = {"Authorization": f"{scheme} {KEY}"}
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_requests_to_other_names_are_refused(engine):
    def get(host: str) -> httpx.Response:
        return httpx.get(f"{server.url}/v1/models", headers={"Host": host})

    with running(engine, allowed_hosts=["Models.Example"]) as server:
        for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "10.0.0.9"):
            assert get(host).status_code == 200
        for host in ("models.example", "MODELS.example.:80"):
            assert get(host).status_code == 200
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "[evil]", ""):
            response = get(host)
            assert response.status_code == 421 and "--allowed-hosts" in message(response)
        assert "'evil.example' is not a name of this server" in message(get("evil.example:8000"))
    with running(engine, allowed_hosts=["*"]) as server:
        assert get("any.example").status_code == 200


def test_web_pages_of_allowed_origins_use_the_server(engine):
    allowed, other = "https://app.example", "https://evil.example"
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    with running(engine, cors_origins=[allowed], api_key=KEY) as server:
        url = f"{server.url}/v1/completions"
        preflight = httpx.options(url, headers=ask | {"Origin": allowed})
        assert preflight.status_code == 200
        assert preflight.headers["Access-Control-Allow-Origin"] == allowed
        assert httpx.options(url, headers=ask | {"Origin": other}).status_code == 400
        refused = server.post("completions", json=LONG, headers={"Origin": allowed})
        assert refused.headers["Access-Control-Allow-Origin"] == allowed
        refused = server.post("completions", json=LONG, headers={"Origin": other})
        assert "Access-Control-Allow-Origin" not in refused.headers


def test_large_bodies_are_refused(server):
    def parts():
        for _ in range(10 * MAX_BYTES // 1000):
            yield b" " * 1000

    headers = {"Content-Type": "application/json"}
    fits = server.post("completions", content=b" " * MAX_BYTES, headers=headers)
    assert fits.status_code == 400 and "not valid JSON" in message(fits)
    response = server.post("completions", content=b" " * (MAX_BYTES + 1), headers=headers)
    assert response.status_code == 413 and str(MAX_BYTES) in message(response)
    response = server.post("completions", content=parts(), headers=headers)
    assert response.status_code == 413


def test_a_body_that_does_not_arrive_is_refused(engine):
    with running(engine, body_s=0.2) as server, connect(server) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        response = client.makefile("rb").read()  # until the server closes the connection
        assert response.startswith(b"HTTP/1.1 408 ") and b"within 0.2 s" in response


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\n"])
def test_connections_without_a_request_are_closed(engine, sent):
    with running(engine, keep_alive_s=1) as server, connect(server) as client:
        client.sendall(sent)
        assert client.recv(100) == b""


@pytest.mark.slow
def test_a_connection_is_kept_for_later_requests(engine):
    with running(engine, keep_alive_s=1) as server:
        client = http.client.HTTPConnection(server.url.removeprefix("http://"))
        headers = {"Content-Type": "application/json"}
        with paused(server.worker):
            client.request("POST", "/v1/completions", json.dumps(LONG), headers)
            first = client.sock
            time.sleep(1.5)  # longer than an idle connection lasts
        assert client.getresponse().read()
        client.request("GET", "/health")
        assert client.getresponse().status == 200 and client.sock is first


def test_connections_are_limited(engine):
    with running(engine, max_connections=1) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        until(lambda: not server.server.server_state.connections)
        with connect(server):
            until(lambda: len(server.server.server_state.connections) == 1)
            assert httpx.get(f"{server.url}/health").status_code == 503


def test_open_requests_of_a_client_are_limited(engine):
    with running(engine, max_requests_per_client=1) as server, slow(engine):
        stream = server.client().completions.create(model=NAME, stream=True, **LONG)
        next(stream)
        response = server.post("completions", json=LONG)
        assert response.status_code == 429 and response.headers["Retry-After"] == "1"
        assert "127.0.0.1 has 1 open requests" in message(response)
        assert httpx.get(f"{server.url}/health").status_code == 200
        stream.close()
        until(lambda: httpx.get(f"{server.url}/v1/models").status_code == 200)


def test_other_types_methods_and_paths_are_refused(server):
    typed = server.post("completions", content=json.dumps(LONG), headers={"Content-Type": "a/b"})
    assert typed.status_code == 415 and "application/json" in message(typed)
    assert httpx.get(f"{server.url}/v1/completions").status_code == 405
    response = server.post("embeddings", json={})
    assert response.status_code == 404 and message(response) == (
        "'/v1/embeddings' does not exist: use one of /v1/completions, /v1/chat/completions, "
        "/v1/models, /v1/models/{name}, /health, /metrics, /status, /"
    )


def test_a_full_queue_is_429(server):
    with ThreadPoolExecutor(8) as pool, paused(server.worker):
        waiting = [
            pool.submit(server.post, "completions", json=LONG | {"max_tokens": 4})
            for _ in range(serving.QUEUE)
        ]
        until(lambda: server.worker.num_jobs == serving.QUEUE)
        refused = pool.submit(server.post, "completions", json=LONG)
        until(lambda: server.worker.num_jobs == serving.QUEUE + 1)
    assert [request.result().status_code for request in waiting] == [200] * serving.QUEUE
    response = refused.result()
    assert response.status_code == 429 and response.headers["Retry-After"] == "1"
    assert response.json()["error"]["code"] == "queue_full"
    assert server.worker.num_jobs == 0


def test_several_prompts_are_queued_together_or_not_at_all(server):
    cancelled = server.engine.stats.finished["cancelled"]
    with ThreadPoolExecutor(8) as pool, paused(server.worker):
        first = pool.submit(server.post, "completions", json=LONG | {"max_tokens": 4, "n": 2})
        until(lambda: server.worker.num_jobs == 1)
        body = LONG | {"prompt": ["a", "b", "c"]}
        second = pool.submit(server.post, "completions", json=body)
        until(lambda: server.worker.num_jobs == 2)
    assert first.result().status_code == 200
    assert second.result().status_code == 429
    assert server.engine.stats.finished["cancelled"] == cancelled + 2


def test_a_stream_that_is_closed_frees_its_slot(server):
    cancelled = server.engine.stats.finished["cancelled"]
    with slow(server.engine):
        stream = server.client().completions.create(model=NAME, stream=True, n=2, **LONG)
        next(iter(stream))
        assert server.worker.num_jobs == 1
        stream.close()
        until(lambda: server.engine.stats.finished["cancelled"] == cancelled + 2)
    assert server.worker.num_jobs == 0


def test_a_client_that_does_not_wait_frees_its_slot(server):
    ended = server.engine.stats.finished["length"]
    client = http.client.HTTPConnection(server.url.removeprefix("http://"))
    headers = {"Content-Type": "application/json"}
    with slow(server.engine):
        client.request("POST", "/v1/completions", json.dumps(LONG), headers)
        until(lambda: server.worker.num_jobs == 1)
        client.close()
        until(lambda: server.worker.num_jobs == 0)
        until(lambda: not server.engine.unfinished)
    assert server.engine.stats.finished["length"] == ended


def test_a_reader_that_is_slow_stops_nobody(server):
    stream = server.client().completions.create(model=NAME, stream=True, **LONG)
    texts = [server.post("completions", json=LONG).json()["choices"][0]["text"] for _ in range(2)]
    assert [*{*texts}] == ["".join(chunk.choices[0].text for chunk in stream)]


def test_draining_ends_with_the_running_requests(engine):
    with running(engine, drain_s=serving.SECONDS) as server, slow(engine):
        body = LONG | {"max_tokens": 32}
        stream = server.client().completions.create(model=NAME, stream=True, **body)
        first = next(stream).choices[0].text
        with paused(server.worker):
            server.server.draining = True
            until(lambda: server.worker.draining)
            response = server.post("completions", json=LONG)
            assert response.status_code == 503 and "shutting down" in message(response)
            assert httpx.get(f"{server.url}/health").status_code == 503
        chunks = [chunk.choices[0] for chunk in stream]
        assert chunks[-1].finish_reason == "length" and first
        server.thread.join(serving.SECONDS)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_draining_cancels_what_takes_too_long(engine):
    with (
        running(engine, drain_s=0.1) as server,
        slow(engine, 0.2),
        ThreadPoolExecutor(1) as pool,
    ):
        stream = server.client().completions.create(model=NAME, stream=True, **LONG)
        next(stream)
        whole = pool.submit(server.post, "completions", json=LONG)
        until(lambda: server.worker.num_jobs == 2)
        server.server.draining = True
        with pytest.raises(openai.APIError, match="shutting down"):
            for _ in stream:
                pass
        assert whole.result().status_code == 503


def test_health_fails_while_the_engine_is_stalled(engine):
    def state() -> tuple[int, str]:
        response = httpx.get(f"{server.url}/health")
        return response.status_code, response.json()["status"]

    with running(engine, stall_s=0.3) as server, ThreadPoolExecutor(1) as pool:
        time.sleep(0.5)  # without requests there is no progress either
        assert state() == (200, "ok")
        with paused(server.worker):
            request = pool.submit(server.post, "completions", json=LONG)
            until(lambda: state() == (503, "stalled"))
        assert request.result().status_code == 200
        assert state() == (200, "ok")


def test_health_fails_without_the_thread_of_the_engine(engine):
    with running(engine) as server:
        server.worker._commands.put(server.worker._stop)
        until(lambda: httpx.get(f"{server.url}/health").json() == {"status": "failed"})


def test_a_failed_step_is_500_for_all_and_ends_the_server(engine):
    def fail() -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with running(engine) as server, slow(engine), ThreadPoolExecutor(1) as pool:
        stream = server.client().completions.create(model=NAME, stream=True, **LONG)
        next(stream)
        with paused(server.worker):
            whole = pool.submit(server.post, "completions", json=LONG)
            until(lambda: server.worker.num_jobs == 2)
            engine.step = fail
        with pytest.raises(openai.APIError, match="the engine has failed"):
            for _ in stream:
                pass
        assert whole.result().status_code == 500
        assert "the engine has failed" in message(whole.result())
        server.thread.join(serving.SECONDS)
        assert isinstance(server.worker.error, RuntimeError)


@pytest.mark.slow
def test_clients_that_die_change_no_other_texts(server):
    bodies = [LONG | {"seed": seed, "temperature": seed % 2} for seed in range(20)]
    expected = [server.post("completions", json=body).json()["choices"] for body in bodies]
    client = server.client(max_retries=100)

    def die(index: int) -> None:
        stream = client.completions.create(
            model=NAME, prompt=f"x{index} = ", max_tokens=128, stream=True
        )
        for count, _ in enumerate(stream):
            if count == index % 7:
                stream.close()
                return

    def ask(index: int) -> list[dict]:
        text = client.completions.create(model=NAME, **bodies[index % len(bodies)])
        return [choice.model_dump() for choice in text.choices]

    with slow(server.engine, 0.002), ThreadPoolExecutor(12) as dying, ThreadPoolExecutor(2) as pool:
        deaths = [dying.submit(die, index) for index in range(200)]
        answers = [pool.submit(ask, index) for index in range(60)]
        for index, answer in enumerate(answers):
            found, wanted = answer.result(), expected[index % len(bodies)]
            assert [c["text"] for c in found] == [c["text"] for c in wanted]
        for death in deaths:
            death.result()
    until(lambda: server.worker.num_jobs == 0)
    stats = server.engine.stats
    assert stats.running == stats.waiting == 0 and stats.finished["cancelled"] >= 50
