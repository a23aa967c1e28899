"""A worker whose checks go wrong in every way: `python -m tests.doctor.bad_worker`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

from common.errors import ConfigError
from doctor import worker
from doctor.asked import Asked, Check
from doctor.finding import Finding, ok


def _good(asked: Asked) -> Iterator[Finding]:
    print("what a library says")  # noqa: T201
    yield ok(asked.config.model.model)


def _silent(asked: Asked) -> Iterator[Finding]:
    return iter(())


def _raises(asked: Asked) -> Iterator[Finding]:
    yield ok("before")
    raise RuntimeError("it broke\nin two lines")


def _misconfigured(asked: Asked) -> Iterator[Finding]:
    raise ConfigError("--this does not go with --that")


def _exits(asked: Asked) -> Iterator[Finding]:
    os._exit(3)


def _crashes(asked: Asked) -> Iterator[Finding]:
    sys.stderr.write("a driver's last words\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGSEGV)
    signal.pause()
    raise AssertionError


def _hangs(asked: Asked) -> Iterator[Finding]:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    yield ok("pids", worker=os.getpid(), child=child.pid)
    signal.pause()


def check(name: str, run: Callable[[Asked], Iterator[Finding]], limit_s: float = 60.0) -> Check:
    return Check(name, "", "", "", run, limit_s)


CHECKS = {
    one.name: one
    for one in (
        check("good", _good),
        check("silent", _silent),
        check("raises", _raises),
        check("misconfigured", _misconfigured),
        check("exits", _exits),
        check("crashes", _crashes),
        check("hangs", _hangs, limit_s=2.0),
        check("hangs long", _hangs, limit_s=600.0),
    )
}

if __name__ == "__main__":
    worker.main(CHECKS)
