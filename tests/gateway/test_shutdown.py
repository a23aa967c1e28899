"""Which signals let requests finish, and which end them."""

from __future__ import annotations

import asyncio
import signal
import socket

import pytest

from common.config import GatewayConfig
from common.drain import Drain
from gateway.app import build_app
from gateway.fake import FakeNodes
from gateway.server import GatewayServer
from gateway.text import TextPipeline
from tests.gateway.conftest import LIMITS, MODEL

TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    ("grace_s", "is_supervised", "signums", "are_ended"),
    [
        (3600, True, [TERM], False),
        (3600, False, [TERM], False),
        (3600, True, [TERM, TERM], False),  # systemd tells every process, and the supervisor tells its own
        (3600, True, [TERM, TERM, TERM], False),
        (3600, True, [TERM, TERM, INT], True),
        (3600, False, [TERM, TERM], True),
        (3600, True, [INT], True),
        (0, True, [TERM], True),
    ],
)
def test_what_signals_mean_to_running_requests(
    text: TextPipeline, grace_s: float, is_supervised: bool, signums: list[int], are_ended: bool
) -> None:
    ends: list[None] = []

    async def told() -> None:
        app = build_app(FakeNodes(), text, GatewayConfig(), MODEL, LIMITS)
        server = GatewayServer(app, Drain(grace_s, is_supervised=is_supervised), lambda: ends.append(None))
        with socket.create_server(("127.0.0.1", 0)) as sock:
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            await asyncio.sleep(0)  # it has begun
            for signum in signums:
                server.handle_exit(signum, None)
            await serving  # no client is there: in each case it ends

    asyncio.run(told())
    assert bool(ends) is are_ended
