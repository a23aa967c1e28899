"""Deadlines at the gateway: the field and the option, and the answer when a decode node says nothing."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import zmq

from common.config import GatewayConfig
from common.connector import Connector
from common.errors import RequestRejected
from common.messages import Abort, Failed, Finish, Role, Status, Submit, Tokens, int32s
from common.peer import PeerMessage
from common.request import FinishReason, SamplingParams
from common.sockets import wait
from gateway.app import build_app
from gateway.client import NodeClient
from gateway.echo import Encoded
from gateway.endpoints import COMPLETIONS, Encode
from gateway.fake import FakeNodes, Script
from gateway.generation import GenerationCall, Service
from gateway.live_requests import LiveRequests
from gateway.metrics import RequestMetrics
from gateway.nodes import RequestStream
from gateway.openai_api import GenerationRequest
from gateway.submission import Submission
from gateway.text import TextPipeline
from tests.gateway.conftest import LIMITS, MODEL, WAIT_S, LiveServer
from tests.gateway.test_http import CHAT, COMPLETION, assert_error
from tests.wire.hellos import DECODE, hello, here
from tests.wire.loop import PATIENCE_S

PATHS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
SOON_S = 0.02

# The body's field and the server's option ---------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token_it_is_a_504(
    server: LiveServer, client: httpx.Client, path: str, body: dict[str, Any], stream: bool
) -> None:
    server.nodes.script = Script(hold_after=0)
    response = client.post(path, json=body | {"timeout": SOON_S, "stream": stream})
    assert_error(response, 504, type="server_error", code="deadline_exceeded", param=None)


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_in_a_stream_that_began_it_is_the_last_event(
    server: LiveServer, client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    server.nodes.script = Script(hold_after=2)
    response = client.post(path, json=body | {"timeout": SOON_S, "stream": True})
    assert response.status_code == 200
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert "choices" in json.loads(events[0])
    assert json.loads(events[-1])["error"]["code"] == "deadline_exceeded"
    assert [event for event in events if "error" in json.loads(event)] == events[-1:]


@pytest.mark.parametrize("timeout", [0, -1, "1", True, [1]])
@pytest.mark.parametrize(("path", "body"), PATHS)
def test_what_is_no_timeout(
    server: LiveServer, client: httpx.Client, path: str, body: dict[str, Any], timeout: Any
) -> None:
    assert_error(client.post(path, json=body | {"timeout": timeout}), 400, param="timeout")
    assert server.nodes.streams == []


@pytest.mark.parametrize(
    ("fields", "most_s"),
    [({}, 3600), ({"timeout": None}, 3600), ({"timeout": 1e300}, 3600), ({"timeout": 60.5}, 60.5)],
)
def test_the_smaller_of_the_two_counts_from_the_body_on(
    server: LiveServer, client: httpx.Client, fields: dict[str, Any], most_s: float
) -> None:
    assert client.post("/v1/completions", json=COMPLETION | fields).status_code == 200
    timeout_s = server.nodes.streams[-1].timeout_s
    assert timeout_s is not None
    assert most_s - 30 < timeout_s < most_s, "tokenizing takes a while of it"


def test_time_that_tokenizing_takes_counts(text: TextPipeline) -> None:
    is_over = threading.Event()

    def parse(body: dict[str, Any]) -> tuple[GenerationRequest, Encode]:
        request, _ = COMPLETIONS.parse(body)

        def encode(*_: Any) -> list[Encoded]:
            is_over.wait(WAIT_S)
            return [Encoded([5])]

        return request, encode

    nodes, sent = FakeNodes(), list[dict[str, Any]]()
    requests = LiveRequests("gateway-1")
    service = Service(nodes, text, LIMITS, MODEL, 1 << 20, SOON_S, RequestMetrics(), requests)
    received = iter([{"type": "http.request", "body": json.dumps(COMPLETION).encode(), "more_body": False}])

    async def receive() -> Any:
        if (message := next(received, None)) is None:
            await asyncio.Event().wait()
        return message

    async def send(message: Any) -> None:
        sent.append(message)
        is_over.set()

    call = GenerationCall(service, replace(COMPLETIONS, parse=parse))
    asyncio.run(call({"type": "http", "headers": []}, receive, send))
    assert sent[0]["status"] == 504
    assert nodes.streams == []


# A decode node that says nothing ------------------------------------------------------------------------

FENCE = Abort(10**6)
SUBMIT = Submit(1, SamplingParams(max_tokens=3), int32s([5]), timeout_ms=60_000)


class Held(asyncio.SelectorEventLoop):
    """A loop whose clock goes on when the test says so."""

    now_s = 1000.0

    def time(self) -> float:
        return self.now_s


class Pair:
    """A gateway's links, and the other end of one: a decode node that says what the test says."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Held)
        self.loop = loop
        gateway = replace(here(hello(Role.GATEWAY)), layout=None, planes=())
        self.client = NodeClient(context, address, gateway, 5)
        usable = Status(last_seq_seen=0, open_ids=(1,), usable=True)
        self.node = Connector(context, address, here(DECODE), 6, lambda _: usable, now=loop.now_s)
        self.heard: list[Any] = []

    def say(self, message: Any) -> None:
        """Speak as the decode node."""
        assert self.node.peer is not None
        self.node.peer.send(message)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Work as the decode node until it is so."""
        give_up_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up_s, self.heard
            await asyncio.to_thread(wait, self.node.pollables(), 0.02)
            for event in self.node.poll(self.loop.now_s):
                if isinstance(event, PeerMessage) and isinstance(event.message, Submit | Abort):
                    self.heard.append(event.message)

    async def hears_after(self, seconds: float) -> list[Any]:
        """What the decode node has heard in all when so much time has passed."""
        self.loop.now_s += seconds
        for _ in range(2):  # what is ready runs before timers that are due: they have run after the second
            await asyncio.sleep(0)
        (node,) = self.client._router.nodes()
        node.peer.send(FENCE)  # a link keeps the order
        await self.until(lambda: FENCE in self.heard)
        self.heard.remove(FENCE)
        return self.heard


def run(story: Callable[[Pair], Coroutine[Any, Any, None]]) -> None:
    async def whole(address: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        pair = Pair(context, address)
        try:
            await story(pair)
        finally:
            pair.client.close()
            pair.node.close()
            context.destroy(linger=0)

    with tempfile.TemporaryDirectory(prefix="baton-") as folder, asyncio.Runner(loop_factory=Held) as runner:
        runner.run(whole(f"ipc://{folder}/g"))


async def submit(pair: Pair) -> RequestStream:
    """Submit a request with a deadline of 60 s; the node has heard of it."""
    await pair.until(pair.client.usable)
    (stream,) = pair.client.submit(SUBMIT.prompt_ids, SUBMIT.sampling, 60.0)
    await pair.until(lambda: pair.heard == [SUBMIT])
    return stream


def test_a_silent_node_is_given_a_second_more_then_the_gateway_answers_and_aborts() -> None:
    async def story(pair: Pair) -> None:
        stream = await submit(pair)
        assert await pair.hears_after(60.9) == [SUBMIT]
        assert await pair.hears_after(0.2) == [SUBMIT, Abort(1)]
        with pytest.raises(RequestRejected) as failure:
            await stream.next()
        assert (failure.value.status, failure.value.code) == (504, "deadline_exceeded")
        # Its late news finds nobody.
        late = pair.client.counters()["messages_late"]
        pair.say(Failed(1, 504, "too late"))
        await pair.until(lambda: pair.client.counters()["messages_late"] == late + 1)

    run(story)


def test_what_the_node_failed_in_time_is_not_overdue() -> None:
    async def story(pair: Pair) -> None:
        stream = await submit(pair)
        pair.say(Failed(1, 504, "not in time"))
        with pytest.raises(RequestRejected, match="not in time") as failure:
            await stream.next()
        assert (failure.value.status, failure.value.code) == (504, "deadline_exceeded")
        assert await pair.hears_after(1000.0) == [SUBMIT]

    run(story)


def test_what_finished_is_not_overdue() -> None:
    async def story(pair: Pair) -> None:
        stream = await submit(pair)
        finish = Finish(1, FinishReason.STOP)
        pair.say(Tokens((1,), (finish,), int32s([0]), int32s([1]), int32s([7])))
        assert (await stream.next()).token_ids == (7,)
        assert await pair.hears_after(1000.0) == [SUBMIT]

    run(story)


def test_what_was_given_up_is_not_overdue() -> None:
    async def story(pair: Pair) -> None:
        (await submit(pair)).abort()
        assert await pair.hears_after(1000.0) == [SUBMIT, Abort(1)]

    run(story)


def test_a_client_that_reads_nothing_does_not_outlive_its_deadline(
    text: TextPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.generation.UNREAD_S", 0.1)
    nodes = FakeNodes()
    app = build_app(nodes, text, GatewayConfig(), MODEL, LIMITS)
    body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 20, "stream": True, "timeout": 0.2}
    sent: list[Any] = []

    async def call() -> None:
        forever = asyncio.Event()
        messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> Any:
            if not messages:
                await forever.wait()
            return messages.pop()

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body":
                await forever.wait()  # its buffers are full

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        rest = {"query_string": b"", "http_version": "1.1", "root_path": "", "scheme": "http"}
        await asyncio.wait_for(app(scope | rest, receive, send), WAIT_S)

    asyncio.run(call())
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert nodes.wait_idle(0.0)


def test_a_request_that_is_tried_again_has_what_is_left_of_its_time() -> None:
    tried: Any = [SimpleNamespace(peer=SimpleNamespace(epoch=epoch, node_id="decode")) for epoch in (1, 2)]
    asked = Submission(1, int32s([5]), SamplingParams(max_tokens=1), 110.0, lambda _: None)
    left = [
        asked.given_to(node, asked.streams, now).timeout_ms
        for node, now in zip(tried, (100.0, 107.5), strict=True)
    ]
    assert left == [10_000, 2_500]
