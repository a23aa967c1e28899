"""`baton chat` in a pipe and in a terminal, against a server that answers what it is told to."""

from __future__ import annotations

import json
import os
import pty
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 60.0
ROOT = Path(__file__).parents[2]
DONE = b"data: [DONE]\n\n"
FULL = b'data: {"error": {"message": "the pool is full"}}\n\n'


class Script(ThreadingHTTPServer):
    """Answers one question after the other from a list; what does not end is held until the client leaves."""

    daemon_threads = True

    def __init__(self, *answers: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.left: queue.Queue[bool] = queue.Queue()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Script

    def do_GET(self) -> None:
        self._head(b'{"data": [{"id": "tiny"}]}')

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = self.server.answers.pop(0)
        if answer.endswith((DONE, FULL)):
            self._head(answer)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)
        self.server.left.put(self.connection.recv(1) == b"")

    def _head(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""


@pytest.fixture
def script() -> Iterator[Any]:
    servers: list[Script] = []

    def start(*answers: bytes) -> Script:
        servers.append(Script(*answers))
        threading.Thread(target=servers[-1].serve_forever).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def answer(*pieces: str) -> bytes:
    events = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def command(server: Script, *args: str) -> list[str]:
    return [sys.executable, "-m", "cli", "chat", "--url", server.url, *args]


def pipe(server: Script, text: str | bytes, *args: str) -> subprocess.CompletedProcess[bytes]:
    data = text if isinstance(text, bytes) else text.encode()
    return subprocess.run(
        command(server, *args), cwd=ROOT, input=data, capture_output=True, timeout=DEADLINE_S, check=False
    )


class Terminal:
    """A chat whose three streams are a terminal."""

    def __init__(self, server: Script) -> None:
        self._fd, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command(server),
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(theirs)
        self._shown = ""

    def expect(self, text: str) -> None:
        """Wait until the text is shown, and forget all up to it."""
        while text not in self._shown:
            assert select.select([self._fd], [], [], DEADLINE_S)[0], f"no {text!r} in {self._shown!r}"
            self._shown += os.read(self._fd, 4096).decode(errors="replace")
        self._shown = self._shown.partition(text)[2]

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C until the text is shown: Python misses one that comes as readline begins to wait."""
        for _ in range(int(DEADLINE_S)):
            self.process.send_signal(signal.SIGINT)
            if select.select([self._fd], [], [], 1)[0]:
                break
        self.expect(text)

    def type(self, text: str) -> None:
        """Type."""
        os.write(self._fd, text.encode())

    def close(self) -> None:
        """End it whatever state it is in."""
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.fixture
def terminal() -> Iterator[Any]:
    terminals: list[Terminal] = []

    def start(server: Script) -> Terminal:
        terminals.append(Terminal(server))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


def test_pipe_asks_line_by_line_with_all_that_was_said_before(script: Any) -> None:
    server = script(answer("Hel", "lo") + DONE, answer("Fine.") + DONE)
    done = pipe(server, "Hi\n\nHow are you?", "--system", "Be short.", "--max-tokens", "5", "--seed", "3")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Hello\nFine.\n", b"")
    system = {"role": "system", "content": "Be short."}
    common = {"model": "tiny", "stream": True, "max_tokens": 5, "seed": 3}
    assert server.asked == [
        {**common, "messages": [system, user("Hi")]},
        {**common, "messages": [system, user("Hi"), assistant("Hello"), user("How are you?")]},
    ]


def test_clear_forgets_all_but_the_system_prompt_and_exit_ends(script: Any) -> None:
    server = script(answer("one") + DONE, answer("two") + DONE)
    done = pipe(server, "a\n/clear\nb\n/exit\nc\n", "--system", "S")
    assert (done.returncode, done.stdout) == (0, b"one\ntwo\n")
    assert server.asked[1]["messages"] == [{"role": "system", "content": "S"}, user("b")]


def test_error_in_a_pipe_ends_the_chat_with_one_line(script: Any) -> None:
    server = script(answer("Hel") + FULL)
    done = pipe(server, "Hi\nand then?\n")
    assert (done.returncode, done.stdout, done.stderr) == (1, b"Hel\n", b"baton: the pool is full\n")


def test_bytes_that_are_no_text_do_not_end_the_chat(script: Any) -> None:
    server = script(answer("Hm?") + DONE)
    done = pipe(server, b"\xff\xfe?\n")
    assert (done.returncode, done.stdout) == (0, b"Hm?\n")
    assert server.asked[0]["messages"][0]["content"].endswith("?")


def test_no_server_is_said_before_anything_is_typed(terminal: Any, script: Any) -> None:
    server = script()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    chat = terminal(server)
    chat.expect("no server answers at")
    assert chat.process.wait(DEADLINE_S) == 1


def test_interrupt_stops_the_answer_and_the_chat_goes_on(script: Any, terminal: Any) -> None:
    server = script(answer("Once upon"), answer("Well.") + DONE)
    chat = terminal(server)
    chat.expect("tiny: ")
    chat.expect("> ")
    chat.type("A story!\n")
    chat.expect("Once upon")
    chat.process.send_signal(signal.SIGINT)
    assert server.left.get(timeout=DEADLINE_S)
    chat.expect("> ")
    chat.interrupt_until("> ")  # with nothing to stop, it gives the line up
    chat.type("Go on\n")
    chat.expect("Well.")
    chat.expect("> ")
    assert server.asked[1]["messages"] == [user("A story!"), assistant("Once upon"), user("Go on")]
    chat.type("\x04")
    assert chat.process.wait(DEADLINE_S) == 0


def test_error_in_a_terminal_is_shown_and_its_question_forgotten(script: Any, terminal: Any) -> None:
    server = script(FULL, answer("Yes.") + DONE)
    chat = terminal(server)
    chat.expect("> ")
    chat.type("Are you there?\n")
    chat.expect("baton: the pool is full")
    chat.expect("> ")
    chat.type("And now?\n")
    chat.expect("Yes.")
    assert server.asked[1]["messages"] == [user("And now?")]
    chat.type("/exit\n")
    assert chat.process.wait(DEADLINE_S) == 0
