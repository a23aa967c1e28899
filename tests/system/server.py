"""A real server: `baton serve` and its children as processes, observed from outside.

Starts it, finds its processes and sockets, ends it, and checks that nothing stays behind. Knows no request;
those are the business of client.py.
"""

from __future__ import annotations

import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from conformance.process import END_S, START_S, ServeProcess
from conformance.process import Process as ConformanceProcess
from conformance.waiting import poll_until

__all__ = ["BATON", "END_S", "START_S", "Process", "Server", "poll_until", "running", "temporary_folder"]

BATON = Path(sys.executable).parent / "baton"
ROLES = ("gateway", "prefill", "decode")
SERVE_ARGS = ("--port", "0", "--debug-checks", "--verify-pages")
TROUBLE = re.compile(r"Traceback|\bERROR\b|CRITICAL|rejected message|starting it again")
# A busy machine does not finish all that it is at within the time that Ctrl-C gives it.
CUT_SHORT = "timeout graceful shutdown exceeded"


class Process(ConformanceProcess):
    """One `baton` command, as a user starts it."""

    def command(self, *args: str) -> list[str]:
        """How it is started."""
        return [str(BATON), *args]


class Server(ServeProcess):
    """`baton serve` in a folder of its own for temporary files."""

    def __init__(self, folder: Path, model: Path, *args: str) -> None:
        self.model = str(model)
        self.temp_dir = folder / "tmp"
        self.temp_dir.mkdir()
        super().__init__(Process(self.temp_dir, folder / "log", "serve", self.model, *SERVE_ARGS, *args))

    def pids(self) -> dict[str, int]:
        """The children that run now, by role."""
        children = self.process.children()
        return {role: pid for pid, words in children.items() for role in ROLES if role in words[:4]}

    def sockets(self) -> dict[str, Path]:
        """The ipc sockets of the running server, by file name."""
        return {path.name: path for path in self.temp_dir.rglob("*.sock")}

    def tree(self) -> list[psutil.Process]:
        """The server's process and all below it."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def assert_nothing_left(self, tree: list[psutil.Process], deadline_s: float = END_S) -> None:
        """Check that none of these processes is there any more, nor any temporary file."""
        # Children of a killed parent are reaped by init, so `gone` is what the kernel says, not wait().
        _, alive = psutil.wait_procs(tree, deadline_s)
        left = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert left == []
        poll_until(lambda: not any(self.temp_dir.iterdir()), deadline_s, "temporary files are gone")

    def stop(self, signum: signal.Signals = signal.SIGINT) -> None:
        """End it like a user, and check that it is over in time with nothing left."""
        tree = self.tree()
        self.process.end(signum)
        self.assert_nothing_left(tree, 1.0)

    def assert_calm(self) -> None:
        """Check that nothing in the log says that something went wrong."""
        lines = self.process.log().splitlines()
        trouble = [line for line in lines if TROUBLE.search(line) and CUT_SHORT not in line]
        assert trouble == []


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder whose path is short enough for sockets (pytest's is not)."""
    with tempfile.TemporaryDirectory(prefix="bt-", dir="/tmp") as folder:
        yield Path(folder)


@contextmanager
def running(model: Path, *args: str, calm: bool = True) -> Iterator[Server]:
    """Run a server for a while. `calm`: in the end nothing may have gone wrong in it."""
    with temporary_folder() as folder:
        server = Server(folder, model, *args)
        try:
            server.wait_ready()
            yield server
            if server.process.popen.poll() is None:
                server.stop()
            if calm:
                server.assert_calm()
        finally:
            server.process.kill()
