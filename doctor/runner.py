"""Have checks run by a worker process, each within its time; another worker goes on after one that failed.

A check that hangs, crashes or is killed is a problem with its reason, and costs nothing but itself. Knows
neither what checks look at nor how findings are shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doctor.asked import Check
from doctor.finding import Finding, Level, problem
from doctor.last_words import last_words

_ROOT = Path(__file__).parents[1]
_START_S = 20.0  # until a worker begins its first check
_TICK_S = 0.25


@dataclass(frozen=True, slots=True)
class Found:
    """A check found something."""

    check: str
    finding: Finding


@dataclass(frozen=True, slots=True)
class Waiting:
    """A check is at work, for so long."""

    check: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A check is over, and took so long."""

    check: str
    seconds: float


Event = Found | Waiting | Ended


def run_checks(
    checks: Sequence[Check], values: dict[str, Any], module: str = "doctor.worker"
) -> Generator[Event]:
    """Run checks in this order, and say what happens as it does.

    Args:
        values: the options of the command, as JSON has them.
        module: of the worker.
    """
    left = list(checks)
    while left:
        with tempfile.TemporaryFile() as stderr:
            worker = _Worker(module, values, [check.name for check in left], stderr.fileno())
            try:
                yield from _follow(worker, left)
            finally:
                worker.end()


class _Worker:
    """The process, with all that it starts in a process group of its own."""

    def __init__(self, module: str, values: dict[str, Any], names: list[str], stderr: int) -> None:
        # Importable from any folder, and nothing of that folder is imported (-P).
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self.stderr = stderr
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        self._unread = b""
        # It stays open: its end is ours, on which the worker ends.
        self._process.stdin.write(json.dumps({"values": values, "checks": names}).encode() + b"\n")
        self._process.stdin.flush()

    def lines(self, timeout_s: float) -> list[bytes] | None:
        """Return the whole lines that come within the time; None when there will be no more."""
        if not select.select([self._out], [], [], max(0.0, timeout_s))[0]:
            return []
        read = os.read(self._out, 65536)
        if not read:
            return None
        *lines, self._unread = (self._unread + read).split(b"\n")
        return lines

    def end(self) -> int:
        """End whatever is left of it; returns the exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        return status

    def status(self) -> int:
        """Wait for its own end; returns the exit status."""
        try:
            return self._process.wait(_TICK_S)
        except subprocess.TimeoutExpired:  # it closed its output and lives on
            return self.end()


def _follow(worker: _Worker, left: list[Check]) -> Iterator[Event]:
    """Pass on what a worker says, and take from `left` what is over; ends with the worker, or a failure."""
    begun_s, limit_s = time.monotonic(), _START_S
    while left:
        elapsed_s = time.monotonic() - begun_s
        if elapsed_s >= limit_s:
            words = last_words(worker.stderr)
            yield _failed(left.pop(0), f"took longer than {limit_s:g} s, and was ended", words)
            return
        lines = worker.lines(min(_TICK_S, limit_s - elapsed_s))
        if lines is None:
            status = worker.status()
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            yield _failed(left.pop(0), f"ended its process {how}", last_words(worker.stderr))
            return
        if not lines:
            yield Waiting(left[0].name, elapsed_s)
        for line in lines:
            match json.loads(line):
                case {"begin": _}:
                    begun_s, limit_s = time.monotonic(), left[0].limit_s
                case {"finding": fields}:
                    yield Found(left[0].name, Finding(**fields | {"level": Level(fields["level"])}))
                case {"end": _}:
                    yield Ended(left.pop(0).name, time.monotonic() - begun_s)


def _failed(check: Check, how: str, words: str) -> Found:
    said = f"; it said last: {words}" if words else ""
    return Found(
        check.name,
        problem(f"the check {how}{said}", "look at what it was about; a server may hang or end here as well"),
    )
