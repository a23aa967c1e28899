"""Server processes of a benchmark on a core of their own, and how fast they were by clock and processor time.

Knows nothing of what they serve.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_START_S = 120.0
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a server was: by the clock, and by the processor time that it took (its own alone)."""

    chunks: int
    wall_s: float
    cpu_s: float

    @property
    def per_s(self) -> float:
        """Chunks a second of the clock."""
        return self.chunks / self.wall_s

    @property
    def per_cpu_s(self) -> float:
        """Chunks a second of the server's processor time: what counts where others use the machine, too."""
        return self.chunks / max(self.cpu_s, _TICK_S)


def cpu_s_of(pid: int) -> float:
    """Return the processor time of a process so far, all threads (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


@contextmanager
def started(argv: Sequence[str | Path], core: int | None) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run a server on one core; gives the process, and the file that it writes to."""
    cores = os.sched_getaffinity(0)
    with tempfile.NamedTemporaryFile() as log:
        if core is not None:
            os.sched_setaffinity(0, {core})
        try:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        finally:
            os.sched_setaffinity(0, cores)
        try:
            yield process, Path(log.name)
        finally:
            stop(process, _END_S)


def stop(process: subprocess.Popen[Any], end_s: float) -> None:
    """End a server as Ctrl-C does; what does not end in time is killed."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(end_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def said(process: subprocess.Popen[bytes], log: Path, pattern: re.Pattern[str]) -> re.Match[str]:
    """Wait until a server has written this.

    Raises:
        ConfigError: it ended, or takes too long.
    """
    give_up_s = time.monotonic() + _START_S
    while (found := pattern.search(log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > give_up_s:
            raise ConfigError(f"the server did not come up:\n{log.read_text()}")
        time.sleep(0.05)
    return found


@contextmanager
def other_core() -> Iterator[int | None]:
    """Keep this process on one core; gives another one for servers, or None where there is none."""
    cores = os.sched_getaffinity(0)
    ours, *others = sorted(cores)
    if others:
        os.sched_setaffinity(0, {ours})
    try:
        yield others[0] if others else None
    finally:
        os.sched_setaffinity(0, cores)
