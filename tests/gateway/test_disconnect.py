"""Clients that leave, on real sockets: what they asked for is aborted, also while nothing is written."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import httpx
import pytest

from gateway.fake import Script
from tests.gateway.conftest import MODEL, WAIT_S, LiveServer
from tests.gateway.test_http import metric


def ask(server: LiveServer, **fields: Any) -> socket.socket:
    body = json.dumps({"model": MODEL, "prompt": [5, 6], "max_tokens": 100, **fields}).encode()
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def read_until(sock: socket.socket, part: bytes) -> bytes:
    data = b""
    while part not in data:
        received = sock.recv(65536)
        assert received, data
        data += received
    return data


def cut(sock: socket.socket) -> None:
    """Close with a reset, as a killed client does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def num_gone(client: httpx.Client) -> float:
    return metric(client, 'baton_requests_total{outcome="client_gone"}')


def wait_for_count(client: httpx.Client, gone: float) -> None:
    """Look until so many clients are counted as gone; each look is a request of its own."""
    for _ in range(1000):
        if num_gone(client) == gone:
            return
    raise AssertionError("the client that left was not counted")


@pytest.mark.parametrize("leave", [socket.socket.close, cut])
def test_idle_stream(server: LiveServer, client: httpx.Client, leave: Any) -> None:
    gone = num_gone(client)
    server.nodes.script = Script(hold_after=2)
    sock = ask(server, stream=True, return_token_ids=True)
    read_until(sock, b'"token_ids":[6]')
    leave(sock)
    assert server.nodes.wait_idle(WAIT_S)
    assert server.nodes.streams[0].aborted
    wait_for_count(client, gone + 1)
    assert metric(client, "baton_requests_running") == 0


@pytest.mark.parametrize(("stream", "hold_after"), [(False, 0), (False, 2), (True, 0)])
def test_before_the_first_byte(server: LiveServer, stream: bool, hold_after: int) -> None:
    server.nodes.script = Script(hold_after=hold_after)
    sock = ask(server, stream=stream)
    assert server.nodes.wait_submitted(1, WAIT_S)
    sock.close()
    assert server.nodes.wait_idle(WAIT_S)
    assert server.nodes.streams[0].aborted


def test_every_prompt_of_the_call_is_aborted(server: LiveServer) -> None:
    server.nodes.script = Script(hold_after=1)
    sock = ask(server, prompt=[[5], [6], [7]], stream=True)
    assert server.nodes.wait_submitted(3, WAIT_S)
    cut(sock)
    assert server.nodes.wait_idle(WAIT_S)
    assert [stream.aborted for stream in server.nodes.streams] == [True] * 3


def test_in_the_middle_of_the_body(server: LiveServer, client: httpx.Client) -> None:
    gone = num_gone(client)
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as sock:
        sock.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"model')
    wait_for_count(client, gone + 1)
    assert server.nodes.streams == []


def test_a_connection_serves_one_call_after_another(server: LiveServer) -> None:
    sock = ask(server, stream=True, max_tokens=2)
    read_until(sock, b"[DONE]")
    body = json.dumps({"model": MODEL, "prompt": [5], "max_tokens": 1}).encode()
    sock.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    assert b'"completion_tokens":1' in read_until(sock, b'"total_tokens":2')
    sock.close()
