"""What the commands say that ask or measure a server."""

# ruff: noqa: E501  # texts of tables

from __future__ import annotations

import re
import socket
from threading import Thread

from tests.docs.messages import NotTried, Row
from tests.docs.provoke import Kit, Recipe, baton


def _answered_with(answer: bytes, *words: str) -> Recipe:
    """Run a command against a server that always answers the same; `{url}` is its address."""

    def recipe(kit: Kit, says: re.Pattern[str]) -> str:
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = Thread(target=_answer, args=(server, answer), daemon=True)
            thread.start()
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
            said = baton(*(word.replace("{url}", url) for word in words))(kit, says)
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            return said

    return recipe


def _answer(server: socket.socket, answer: bytes) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:
            return
        with client:
            client.recv(1 << 16)
            client.sendall(answer)


def _page(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


MODELS = b'{"data": [{"id": "tiny"}]}'
NOWHERE = "http://127.0.0.1:9"

ASKING = [
    Row(
        {
            "no server answers at <url>: start one with `baton serve`": baton("generate", "Hi", "--url", NOWHERE),
            "no Baton server answers at <url>: <reason>": baton("conformance", NOWHERE),
            "<url> does not name its models: <reason>": baton("bench", "serve", "--url", NOWHERE),
        },
        "Nothing listens there, or it is not ready yet. The default is http://127.0.0.1:8000.",
        "Start a server, wait until its log says where it serves, and give that address as `--url`.",
    ),
    Row(
        {
            "what answers at <url> is no OpenAI-compatible server": _answered_with(
                _page(b"[]"), "generate", "Hi", "--url", "{url}"
            ),
            "the server ended the answer early": _answered_with(
                _page(MODELS), "generate", "Hi", "--url", "{url}"
            ),
        },
        "Something else answers at this address (a proxy, another program), or a proxy cut the answer.",
        "Look with `curl URL/v1/models`; give the address without `/v1`.",
    ),
    Row(
        {
            "not whole numbers, separated by commas": baton("bench", "serve", "--prompt-tokens", "x"),
            "numbers above 0 are wanted": baton("bench", "step", "{tiny}", "--batch", "0"),
            "not numbers, separated by commas": baton("bench", "compare", "--loads", "x"),
            "--disaggregated-url and --colocated-url go together": baton(
                "bench", "compare", "--colocated-url", "http://127.0.0.1:9"
            ),
            "a prompt and its answer take <number> tokens, the model has room for <number>: give a smaller "
            "--long-prompt-tokens": baton("bench", "compare", "{tiny}", "--device", "cpu"),
            "<text> is not NAME=VALUE with a number": baton("bench", "serve", "--aim", "x"),
            "there is no figure <name>, only <names>": NotTried("said at the end of a measurement"),
            "--plane <plane>: the planes <where> are <names>": baton(
                "bench", "transfer", "--device", "cpu", "--plane", "cuda-ipc"
            ),
            "<url> is not an address like http://127.0.0.1:8000": _answered_with(
                _page(MODELS), "bench", "serve", "--url", "ftp://x", "--model", "m"
            ),
            "--context <number>: with so many --steps, and the model's <number> tokens, it can be <number> to <number>": baton(
                "bench", "step", "{tiny}", "--device", "cpu", "--context", "511", "--batch", "1"
            ),
            "--context <number>: with so many --steps, and the model's <number> tokens, no context can be timed": baton(
                "bench", "step", "{tiny}", "--device", "cpu", "--steps", "1000", "--batch", "1"
            ),
        },
        "An option of a benchmark has a value that it cannot have.",
        "`baton bench COMMAND --help` says what it can be.",
    ),
    Row(
        {
            "the <kind> server answers no request": NotTried("it takes two servers that fail after they were asked"),
            "no request was served: neither server takes the load": NotTried("it takes two servers that fail so"),
            "the <kind> server: <reason>": NotTried("a server that does not start is tried above"),
            "no request was served: <reason>": _answered_with(
                b"HTTP/1.1 503 X\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
                "bench", "serve", "--url", "{url}", "--model", "m", "--num-requests", "1", "--warm-up", "1",
            ),
            "the server did not begin a stream: <reason>": NotTried("tests/bench/test_serve.py has servers that fail"),
            "no token came in the <phase> time: hold streams for longer": NotTried(
                "tests/bench/test_serve.py has servers that are slow"
            ),
            "the server did not answer within <time> s": NotTried("tests/bench/test_serve.py has servers that hang"),
        },
        "The server that is measured refuses the requests, or is too slow for what was asked.",
        "The reason is the server's. Look whether prompt and answer fit its context (`--prompt-tokens`), and its log.",
    ),
    Row(
        {
            "baton conformance needs assertions: do not set PYTHONOPTIMIZE": NotTried("it needs another interpreter"),
            "--proofs puts faults into servers of its own: leave out the URL": baton(
                "conformance", "--proofs", "http://127.0.0.1:9"
            ),
            "--row: there is no row <name>: see `baton conformance --list`": baton("conformance", "--row", "Z99"),
        },
        "`baton conformance` was asked for something that it cannot do.",
        "`baton conformance --help`.",
    ),
]  # fmt: skip
