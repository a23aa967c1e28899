"""What several rows do: answers that are compared, clients that leave, nodes that die or join, commands.

Rows have what is theirs alone in their own modules.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from conformance.client import Body, Client, Pending, greedy
from conformance.process import START_S, Process
from conformance.server import END_S
from conformance.setup import Setup, prompt
from conformance.waiting import poll_until

AT_ONCE_S = 1.0  # promised: who cannot be served hears so within a second
COMMAND_S = 60.0
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 127, 128, 129, 200, 300)
PROMPTS = [prompt(seed, length) for seed, length in enumerate(LENGTHS, 1)]
BUSY = prompt(3, 40)  # for answers that take a while

# Answers ---------------------------------------------------------------------------------------------------


def check_all(s: Setup, prompts: Sequence[list[int]] = PROMPTS, max_tokens: int = 16) -> None:
    """Ask all at once, every other one streamed; each answer must be right."""
    bodies = [greedy(ids, max_tokens, stream=i % 2 == 0) for i, ids in enumerate(prompts)]
    for ids, outcome in zip(prompts, s.client.ask_all(bodies), strict=True):
        if s.is_remote:
            assert outcome.succeeded, outcome
            assert len(outcome.token_ids) == max_tokens
        else:
            s.check(ids, outcome, max_tokens)


def post(s: Setup, path: str, body: Body) -> httpx.Response:
    """Post a body, for rows that look at all of the answer."""

    async def run() -> httpx.Response:
        async with s.client.session() as http:
            return await http.post(path, json={"model": s.client.model, **body})

    return asyncio.run(run())


def begin_all(s: Setup, bodies: Sequence[Body]) -> list[Pending]:
    """Begin streams, and wait until each has a token."""
    pending = [s.client.begin({**body, "stream": True}) for body in bodies]
    s.client.until(lambda: all(each.outcome.token_ids for each in pending), "all have begun")
    return pending


def refused(s: Setup, body: Body, param: str, path: str = "/v1/completions") -> None:
    """Check that a request is refused by the name of a field."""
    outcome = s.client.ask(body, path)
    assert (outcome.status, outcome.error and outcome.error["param"]) == (400, param), outcome
    assert (outcome.text, outcome.token_ids) == ("", [])


def assert_unavailable(s: Setup) -> None:
    """Check that nobody is told that it is ready, and that every kind of call hears 503 at once."""
    assert s.client.get("/ready").status_code == 503
    assert s.client.get("/health").status_code == 200  # the gateway itself is well
    for stream in (False, True):
        start = time.monotonic()
        outcome = s.client.ask(greedy(PROMPTS[2], 4, stream=stream))
        took_s = time.monotonic() - start
        assert outcome.status == 503, outcome
        assert outcome.error is not None
        assert outcome.error["message"]
        assert int(outcome.headers["retry-after"]) > 0
        assert took_s < AT_ONCE_S, f"it took {took_s:.1f} s"


async def leave(client: Client, body: Body, *, half: bool, reads: int, reset: bool) -> None:
    """Send a request, or half of it, read so many pieces of the answer, and close the connection."""
    url = httpx.URL(client.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    data = json.dumps({"model": client.model, **body}).encode()
    async with client.session() as http:
        key = http.headers.get("authorization", "")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: {key}\r\n"
    data = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    writer.write(data[: len(data) // 2] if half else data)
    await writer.drain()
    for _ in range(0 if half else reads):
        if not await reader.read(200):
            break
    if reset:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()


# Nodes -----------------------------------------------------------------------------------------------------


def node_ids(s: Setup) -> list[str]:
    """Return the names of the nodes that the gateway knows."""
    return sorted(node["id"] for node in s.client.get("/debug/kv").json()["nodes"])


def epoch(s: Setup, name: str) -> int | None:
    """Return the epoch of a node; None when it is not there."""
    nodes = s.client.get("/debug/kv").json()["nodes"]
    return next((int(node["epoch"]) for node in nodes if node["id"] == name), None)


def wait_linked(s: Setup) -> None:
    """Wait until each of two decode nodes has linked to each of two prefill nodes: ready is one pair."""
    for decode in ("decode-0", "decode-1"):
        for prefill in ("prefill-0", "prefill-1"):
            s.server.wait_for(rf"({decode}: linked to {prefill}, plane )", s.client.wait_s)


def is_ready(s: Setup) -> bool:
    """Say whether requests are taken."""
    return s.client.get("/ready").status_code == 200


def wait_back(s: Setup, name: str, old_pid: int) -> None:
    """Wait until a node was started again and requests are taken."""
    poll_until(lambda: s.server.nodes().get(name) not in (None, old_pid), START_S, f"{name} is back")
    poll_until(lambda: name in node_ids(s), START_S, f"{name} has joined", s.server.tail)
    s.client.until(lambda: is_ready(s), f"{name} is usable")


@contextmanager
def unsupervised(s: Setup) -> Iterator[None]:
    """Nobody starts a node again meanwhile: the supervisor is stopped."""
    s.server.process.popen.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        s.server.process.popen.send_signal(signal.SIGCONT)


@contextmanager
def without(s: Setup, role: str) -> Iterator[None]:
    """Have the only node of a role dead for a while; afterwards it is back, and the others never left."""
    before, name = s.server.nodes(), f"{role}-0"
    with unsupervised(s):
        os.kill(before[name], signal.SIGKILL)
        s.client.until(lambda: name not in node_ids(s) and not is_ready(s), "it is gone")
        yield
        assert {**s.server.nodes(), name: 0} == {**before, name: 0}, "another process ended, too"
    wait_back(s, name, before[name])
    assert {**s.server.nodes(), name: 0} == {**before, name: 0}, "another process ended, too"
    assert "Traceback" not in s.server.log, s.server.tail()


@contextmanager
def stopped(s: Setup, name: str) -> Iterator[None]:
    """Have a process stand still for a while."""
    pid = s.server.nodes()[name]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def socket_path(s: Setup, name: str) -> Path:
    """Return where a process of the server listens for others."""
    found = next((s.server.folder / "tmp").rglob(f"{name}.sock"), None)
    assert found is not None, f"{name} waits nowhere"
    return found


def gateway_address(s: Setup) -> str:
    """Return where nodes join the server."""
    return f"ipc://{socket_path(s, 'gateway')}"


# Commands --------------------------------------------------------------------------------------------------


def command(s: Setup, *words: str, **variables: str) -> tuple[int, str]:
    """Run a `baton` command that ends by itself; return its status and all that it said."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "cli", *words],
            env=s.server.env | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=min(COMMAND_S, 2 * s.client.wait_s),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{words} does not end") from None
    return done.returncode, done.stdout.decode(errors="replace")


@contextmanager
def joined(s: Setup, role: str, name: str, *options: str, model: Path | None = None) -> Iterator[Process]:
    """Have another node join the server for a while; it must leave well."""
    address = s.server.wait_for(r"nodes join (ipc://\S+)")
    words = [role, str(model or s.models.tiny), "--join", address, "--node-id", name, "--device", "cpu"]
    words += ["--verify-pages", "--local-nodes", "4", *options]
    log = s.server.folder / f"{name}.log"
    node = Process(s.server.temp_dir, log, *words, env=s.server.env, wait_s=s.client.wait_s)
    try:
        yield node
        node.end(signal.SIGTERM, END_S)  # who says that it leaves is not missed
    finally:
        node.kill()
