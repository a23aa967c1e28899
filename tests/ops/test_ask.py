"""`baton generate` against a server of the standard library that answers what it is told to."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from common.config import AskConfig, ClientConfig
from gateway.api_client import AskFailed
from gateway.ask import ask

MODELS = json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]}).encode()
ERROR = {"error": {"message": "the pool is full", "type": "server_error", "param": None, "code": None}}


class Script(HTTPServer):
    """Answers every POST with `status` and `body`, and remembers what was asked."""

    status = 200
    body = b""
    models = MODELS
    path = ""
    asked: dict[str, Any]

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Script

    def do_GET(self) -> None:
        self._answer(200, self.server.models)

    def do_POST(self) -> None:
        self.server.path = self.path
        self.server.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(self.server.status, self.server.body)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Script]:
    with Script(("127.0.0.1", 0), _Handler) as script:
        thread = threading.Thread(target=script.serve_forever)
        thread.start()
        yield script
        script.shutdown()
        thread.join()


def stream(*events: Any, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def test_chat_is_streamed_and_the_options_are_passed_on(server: Script) -> None:
    server.body = stream({"choices": [{"delta": {"role": "assistant"}}]}, delta("Hel"), delta("lo"))
    written: list[str] = []
    ask(
        ClientConfig(url=server.url, max_tokens=5, temperature=0.0, seed=7), AskConfig(), "Hi", written.append
    )
    assert "".join(written) == "Hello\n"
    assert server.path == "/v1/chat/completions"
    assert server.asked == {
        "model": "tiny",
        "stream": True,
        "max_tokens": 5,
        "temperature": 0.0,
        "seed": 7,
        "messages": [{"role": "user", "content": "Hi"}],
    }


def test_raw_prompt_is_a_completion(server: Script) -> None:
    server.body = stream({"choices": [{"index": 0, "text": " there"}]})
    written: list[str] = []
    ask(ClientConfig(url=server.url), AskConfig(raw=True), "Hi", written.append)
    assert "".join(written) == " there\n"
    assert server.path == "/v1/completions"
    assert server.asked == {"model": "tiny", "stream": True, "prompt": "Hi"}


def test_timings_follow_the_answer_in_the_order_of_the_stages(server: Script) -> None:
    stages = {"queue_ms": 1.0, "prefill_ms": 2.5, "transfer_ms": 3.0, "tokenize_ms": 0.5, "submit_ms": 0.25}
    sums = {"ttft_ms": 8.25, "decode_ms": 40.0, "total_ms": 48.25, "first_decode_ms": None}
    timings = stages | sums | {"send_ms": 1.0, "stamps_ms": {"received": 0.0}, "decode_node": "decode-0"}
    server.body = stream(delta("Hello"), {"choices": [], "timings": timings})
    written: list[str] = []
    ask(ClientConfig(url=server.url), AskConfig(timings=True), "Hi", written.append)
    assert server.asked["timings"] is True
    answer, _, told = "".join(written).partition("\n\n")
    assert answer == "Hello"
    assert [line.rsplit(maxsplit=2) for line in told.splitlines()] == [
        ["tokenize", "0.5", "ms"],
        ["submit", "0.2", "ms"],
        ["queue", "1.0", "ms"],
        ["prefill", "2.5", "ms"],
        ["transfer", "3.0", "ms"],
        ["send", "1.0", "ms"],
        ["= first token", "8.2", "ms"],
        ["decode", "40.0", "ms"],
        ["= total", "48.2", "ms"],
    ]


def test_what_a_server_does_not_know_is_left_out(server: Script) -> None:
    timings = {"tokenize_ms": 1.0, "decode_ms": None, "total_ms": 2.0}
    server.body = stream(delta("Hello"), {"choices": [], "timings": timings})
    written: list[str] = []
    ask(ClientConfig(url=server.url), AskConfig(timings=True), "Hi", written.append)
    lines = "".join(written).partition("\n\n")[2].splitlines()
    assert [line.rsplit(maxsplit=2)[0] for line in lines] == ["tokenize", "= total"]


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (503, json.dumps(ERROR).encode(), "the pool is full (HTTP 503)"),
        (502, b"<html>", "HTTP 502"),
        (200, stream(delta("Hel"), ERROR, done=False), "the pool is full"),
        (200, stream(delta("Hel"), done=False), "early"),
        (200, b"data: no json\n\n", "no OpenAI-compatible server"),
    ],
)
def test_failure_is_one_line(server: Script, status: int, body: bytes, words: str) -> None:
    server.status, server.body = status, body
    with pytest.raises(AskFailed, match=words.replace("(", r"\(").replace(")", r"\)")) as failure:
        ask(ClientConfig(url=server.url), AskConfig(), "Hi", lambda _: None)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("models", [b"{}", b"[]", b'{"data": []}', b"no json"])
def test_other_server_is_told_apart(server: Script, models: bytes) -> None:
    server.models = models
    with pytest.raises(AskFailed, match="no OpenAI-compatible server"):
        ask(ClientConfig(url=server.url), AskConfig(), "Hi", lambda _: None)


def test_no_server_is_one_line_that_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(AskFailed, match=r"no server answers at .*baton serve"):
        ask(ClientConfig(url=url), AskConfig(), "Hi", lambda _: None)


def test_url_that_is_none_is_one_line() -> None:
    with pytest.raises(AskFailed):
        ask(ClientConfig(url="ftp://nowhere"), AskConfig(), "Hi", lambda _: None)
