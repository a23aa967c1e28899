"""/debug/requests: what lives, what ended and how, and what it must not tell."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest

from common.config import GatewayConfig
from common.errors import RequestRejected
from gateway.fake import Script
from gateway.live_requests import MOST_ERROR_CHARS, NUM_ENDED, State, gateway_id
from gateway.text import TextPipeline
from tests.gateway.conftest import MODEL, WAIT_S, LiveServer
from tests.gateway.live import live_gateway
from tests.timings import assert_adds_up

COMPLETION = {"model": MODEL, "prompt": "the quick", "max_tokens": 4}
SECRET = "sesame"


def listed(client: httpx.Client) -> list[dict[str, Any]]:
    answer = client.get("/debug/requests")
    assert answer.status_code == 200
    body = answer.json()
    assert body["gateway"] == gateway_id()
    assert abs(body["now_s"] - time.time()) < WAIT_S
    requests: list[dict[str, Any]] = body["requests"]
    return requests


def of(answer: httpx.Response, client: httpx.Client) -> list[dict[str, Any]]:
    """Return what is told of a call when it is over; its answer comes a moment before."""
    while True:
        records = [one for one in listed(client) if one["id"] == answer.headers["x-request-id"]]
        if all(one["outcome"] is not None for one in records):
            return records


def test_an_answer_and_its_record_agree(client: httpx.Client) -> None:
    before_s = time.time()
    answer = client.post("/v1/completions", json=COMPLETION | {"timings": True, "n": 2})
    body = answer.json()
    records = of(answer, client)
    assert [record["choice"] for record in records] == [1, 0]  # the newest first
    for record in records:
        choice = body["choices"][record["choice"]]
        assert record["timings"] == choice["timings"]
        assert_adds_up(record["timings"])
        assert record["id"] == body["id"]
        assert (record["endpoint"], record["state"]) == ("/v1/completions", State.DONE.value)
        assert (record["outcome"], record["error"], record["finish_reason"]) == ("success", None, "length")
        assert record["prompt_tokens"] == body["usage"]["prompt_tokens"]
        assert record["output_tokens"] == 4
        assert before_s - 0.01 <= record["received_s"] <= time.time()


def test_streams_are_told_the_same(client: httpx.Client) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    with client.stream(
        "POST", "/v1/chat/completions", json=asked | {"timings": True, "stream": True}
    ) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    timings = [json.loads(event)["timings"] for event in events[:-1] if '"timings"' in event]
    (record,) = of(answer, client)
    assert [record["timings"]] == timings
    assert_adds_up(record["timings"])


def test_what_lives_comes_first_and_says_how_far_it_is(server: LiveServer, client: httpx.Client) -> None:
    client.post("/v1/completions", json=COMPLETION)
    server.nodes.script = Script(hold_after=2)
    with client.stream("POST", "/v1/completions", json=COMPLETION | {"stream": True}) as stream:
        lines = stream.iter_lines()
        assert [line for line in (next(lines), next(lines), next(lines)) if line]
        live, *ended = listed(client)
        assert live["id"] == stream.headers["x-request-id"]
        assert (live["state"], live["outcome"], live["output_tokens"]) == ("decoding", None, 2)
        times = live["timings"]
        assert times["ttft_ms"] > 0
        assert (times["decode_ms"], times["total_ms"], times["stamps_ms"]["done"]) == (None, None, None)
        assert all(one["state"] == "done" for one in ended)
    assert server.nodes.wait_idle(WAIT_S)
    record, *_ = of(stream, client)
    assert (record["id"], record["outcome"], record["finish_reason"]) == (live["id"], "client_gone", None)
    assert record["timings"]["total_ms"] >= record["timings"]["ttft_ms"] == times["ttft_ms"]


def test_states_before_the_first_token(server: LiveServer, client: httpx.Client) -> None:
    server.nodes.script = Script(hold_after=0)
    with socket.create_connection(("127.0.0.1", server.port)) as waiting:
        body = json.dumps(COMPLETION).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        waiting.sendall(head.encode() + body[:-1])
        while not (found := [one for one in listed(client) if one["state"] == "tokenizing"]):
            continue
        assert found[0]["prompt_tokens"] is None
        assert found[0]["timings"]["decode_node"] is None
        waiting.sendall(body[-1:])
        assert server.nodes.wait_submitted(1, WAIT_S)
        (live,) = (one for one in listed(client) if one["id"] == found[0]["id"])
        assert live["state"] == "granted"  # the fake's stamps say so
        assert live["timings"]["stamps_ms"]["granted"] is not None
        assert live["timings"]["ttft_ms"] is None


def test_a_request_is_received_with_its_first_bytes(server: LiveServer, client: httpx.Client) -> None:
    body = json.dumps(COMPLETION | {"timings": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(b"POST /v1/completions HTT")
        client.get("/health")  # what was sent before it was read before it, or with it
        known_s = time.time()
        slow.sendall(b"P/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        slow.sendall(body)
        whole = b""
        while data := slow.recv(1 << 16):
            whole += data
    answer = json.loads(whole.partition(b"\r\n\r\n")[2])
    (record,) = (one for one in listed(client) if one["id"] == answer["id"])
    assert record["received_s"] <= known_s
    assert record["received_s"] + answer["timings"]["stamps_ms"]["tokenized"] / 1000 > known_s


def test_failures_say_what_the_client_was_told(server: LiveServer, client: httpx.Client) -> None:
    wrong = client.post("/v1/completions", json=COMPLETION | {"max_tokens": "x"})
    (record,) = of(wrong, client)
    assert (record["outcome"], record["error"]) == ("rejected", wrong.json()["error"]["message"])
    server.nodes.script = Script(fail_after=2)
    failed = client.post("/v1/completions", json=COMPLETION)
    (record,) = of(failed, client)
    assert (record["outcome"], record["error"]) == ("failed", "the decode node died")
    assert record["timings"]["ttft_ms"] is not None
    server.nodes.script = Script(refusal=RequestRejected("x" * 9999, status=429))
    (record,) = of(client.post("/v1/completions", json=COMPLETION), client)
    assert (record["outcome"], len(record["error"])) == ("rejected", MOST_ERROR_CHARS)


def test_neither_prompt_nor_text_is_told(server: LiveServer, client: httpx.Client) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 40}
    assert (
        SECRET in client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    )
    assert SECRET not in client.get("/debug/requests").text


def test_the_last_that_ended_are_kept(client: httpx.Client) -> None:
    for prompts in (150, 120):
        client.post("/v1/completions", json=COMPLETION | {"prompt": [[5]] * prompts, "max_tokens": 1})
    records = listed(client)
    assert len(records) == NUM_ENDED
    assert [record["choice"] for record in records] == [*reversed(range(120)), *reversed(range(70, 150))]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_it_needs_the_key(text: TextPipeline, method: str) -> None:
    with live_gateway(text, GatewayConfig(api_key=SECRET)) as server:
        url = f"{server.url}/debug/requests"
        assert httpx.request(method, url).status_code == 401
        known = {"Authorization": f"Bearer {SECRET}"}
        assert httpx.request(method, url, headers=known).status_code == 200
