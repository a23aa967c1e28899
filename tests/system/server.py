"""A real server: `baton serve` and its children as processes, observed from outside.

Starts it, finds its processes and sockets, ends it, and checks that nothing stays behind. Knows no request;
those are the business of client.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from conformance.waiting import poll_until

START_S = 120.0  # a loaded machine imports torch slowly
END_S = 5.0  # promised: everything is over within 5 s of a signal
BATON = Path(sys.executable).parent / "baton"
ROLES = ("gateway", "prefill", "decode")
SERVE_ARGS = ("--port", "0", "--debug-checks", "--verify-pages")
TROUBLE = re.compile(r"Traceback|\bERROR\b|CRITICAL|rejected message|starting it again")
# A busy machine does not finish all that it is at within the time that Ctrl-C gives it.
CUT_SHORT = "timeout graceful shutdown exceeded"


class Process:
    """One `baton` command whose output goes to a file."""

    def __init__(self, temp_dir: Path, log: Path, *args: str) -> None:
        self._log = log
        env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        env.setdefault("OMP_NUM_THREADS", "1")  # see tests/conftest.py
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                self.command(*args),
                # One thread a process: where many share few cores, threads that wait for each other at every
                # operation come to a standstill.
                env={**env, "TMPDIR": str(temp_dir), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )

    def command(self, *args: str) -> list[str]:
        """How it is started."""
        return [str(BATON), *args]

    @property
    def pid(self) -> int:
        """The process id."""
        return self.popen.pid

    def log(self) -> str:
        """Everything that it and its children said so far."""
        return self._log.read_text(errors="replace")

    def find(self, pattern: str) -> str | None:
        """The first group of the pattern's last match in the log."""
        found = re.findall(pattern, self.log())
        return found[-1] if found else None

    def wait_for(self, pattern: str) -> str:
        """Wait until the log has the pattern; return its first group."""

        def look() -> str | None:
            assert self.popen.poll() is None, f"ended with {self.popen.returncode}:\n{self.log()}"
            return self.find(pattern)

        return poll_until(look, START_S, repr(pattern), self.log)

    def end(self, signum: signal.Signals = signal.SIGINT) -> None:
        """Ask it to end, and check that it does in time and with success."""
        self.popen.send_signal(signum)
        assert self.popen.wait(END_S) == 0, self.log()

    def kill(self) -> None:
        """End it whatever state it is in; for the clean-up of a test that failed."""
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()


class Server:
    """`baton serve` in a folder of its own for temporary files."""

    def __init__(self, folder: Path, model: Path, *args: str) -> None:
        self.model = str(model)
        self.temp_dir = folder / "tmp"
        self.temp_dir.mkdir()
        self.process = Process(self.temp_dir, folder / "log", "serve", self.model, *SERVE_ARGS, *args)

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.process.wait_for(r"listening on (http://127.0.0.1:\d+)")

    def wait_ready(self) -> None:
        """Wait until /ready says so."""
        url = self.url

        def ready() -> bool:
            assert self.process.popen.poll() is None, self.process.log()
            try:
                return httpx.get(url + "/ready", timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        poll_until(ready, START_S, "ready", self.process.log)

    def pids(self) -> dict[str, int]:
        """The children that run now, by role."""
        commands = self._commands()
        return {role: pid for pid, words in commands.items() for role in ROLES if role in words[:4]}

    def nodes(self) -> dict[str, int]:
        """The node processes that run now, by node id: there may be several of a role."""
        return {
            words[words.index("--node-id") + 1]: pid
            for pid, words in self._commands().items()
            if "--node-id" in words
        }

    def _commands(self) -> dict[int, list[str]]:
        """The command lines of the children, by pid."""
        commands = {}
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):
                commands[child.pid] = child.cmdline()
        return commands

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
