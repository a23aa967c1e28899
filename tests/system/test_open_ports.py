"""Every open port, written to by who knows no protocol or half of one: the others are served all the while.

Beside each attack, and with its connections still open, requests get their right answers; afterwards the
process has no more memory and file descriptors than before, or nearly so, and no pickle was loaded.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import resource
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.system import zmtp
from tests.system.client import WAIT_S, Client
from tests.system.oracle import Case
from tests.system.server import poll_until, temporary_folder
from tests.system.test_garbage import Bomb
from tests.system.test_standalone import CHECKS, ByHand

pytestmark = pytest.mark.system

CLIENT_TIMEOUT_S = 2
MAX_CONNECTIONS = 300
MOST_GROWTH_MIB = 64.0
MIB = 2**20

Connect = Callable[[], socket.socket]


@dataclass(frozen=True)
class Port:
    """Where a process listens."""

    pid: int
    family: int
    address: str | tuple[str, int]

    def connect(self) -> socket.socket:
        """Open a connection."""
        raw = socket.socket(self.family)
        raw.connect(self.address)  # without a timeout it waits where the queue of a socket is full
        raw.settimeout(WAIT_S)
        return raw

    def rss_mib(self) -> float:
        """The memory of the process."""
        return float(psutil.Process(self.pid).memory_info().rss / MIB)

    def num_fds(self) -> int:
        """The open file descriptors of the process."""
        return psutil.Process(self.pid).num_fds()


@pytest.fixture(scope="module")
def deployment(model: Path) -> Iterator[ByHand]:
    """A gateway whose nodes join over tcp; a prefill node that listens on ipc, another on tcp."""
    with temporary_folder() as folder:
        by_hand = ByHand(folder, model)
        try:
            gateway = by_hand.start(
                "gateway", "--nodes", "tcp://127.0.0.1:*", "--port", "0",
                "--client-timeout", str(CLIENT_TIMEOUT_S), "--max-connections", str(MAX_CONNECTIONS),
            )  # fmt: skip
            join = ("--join", gateway.wait_for(r"nodes join (tcp://127.0.0.1:\d+)"), *CHECKS)
            by_hand.start("prefill", *join, "--listen", f"ipc://{folder}/p.sock", name="prefill-ipc")
            by_hand.start("prefill", *join, name="prefill-tcp")
            by_hand.start("decode", *join)
            by_hand.wait_ready()
            client = Client(by_hand.url, by_hand.model)
            poll_until(lambda: len(client.get("/debug/kv").json()["nodes"]) == 3, WAIT_S, "all have joined")
            yield by_hand
            assert all(process.popen.poll() is None for process in by_hand.processes.values())
            assert "Traceback" not in by_hand.log()
        finally:
            for process in by_hand.processes.values():
                process.kill()


def _tcp(pid: int, *, but: int = 0) -> Port:
    """The port on which the process listens, apart from one."""
    ports = {
        c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN
    }
    (port,) = ports - {but}
    return Port(pid, socket.AF_INET, ("127.0.0.1", port))


def port_of(deployment: ByHand, name: str) -> Port:
    """One of the four open ports."""
    pids = {key: process.pid for key, process in deployment.processes.items()}
    http = int(deployment.url.rpartition(":")[2])
    match name:
        case "http":
            return Port(pids["gateway"], socket.AF_INET, ("127.0.0.1", http))
        case "nodes":
            return _tcp(pids["gateway"], but=http)
        case "prefill-ipc":
            return Port(pids[name], socket.AF_UNIX, f"{deployment.folder}/p.sock")
        case _:
            return _tcp(pids[name])


# Attacks: each opens connections, writes to them, and leaves open those that it returns --------------------


def write(connect: Connect, *parts: bytes) -> socket.socket:
    """Write to a new connection as far as it is read."""
    raw = connect()
    with contextlib.suppress(ConnectionError):
        for part in parts:
            raw.sendall(part)
    return raw


def random_bytes(connect: Connect) -> list[socket.socket]:
    """Nothing that anybody would say."""
    draw = random.Random(5)
    return [write(connect, draw.randbytes(1 << draw.randint(0, 17))) for _ in range(40)]


def garbage_greetings(connect: Connect) -> list[socket.socket]:
    """ZMTP up to a point, and garbage from there on; other protocols' first words."""
    draw = random.Random(6)
    whole = zmtp.hand_shaken()
    return [
        *(write(connect, whole[:n], draw.randbytes(300)) for n in range(0, len(whole), 4)),
        *(
            write(connect, zmtp.greeting(m), draw.randbytes(200))
            for m in (b"PLAIN", b"CURVE", b"GSSAPI", b"")
        ),
        *(write(connect, zmtp.greeting(version=bytes((n, 9))), zmtp.ready()) for n in (0, 1, 2, 4, 255)),
        *(write(connect, zmtp.greeting(), zmtp.ready(kind)) for kind in (b"PUB", b"REQ", b"", b"x" * 200)),
        write(connect, zmtp.greeting(), zmtp.frame(b"\xff" * 64, zmtp.COMMAND)),
        write(connect, zmtp.hand_shaken(), zmtp.frame(b"\x04PING", zmtp.COMMAND) * 500),
        write(connect, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(500)),  # TLS
        write(connect, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(200)),
    ]


def half_greetings(connect: Connect) -> list[socket.socket]:
    """A beginning, and then silence."""
    whole = zmtp.hand_shaken()
    return [write(connect, whole[:n]) for n in range(len(whole)) for _ in range(2)]


