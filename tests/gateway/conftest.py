"""The gateway on a real socket, before fake nodes."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from common.config import GatewayConfig
from common.drain import Drain
from gateway.app import build_app
from gateway.fake import FakeNodes, Script
from gateway.limits import ModelLimits
from gateway.server import GatewayServer
from gateway.text import TextPipeline
from tests.tiny import VOCAB_SIZE

LIMITS = ModelLimits(context_length=512, vocab_size=VOCAB_SIZE)
MODEL = "tiny"
WAIT_S = 20.0  # how long a test waits for what should happen at once


@dataclass(frozen=True)
class LiveServer:
    """The gateway in a thread."""

    nodes: FakeNodes
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="session")
def text(tiny_model: Path) -> TextPipeline:
    """The tiny model's tokenizer; tests may share it, it has no state."""
    return TextPipeline.load(tiny_model)


@pytest.fixture(scope="session")
def byte_level(tiny_model: Path) -> Tokenizer:
    """The tokenizer itself."""
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


@pytest.fixture(scope="session")
def _server(text: TextPipeline) -> Iterator[LiveServer]:
    nodes = FakeNodes()
    server = GatewayServer(
        build_app(nodes, text, GatewayConfig(max_body_mib=1), MODEL, LIMITS), Drain(0), lambda: None
    )
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        yield LiveServer(nodes, sock.getsockname()[1])
        server.should_exit = True
        thread.join()


@pytest.fixture
def server(_server: LiveServer) -> Iterator[LiveServer]:
    """The running gateway, its nodes as new; afterwards no request may be left on them."""
    nodes = _server.nodes
    nodes.script = Script()
    nodes.capacity = None
    nodes.is_usable = True
    nodes.stalled_ids = ()
    nodes.missing = ()
    nodes.streams.clear()
    yield _server
    assert nodes.wait_idle(WAIT_S)


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    """A plain HTTP client."""
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        yield client
