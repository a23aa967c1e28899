"""What a client's connection may take, on a real socket: number, head, time."""

from __future__ import annotations

import json
import logging
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest

from common.config import GatewayConfig
from gateway.connections import (
    MAX_HEAD_BYTES,
    OTHER_DESCRIPTORS,
    RESERVE,
    ConnectionLimits,
    make_room_for,
)
from gateway.fake import Script
from gateway.text import TextPipeline
from tests.gateway.conftest import MODEL, WAIT_S, LiveServer
from tests.gateway.live import live_gateway

SOON_S = 0.3
MAX_CONNECTIONS = 4
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def quick(text: TextPipeline) -> Iterator[LiveServer]:
    """A gateway that waits for nobody."""
    config = GatewayConfig(max_body_mib=1, client_timeout=1)
    with live_gateway(text, config, ConnectionLimits(64, SOON_S)) as server:
        yield server


@contextmanager
def connection(server: LiveServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as client:
        yield client


def read_to_end(client: socket.socket) -> bytes:
    data = b""
    while True:
        try:
            part = client.recv(1 << 16)
        except ConnectionError:  # it was closed with something of ours unread
            return data
        if not part:
            return data
        data += part


def read_whole(client: socket.socket) -> bytes:
    """One answer, of a connection that lives on."""
    data = b""
    while not data.endswith(b"}"):
        data += client.recv(1 << 16)
    return data


def assert_says(answer: bytes, status: int, code: str) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["code"] == code


def ask(server: LiveServer) -> int:
    body = {"model": MODEL, "prompt": "the quick", "max_tokens": 2}
    return httpx.post(server.url + "/v1/completions", json=body).status_code


# Time -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"POST", HEAD, HEAD + b"X-Long: " + b"x" * 1000])
def test_a_head_that_does_not_come_is_answered_and_closed(quick: LiveServer, sent: bytes) -> None:
    with connection(quick) as client:
        client.sendall(sent)
        assert_says(read_to_end(client), 408, "request_timeout")


def test_a_head_that_drips_is_answered_and_closed(quick: LiveServer) -> None:
    """Each byte is in time; the whole is not."""
    with connection(quick) as client:
        client.settimeout(SOON_S / 10)
        client.sendall(HEAD)
        answer, end = b"", time.monotonic() + WAIT_S
        while time.monotonic() < end:
            try:
                client.sendall(b"X-A: b\r\n")
                part = client.recv(1 << 16)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            if not part:
                break
            answer += part
        assert_says(answer, 408, "request_timeout")


@pytest.mark.parametrize("sent", [b"", b'{"model": "'])
def test_a_body_that_does_not_come_is_answered_and_closed(quick: LiveServer, sent: bytes) -> None:
    with connection(quick) as client:
        client.sendall(HEAD + b"Content-Length: 1000\r\n\r\n" + sent)
        assert_says(read_to_end(client), 408, "request_timeout")
    assert quick.nodes.streams == []


def test_a_body_that_nobody_reads_does_not_hold_the_connection(quick: LiveServer) -> None:
    with connection(quick) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nx")
        assert read_to_end(client).startswith(b"HTTP/1.1 200 ")


def test_the_second_request_of_a_connection_has_the_same_time(quick: LiveServer) -> None:
    with connection(quick) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_whole(client).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"GET /health HTTP/1.1\r\n")
        assert_says(read_to_end(client), 408, "request_timeout")


def test_an_answer_may_take_longer(quick: LiveServer) -> None:
    """The limit is the client's, not the server's."""
    quick.nodes.script = Script(hold_after=1)
    try:
        with connection(quick) as client:
            body = json.dumps(
                {"model": MODEL, "prompt": "x", "max_tokens": 2, "timeout": 3 * SOON_S}
            ).encode()
            client.sendall(HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body))
            assert read_to_end(client).startswith(b"HTTP/1.1 504 ")
    finally:
        quick.nodes.script = Script()


