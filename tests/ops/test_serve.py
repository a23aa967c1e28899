"""`serve` with real processes that have no model: start, death, stall, signals, and nothing left behind."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DEADLINE_S = 60.0
ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "prefill-0", "decode-0")


class Server:
    """A driver process whose stderr the test reads line by line."""

    def __init__(self, temp_dir: Path, *args: str, **modes: str) -> None:
        self.temp_dir = temp_dir
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.ops.driver", *(args or ("30",))],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(temp_dir), **modes},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        self.lines: list[str] = []
        self._rest = b""
        self._unexpected: list[str] = []

    def expect(self, pattern: str) -> str:
        """Wait for a line of stderr that matches, take it out, and return the first group.

        Processes run side by side, so lines that came earlier and were not expected yet match too.
        """
        while True:
            for line in self._unexpected:
                if found := re.search(pattern, line):
                    self._unexpected.remove(line)
                    return found.group(found.re.groups and 1)
            assert self._read(), f"no {pattern!r} in {self.lines}"

    def pidfds(self, names: tuple[str, ...] = SERVICES) -> dict[str, int]:
        """Return a pidfd for each service, once all are up."""
        return {name: os.pidfd_open(int(self.expect(rf"\[{name}\] up (\d+)"))) for name in names}

    def end(self) -> int:
        """Read to the end and return the exit status."""
        while self._read():
            pass
        return self.process.wait(DEADLINE_S)

    def _read(self) -> bool:
        assert self.process.stderr is not None
        readable, _, _ = select.select([self.process.stderr], [], [], DEADLINE_S)
        assert readable, f"nothing more after {self.lines}"
        data = os.read(self.process.stderr.fileno(), 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.lines += [line.decode() for line in lines]
        self._unexpected += [line.decode() for line in lines]
        return bool(data)


def assert_gone(pidfd: int) -> None:
    assert select.select([pidfd], [], [], DEADLINE_S)[0], "a process is left"
    os.close(pidfd)


def assert_alive(pidfd: int) -> None:
    assert not select.select([pidfd], [], [], 0)[0], "a process ended"


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start_server(*args: str, **modes: str) -> Server:
        servers.append(Server(Path(temp_dir), *args, **modes))
        return servers[-1]

    # Not tmp_path: in a folder with such a long path the server makes none of its own.
    with tempfile.TemporaryDirectory(prefix="ops-", dir="/tmp") as temp_dir:
        yield start_server
        for server in servers:
            if server.process.poll() is None:
                server.process.kill()
            server.process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_and_leaves_nothing(start: Callable[..., Server], signum: signal.Signals) -> None:
    server = start()
    pidfds = server.pidfds()
    port = server.expect(r"\[gateway\] port (\d+)")
    assert server.process.stdout is not None
    lines = [server.process.stdout.readline().decode() for _ in range(4)]
    assert lines[1] == f"Baton serves tiny at http://127.0.0.1:{port}\n"
    assert lines[3].startswith(f"  curl http://127.0.0.1:{port}/v1/chat/completions")
    assert [p.name[:6] for p in server.temp_dir.iterdir()] == ["baton-"]

    server.process.send_signal(signum)

    assert server.end() == 0
    for pidfd in pidfds.values():
        assert_gone(pidfd)
    assert list(server.temp_dir.iterdir()) == []


def test_signal_while_the_model_is_made_ready(start: Callable[..., Server]) -> None:
    server = start(STANDIN_PREPARE="hangs")
    pidfd = os.pidfd_open(int(server.expect(r"^up (\d+)")))
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert_gone(pidfd)
    assert list(server.temp_dir.iterdir()) == []


def test_signal_while_a_node_starts(start: Callable[..., Server]) -> None:
    server = start(STANDIN_DECODE="hangs")
    pidfds = server.pidfds()
    server.process.send_signal(signal.SIGINT)
    assert server.end() == 0
    for pidfd in pidfds.values():
        assert_gone(pidfd)


def test_death_before_ready_ends_the_server_with_the_last_words(start: Callable[..., Server]) -> None:
    server = start(STANDIN_PREFILL="fails")
    assert server.end() == 1
    at = server.lines.index("baton: prefill-0 ended with status 3 before it was ready; it said last:")
    assert server.lines[at + 2] == "    no such layer"
    assert len(server.lines) == at + 3
    assert list(server.temp_dir.iterdir()) == []


def test_model_that_cannot_be_made_ready_starts_nothing(start: Callable[..., Server]) -> None:
    server = start(STANDIN_PREPARE="fails")
    assert server.end() == 3
    assert [line for line in server.lines if not line.startswith("up ")] == ["no such layer"]


def test_log_says_once_which_node_is_on_which_gpu(start: Callable[..., Server]) -> None:
    server = start(STANDIN_GPUS="2", STANDIN_NODES="2")
    for name, gpu in (("prefill-0", 0), ("prefill-1", 1), ("decode-0", 0), ("decode-1", 1)):
        server.expect(f"{name} runs on GPU {gpu}, with 0.45 of its memory")
    pidfds = server.pidfds(("decode-1",))
    server.expect("decode-1 is ready")
    signal.pidfd_send_signal(pidfds["decode-1"], signal.SIGKILL)
    server.expect("decode-1 is ready")
    assert sum("runs on GPU" in line for line in server.lines) == 4


def test_killed_node_comes_back_and_the_others_stay(start: Callable[..., Server]) -> None:
    server = start()
    before = server.pidfds()
    server.expect("decode-0 is ready")
    signal.pidfd_send_signal(before["decode-0"], signal.SIGKILL)
    server.expect(r"decode-0 was killed by SIGKILL; starting it again now")
    server.expect(r'\[gateway\] told {"restarts": {"decode": {"died": 1}, "gateway": {}, "prefill": {}}}')
    after = server.pidfds(("decode-0",))
    server.expect("decode-0 is ready")
    signal.pidfd_send_signal(after["decode-0"], signal.SIGKILL)
    server.expect(r"decode-0 was killed by SIGKILL; starting it again in 1 s")
    assert_alive(before["gateway"])
    assert_alive(before["prefill-0"])


def test_each_of_several_nodes_comes_back_alone(start: Callable[..., Server]) -> None:
    server = start(STANDIN_NODES="2")
    names = ("gateway", "prefill-0", "prefill-1", "decode-0", "decode-1")
    before = server.pidfds(names)
    for name in names:
        server.expect(f"{name} is ready")
    for name in ("decode-1", "prefill-0"):
        signal.pidfd_send_signal(before.pop(name), signal.SIGKILL)
        server.expect(rf"{name} was killed by SIGKILL; starting it again now")
        server.expect(rf"{name} is ready")
    died = '{"died": 1}'
    server.expect(
        rf'\[gateway\] told {{"restarts": {{"decode": {died}, "gateway": {{}}, "prefill": {died}}}}}'
    )
    for pidfd in before.values():
        assert_alive(pidfd)


def test_restarted_gateway_keeps_its_port_and_hears_the_counts(start: Callable[..., Server]) -> None:
    server = start()
    pidfds = server.pidfds()
    port = server.expect(r"\[gateway\] port (\d+)")
    server.expect("gateway is ready")
    signal.pidfd_send_signal(pidfds["gateway"], signal.SIGKILL)
    assert server.expect(r"\[gateway\] port (\d+)") == port
    server.expect(r'\[gateway\] told {"restarts": {"decode": {}, "gateway": {"died": 1}, "prefill": {}}}')


def test_stopped_node_is_killed_and_started_again(start: Callable[..., Server]) -> None:
    server = start("1")
    pidfds = server.pidfds()
    server.expect("decode-0 is ready")
    signal.pidfd_send_signal(pidfds["decode-0"], signal.SIGSTOP)
    server.expect("decode-0 gave no sign of life for 1 s: killing it")
    assert_gone(pidfds["decode-0"])
    server.expect(r'\[gateway\] told {"restarts": {"decode": {"stalled": 1}, "gateway": {}, "prefill": {}}}')
    server.pidfds(("decode-0",))
    server.expect("decode-0 is ready")
    assert_alive(pidfds["prefill-0"])


def test_killed_server_takes_its_children_and_folders_along(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    own_file = tmp_path / "gateway.file"
    server = start(STANDIN_OWN_FILE=str(own_file))
    pidfds = server.pidfds()
    server.expect(r'\[gateway\] told {"restarts"')
    assert [folder.name[:6] for folder in server.temp_dir.iterdir()] == ["baton-"]
    assert own_file.exists()
    server.process.kill()
    for pidfd in pidfds.values():
        assert_gone(pidfd)
    assert list(server.temp_dir.iterdir()) == []
    assert not own_file.exists()


def test_second_signal_kills_who_does_not_end_with_all_it_started(start: Callable[..., Server]) -> None:
    server = start(STANDIN_DECODE="stubborn")
    pidfds = server.pidfds()
    grandchild = os.pidfd_open(int(server.expect(r"\[decode-0\] grandchild (\d+)")))
    server.process.send_signal(signal.SIGTERM)
    server.expect(r"\[decode-0\] told to end")
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert_gone(pidfds["decode-0"])
    assert_gone(grandchild)


def test_one_signal_is_enough_for_who_does_not_end(start: Callable[..., Server]) -> None:
    server = start(STANDIN_PREFILL="stubborn")
    pidfds = server.pidfds()
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert_gone(pidfds["prefill-0"])


@pytest.mark.parametrize(("mode", "status", "stdout"), [("well", 0, b"answer to why?\n"), ("fails", 3, b"")])
def test_question_is_asked_when_usable_and_ends_the_server(
    start: Callable[..., Server], mode: str, status: int, stdout: bytes
) -> None:
    server = start("30", "why?", STANDIN_GENERATE=mode)
    pidfds = server.pidfds()
    assert server.end() == status
    assert server.process.stdout is not None
    assert server.process.stdout.read() == stdout
    for pidfd in pidfds.values():
        assert_gone(pidfd)
