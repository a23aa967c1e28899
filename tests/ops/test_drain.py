"""How a process leaves: when it does, what a node's loop makes of signals, what `serve` makes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from common.drain import Drain
from common.supervision.stop_signals import StopSignals
from tests.ops.test_serve import DEADLINE_S, ROOT, Server, assert_alive, assert_gone, start

__all__ = ["start"]

GRACE_S = 30.0


def is_over(drain: Drain, now: float, *, done: bool) -> bool:
    return drain.is_over(now, lambda: done)


def test_sigterm_waits_for_what_is_there_and_no_longer_than_the_grace() -> None:
    drain = Drain(GRACE_S)
    assert not is_over(drain, 0.0, done=True), "nobody asked yet"
    assert drain.deadline_s is None
    assert drain.told(signal.SIGTERM, 100.0)
    assert drain.deadline_s == 130.0
    assert [is_over(drain, now, done=False) for now in (100.0, 129.9, 130.0)] == [False, False, True]
    assert is_over(drain, 100.0, done=True)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_other_signals_end_at_once(signum: int) -> None:
    drain = Drain(GRACE_S)
    assert not drain.told(signum, 0.0)
    assert is_over(drain, 0.0, done=False)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(signum: int) -> None:
    drain = Drain(GRACE_S)
    drain.told(signal.SIGTERM, 0.0)
    assert not drain.told(signum, 1.0)
    assert is_over(drain, 1.0, done=False)


def test_a_supervised_process_is_hurried_by_sigint_alone() -> None:
    """systemd signals all processes of a service, and then the supervisor tells its children."""
    drain = Drain(GRACE_S, is_supervised=True)
    assert drain.told(signal.SIGTERM, 0.0)
    assert not drain.told(signal.SIGTERM, 1.0)
    assert not is_over(drain, 1.0, done=False)
    assert not drain.told(signal.SIGINT, 2.0)
    assert is_over(drain, 2.0, done=False)


def test_without_a_grace_sigterm_ends_at_once() -> None:
    drain = Drain(0)
    assert not drain.told(signal.SIGTERM, 0.0)
    assert is_over(drain, 0.0, done=False)


def test_signals_that_came_together_are_told_one_by_one() -> None:
    with StopSignals() as signals:
        assert signals.take() is None
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(signum)
        assert [signals.take() for _ in range(3)] == [signal.SIGTERM, signal.SIGINT, None]


# A node's loop ------------------------------------------------------------------------------------------

LOOP = """
import signal, sys
from common.supervision.lifeline import Lifeline
from common.node import run_loop

class Loop:
    '''Signals itself, and has work for so many more turns once it drains.'''
    def __init__(self, signums, left):
        self.signums, self.left, self.is_draining = signums, left, False
    def turn(self, now):
        if self.signums:
            signal.raise_signal(self.signums.pop(0))
        self.left -= self.is_draining
        return True
    def pollables(self): return []
    def deadline(self): return None
    def drain(self):
        self.is_draining = True
        print("drains")
    def is_drained(self): return self.left <= 0
    def close(self): print("closed with", self.left)

run_loop(Loop([int(n) for n in sys.argv[3:]], int(sys.argv[2])), Lifeline(None), float(sys.argv[1]))
"""
FOR_EVER = 10**9


@pytest.mark.parametrize(
    ("grace_s", "num_turns", "signums", "said"),
    [
        (3600, 3, [signal.SIGTERM], ["drains", "closed with 0"]),
        (3600, 3, [signal.SIGINT], ["closed with 3"]),
        (0, 3, [signal.SIGTERM], ["closed with 3"]),
        (3600, FOR_EVER, [signal.SIGTERM, signal.SIGTERM], ["drains", f"closed with {FOR_EVER - 1}"]),
        (3600, FOR_EVER, [signal.SIGTERM, signal.SIGINT], ["drains", f"closed with {FOR_EVER - 1}"]),
    ],
)
def test_a_node_leaves_when_its_work_is_done(
    grace_s: float, num_turns: int, signums: list[int], said: list[str]
) -> None:
    argv = [sys.executable, "-c", LOOP, *map(str, (grace_s, num_turns)), *(str(int(s)) for s in signums)]
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert result.stdout.splitlines() == said


def test_a_node_leaves_when_its_grace_is_over() -> None:
    argv = [sys.executable, "-c", LOOP, "0.2", str(FOR_EVER), str(int(signal.SIGTERM))]
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert result.stdout.startswith("drains\nclosed with ")


# `baton serve` ------------------------------------------------------------------------------------------


def test_sigterm_lets_the_gateway_finish_before_a_node_is_touched(start: Callable[..., Server]) -> None:
    server = start(STANDIN_GATEWAY="busy")
    pidfds = server.pidfds()
    assert server.process.stdout is not None
    server.process.stdout.readline()  # it is up
    server.process.send_signal(signal.SIGTERM)
    gateway = int(server.expect(r"\[gateway\] (\d+) is busy"))
    for pidfd in pidfds.values():
        assert_alive(pidfd)
    os.kill(gateway, signal.SIGUSR1)  # its last request is over
    assert server.end() == 0
    for pidfd in pidfds.values():
        assert_gone(pidfd)
    assert not [line for line in server.lines if "starting it again" in line or "told to hurry" in line]


@pytest.mark.parametrize(
    "signums",
    [[signal.SIGINT], [signal.SIGHUP], [signal.SIGTERM, signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]],
)
def test_sigint_and_a_second_signal_do_not_wait_for_it(
    start: Callable[..., Server], signums: list[signal.Signals]
) -> None:
    server = start(STANDIN_GATEWAY="busy")
    pidfds = server.pidfds()
    assert server.process.stdout is not None
    server.process.stdout.readline()
    server.process.send_signal(signums[0])
    if len(signums) > 1:
        server.expect(r"\[gateway\] (\d+) is busy")
        server.process.send_signal(signums[1])
    server.expect(r"\[gateway\] told to hurry")
    assert server.end() == 0
    for pidfd in pidfds.values():
        assert_gone(pidfd)


def test_a_node_that_drained_by_itself_is_started_again(start: Callable[..., Server]) -> None:
    server = start()
    pidfds = server.pidfds()
    server.expect("decode-0 is ready")
    signal.pidfd_send_signal(pidfds["decode-0"], signal.SIGTERM)
    assert_gone(pidfds["decode-0"])
    server.expect(r"decode-0 ended with status 0; starting it again now")
    server.pidfds(("decode-0",))
    assert_alive(pidfds["prefill-0"])