# Size -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET /health?" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X-A: some words\r\n" * (MAX_HEAD_BYTES // 10) + b"\r\n",
        b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * (MAX_HEAD_BYTES * 2),  # without an end
    ],
)
def test_a_head_beyond_the_limit_is_refused(quick: LiveServer, head: bytes) -> None:
    with connection(quick) as client:
        with suppress(ConnectionError):
            client.sendall(head)
        answer = read_to_end(client)
        assert_says(answer, 431, "headers_too_large")
    assert ask(quick) == 200


@pytest.mark.parametrize(
    "trailer",
    [
        b"X-A: some words\r\n" * MAX_HEAD_BYTES,
        b"X-Long: " + b"x" * (MAX_HEAD_BYTES * 16),  # without an end
    ],
)
def test_trailers_beyond_the_limit_are_refused(quick: LiveServer, trailer: bytes) -> None:
    """Headers behind a body: nobody reads them, and a parser would keep them all."""
    with connection(quick) as client:
        with suppress(ConnectionError):
            client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
            client.sendall(trailer)
        if answer := read_to_end(client):  # or the reset was faster
            assert_says(answer, 431, "headers_too_large")
    assert ask(quick) == 200


def test_a_body_in_small_pieces_and_a_trailer_are_read(quick: LiveServer) -> None:
    body = json.dumps({"model": MODEL, "prompt": "the quick", "max_tokens": 2}).encode().ljust(3 << 16)
    with connection(quick) as client:
        client.sendall(HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        client.sendall(
            b"".join(b"8;%s\r\n%s\r\n" % (b"e" * 30, body[i : i + 8]) for i in range(0, 3 << 16, 8))
        )
        client.sendall(b"0\r\nX-Sum: 1\r\n\r\n")
        assert read_to_end(client).startswith(b"HTTP/1.1 200 ")


def test_a_head_below_it_is_served(quick: LiveServer) -> None:
    headers = {"X-Long": "x" * (MAX_HEAD_BYTES - 2000)}
    assert httpx.get(quick.url + "/health", headers=headers).status_code == 200


def test_an_endless_body_is_not_kept(quick: LiveServer) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * (1 << 16)

    with suppress(httpx.TransportError):  # broken off while it still sends
        assert httpx.post(quick.url + "/v1/completions", content=endless()).status_code == 413
    assert ask(quick) == 200


# Number ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small(text: TextPipeline) -> Iterator[LiveServer]:
    with live_gateway(text, GatewayConfig(max_connections=MAX_CONNECTIONS)) as server:
        yield server


def assert_served(server: LiveServer) -> None:
    """Check that there is room again, once the server has seen that the others are gone."""
    for _ in range(1000):
        with suppress(httpx.TransportError):  # beyond the reserve
            if ask(server) == 200:
                return
    raise AssertionError("the connections that were closed still count")


def test_more_connections_than_allowed_are_told_so(small: LiveServer) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(connection(small)) for _ in range(MAX_CONNECTIONS)]
        for client in held:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read_whole(client).startswith(b"HTTP/1.1 200 ")
        response = httpx.get(small.url + "/v1/models")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "overloaded"
        assert response.headers["retry-after"] == "1"
        # An overloaded server is no sick one: nobody should restart it.
        assert httpx.get(small.url + "/health").status_code == 200
        # Those that were there first are served.
        held[0].sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_whole(held[0]).startswith(b"HTTP/1.1 200 ")
    assert_served(small)


def test_beyond_a_reserve_connections_are_closed_at_once(small: LiveServer) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS + RESERVE):
            stack.enter_context(connection(small))
        last = stack.enter_context(connection(small))
        assert read_to_end(last) == b""
    assert_served(small)


def test_file_descriptors_suffice_or_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 300 + RESERVE + OTHER_DESCRIPTORS
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        make_room_for(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (needed, hard)
        assert caplog.messages == []
        with caplog.at_level(logging.WARNING):
            make_room_for(hard)
        [line] = caplog.messages
        assert f"the limit is {hard}: raise it (ulimit -n)" in line
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
