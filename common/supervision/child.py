"""One process of ours as its parent holds it: the line to it, its output, its death, its end.

It must not know why a process is started or what follows from its death; that is the supervisor's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.supervision.lifeline import MAX_NOTICE_BYTES

TAIL_LINES = 20
MAX_LINE_BYTES = 1 << 16
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to start: `name` as in the log (`decode-0`), its command with options, and what stands last.

    A job ends by itself, and its output is the parent's own: stdout inherited, stderr passed on as it comes.
    """

    name: str
    role: str
    argv: tuple[str, ...]
    operands: tuple[str, ...] = ()
    is_job: bool = False
    ends_first: bool = False


class Child:
    """A running process, leader of its own process group.

    Not of its own session: that would weaken its nice value, and the kernel continues and ends a *stopped*
    child whose parent dies only within a session.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, spec: ChildSpec, env: Mapping[str, str], run_dir: Path, more_argv: tuple[str, ...] = ()
    ):
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.is_over = False
        self._partial = b""
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.output, stderr = os.pipe()
        os.set_blocking(self.output, False)
        try:
            self.send({"run_dir": str(run_dir)})
            self._process = subprocess.Popen(
                [*spec.argv, *more_argv, "--parent-fd", str(theirs.fileno()), *spec.operands],
                stdin=subprocess.DEVNULL,
                stdout=None if spec.is_job else stderr,
                stderr=stderr,
                env=dict(env),
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        except OSError:
            self.line.close()
            os.close(self.output)
            raise
        finally:
            theirs.close()
            os.close(stderr)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def send(self, notice: dict[str, Any]) -> None:
        """Tell the child something; dropped when it does not read."""
        with contextlib.suppress(OSError):
            self.line.send(json.dumps(notice).encode(), socket.MSG_DONTWAIT)

    def read_notices(self) -> tuple[list[dict[str, Any]], bool]:
        """Return what the child said since the last time, and whether its end of the line is still open."""
        notices: list[dict[str, Any]] = []
        while True:
            try:
                data = self.line.recv(MAX_NOTICE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return notices, True
            except OSError:
                return notices, False
            if not data:
                return notices, False
            notices.append(json.loads(data))

    def read_output(self) -> tuple[bytes, bool]:
        """Return what is to be shown of the child's output, and whether the pipe is still open.

        A service's output comes back in whole lines, each with the child's name before it.
        """
        data = self._read_pipe()
        if data is None:
            return b"", True
        return self._format(data) if data else self._flush(), bool(data)

    def last_words(self) -> bytes:
        """Return what is left of the output of a child that ended.

        A grandchild may hold the pipe open: what is not in it now is not waited for.
        """
        words = b""
        while data := self._read_pipe():
            words += self._format(data)
        return words + self._flush()

    def _read_pipe(self) -> bytes | None:
        """Return what is in the pipe: None for nothing now, empty for its end."""
        try:
            return os.read(self.output, READ_BYTES)
        except BlockingIOError:
            return None

    def _format(self, data: bytes) -> bytes:
        if self.spec.is_job:
            return data
        *lines, self._partial = (self._partial + data).split(b"\n")
        whole = b"".join(self._label(line) for line in lines)
        return whole + self._flush() if len(self._partial) > MAX_LINE_BYTES else whole

    def _flush(self) -> bytes:
        line, self._partial = self._partial, b""
        return self._label(line) if line else b""

    def _label(self, line: bytes) -> bytes:
        # A progress bar draws over itself with carriage returns: a terminal shows its last state.
        line = line.rstrip(b"\r").rpartition(b"\r")[2]
        self.tail.append(line.decode(errors="replace"))
        return b"[" + self.spec.name.encode() + b"] " + line + b"\n"

    def terminate(self, *, at_once: bool) -> None:
        """Ask it to end: when its requests are over, or at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
            if at_once:  # beside SIGTERM, as it ignores this one until it is ready
                os.kill(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """End it, and whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Collect a child whose pidfd is readable; return its status, negative for a signal.

        The group is killed before the leader is waited for: until then nobody else can have its number.
        """
        self.kill()
        return self._process.wait()

    def close(self) -> None:
        """Give the descriptors back."""
        self.is_over = True
        self.line.close()
        os.close(self.output)
        os.close(self.pidfd)


def describe_status(status: int) -> str:
    """Say how a process ended, from its status (negative: a signal)."""
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"
