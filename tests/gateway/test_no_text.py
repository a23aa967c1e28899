"""A model without a tokenizer is served by token ids: no text comes out, and none is taken."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.config import GatewayConfig
from common.drain import Drain
from gateway.app import build_app
from gateway.fake import FakeNodes
from gateway.server import GatewayServer
from gateway.text import TextPipeline
from tests.gateway.conftest import LIMITS, MODEL, WAIT_S


@pytest.fixture
def api(tmp_path: Path) -> Iterator[httpx.Client]:
    text = TextPipeline.load(tmp_path, optional=True)
    server = GatewayServer(
        build_app(FakeNodes(), text, GatewayConfig(), MODEL, LIMITS), Drain(0), lambda: None
    )
    with socket.create_server(("127.0.0.1", 0)) as sock:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        with httpx.Client(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}/v1", timeout=WAIT_S) as client:
            yield client
        server.should_exit = True
        thread.join()


def test_token_ids_are_answered_with_token_ids(api: httpx.Client) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 5, "logprobs": 1}
    answer = api.post("completions", json=body | {"return_token_ids": True}).json()
    assert answer["choices"][0]["token_ids"] == [5, 6, 7, 5, 6]
    assert answer["choices"][0]["text"] == ""
    assert answer["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("completions", {"prompt": "the quick brown fox"}),
        ("completions", {"prompt": ["the", "fox"]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_text_is_refused(api: httpx.Client, path: str, prompt: dict[str, Any]) -> None:
    answer = api.post(path, json={"model": MODEL, "max_tokens": 5, **prompt})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == next(iter(prompt))
    assert "token ids" in error["message"] or "chat template" in error["message"]