def huge_frames(connect: Connect) -> list[socket.socket]:
    """Frames that claim to be large; some of it comes."""
    sizes = (100 << 20, 1 << 32, (1 << 63) - 1, (1 << 64) - 1)
    opening = zmtp.hand_shaken()
    return [
        write(connect, opening, zmtp.frame(bytes(1 << 16), flags, size))
        for size in sizes
        for flags in (0, zmtp.MORE, zmtp.COMMAND)
        for _ in range(5)
    ]


def slow_frames(connect: Connect) -> list[socket.socket]:
    """Messages that never end, a frame at a time."""
    opened = [write(connect, zmtp.hand_shaken()) for _ in range(20)]
    for _ in range(20):
        for raw in opened:
            with contextlib.suppress(ConnectionError):
                raw.sendall(zmtp.frame(b"x" * 100, zmtp.MORE))
    return opened


def many_connections(connect: Connect, count: int = MAX_CONNECTIONS + 300) -> list[socket.socket]:
    """Connections that say nothing, more than the limit where there is one."""
    opened = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            opened.append(connect())
    return opened


def thousands_of_connections(connect: Connect) -> list[socket.socket]:
    """As many as this process may have. Over tcp it would take a minute: the queue of a port is short."""
    return many_connections(connect, min(3000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))


def half_requests(connect: Connect) -> list[socket.socket]:
    """Heads and bodies that begin, and heads that come a byte at a time."""
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    opened = [
        *(write(connect, post[:n]) for n in range(1, len(post), 3)),
        *(write(connect, post, b"Content-Length: 1000000\r\n\r\n", b"{" * n) for n in (0, 1, 1000)),
        *(write(connect, post, b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\n{") for _ in range(3)),
    ]
    slow = [write(connect, b"GET /hea") for _ in range(20)]
    for byte in b"lth HTTP/1.1\r\nX: " + b"y" * 20:
        for raw in slow:
            with contextlib.suppress(ConnectionError):
                raw.sendall(bytes((byte,)))
    return opened + slow


def huge_requests(connect: Connect) -> list[socket.socket]:
    """Heads and bodies beyond every limit, announced or not."""
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    return [
        write(connect, b"GET /" + b"a" * (1 << 20)),
        write(connect, b"GET / HTTP/1.1\r\n", *(b"X%d: %s\r\n" % (n, b"y" * 1000) for n in range(2000))),
        write(connect, b"GET / HTTP/1.1\r\nX: ", *(b"y" * 65536 for _ in range(64))),
        write(connect, post, b"Content-Length: 104857600\r\n\r\n", *(bytes(1 << 20) for _ in range(100))),
        write(connect, post, b"Transfer-Encoding: chunked\r\n\r\n", *(chunk for _ in range(100))),
        write(connect, post, b"Transfer-Encoding: chunked\r\n\r\n", b"f" * 100_000),
        write(connect, post, b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /"),
        write(connect, post, b"Content-Length: -1\r\n\r\n", b"Content-Length: 99999999999999999999\r\n\r\n"),
    ]


ANYWHERE = (random_bytes, garbage_greetings, half_greetings, many_connections)
ATTACKS = {
    "http": (*ANYWHERE, half_requests, huge_requests),
    "nodes": (*ANYWHERE, huge_frames, slow_frames),
    "prefill-ipc": (*ANYWHERE, thousands_of_connections, huge_frames, slow_frames),
    "prefill-tcp": (*ANYWHERE, huge_frames, slow_frames),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_others_are_served_whatever_is_written_to_a_port(
    deployment: ByHand, cases: list[Case], name: str, tmp_path: Path
) -> None:
    port = port_of(deployment, name)
    client = Client(deployment.url, deployment.model)
    bomb = pickle.dumps(Bomb(tmp_path / "bomb"))
    before_fds = port.num_fds()
    for attack in ATTACKS[name]:
        before_mib = port.rss_mib()
        opened = [*attack(port.connect), write(port.connect, bomb)]
        try:
            if not (name == "http" and attack is many_connections):
                cases[3].check(client.ask(cases[3].body()))
            assert client.get("/health").status_code == 200
            assert port.rss_mib() < before_mib + MOST_GROWTH_MIB, attack.__name__
        finally:
            for raw in opened:
                raw.close()
        poll_until(lambda: port.num_fds() <= before_fds + 4, WAIT_S, f"{attack.__name__}: all closed")
    assert not (tmp_path / "bomb").exists()
    for case in cases[:4]:
        case.check(client.ask(case.body()))
    client.assert_ledger_clean()
    assert all(process.popen.poll() is None for process in deployment.processes.values())


def test_slow_requests_are_cut(deployment: ByHand) -> None:
    """Whoever sends a byte now and then keeps a connection for the time that is allowed, and no longer."""
    raw = port_of(deployment, "http").connect()
    raw.settimeout(0.05)
    answer, end = b"", time.monotonic() + WAIT_S
    raw.sendall(b"GET /health HTTP/1.1\r\nX: ")
    with contextlib.suppress(ConnectionError):
        while b"408" not in answer:
            assert time.monotonic() < end
            raw.sendall(b"y")
            with contextlib.suppress(TimeoutError):
                answer += raw.recv(4096)
    raw.close()
    assert answer.startswith(b"HTTP/1.1 408")
