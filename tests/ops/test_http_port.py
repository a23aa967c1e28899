"""The HTTP port: of one process, or shared by several that all want to share it."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from common.errors import ConfigError
from common.http_port import bind_http

HOST = "127.0.0.1"


def test_a_shared_port_takes_others_that_share_and_nobody_else() -> None:
    with bind_http(HOST, 0, is_shared=True) as held:
        port = held.getsockname()[1]
        with bind_http(HOST, port, is_shared=True) as another:
            another.listen()
            with pytest.raises(ConfigError, match=f"port {port} is taken"):
                bind_http(HOST, port)


def test_who_does_not_listen_yet_is_given_no_connection() -> None:
    with ExitStack() as stack:
        silent = stack.enter_context(bind_http(HOST, 0, is_shared=True))
        port = silent.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port))
        ready = stack.enter_context(bind_http(HOST, port, is_shared=True))
        ready.listen()
        for _ in range(20):
            stack.enter_context(socket.create_connection((HOST, port)))
            stack.enter_context(ready.accept()[0])
