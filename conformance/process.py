"""`baton` commands as processes of ours: started, observed from outside, ended. Knows no request."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from conformance.waiting import poll_until

START_S = 120.0  # a loaded machine imports torch slowly
END_S = 5.0  # promised: everything is over within 5 s of a signal


def environment(temp_dir: Path) -> dict[str, str]:
    """Return an environment without settings of Baton, and with one thread a process.

    Where many share few cores, threads that wait for each other at every operation come to a standstill.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return env | {"TMPDIR": str(temp_dir), "OMP_NUM_THREADS": "1"}


class Process:
    """One `baton` command whose output goes to a file.

    Args:
        temp_dir: for temporary files; its path must be short: there are sockets in it.
        env: instead of `environment(temp_dir)`.
        wait_s: for a line of the log.
    """

    def __init__(
        self,
        temp_dir: Path,
        log: Path,
        *args: str,
        env: dict[str, str] | None = None,
        wait_s: float = START_S,
    ) -> None:
        self._log = log
        self._wait_s = wait_s
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                self.command(*args),
                env=environment(temp_dir) if env is None else env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )

    def command(self, *args: str) -> list[str]:
        """How it is started."""
        return [sys.executable, "-m", "cli", *args]

    @property
    def pid(self) -> int:
        """The process id."""
        return self.popen.pid

    def log(self) -> str:
        """Everything that it and its children said so far."""
        return self._log.read_text(errors="replace")

    def tail(self) -> str:
        """The end of the log."""
        return "\n".join(self.log().splitlines()[-30:])

    def find(self, pattern: str, since: int = 0) -> str | None:
        """The first group of the pattern's last match in the log, from character `since` on."""
        found = re.findall(pattern, self.log()[since:])
        return found[-1] if found else None

    def assert_runs(self) -> None:
        """Check that it has not ended."""
        assert self.popen.poll() is None, f"ended with {self.popen.returncode}:\n{self.tail()}"

    def wait_for(self, pattern: str, deadline_s: float | None = None, since: int = 0) -> str:
        """Wait until the log has the pattern; return its first group."""

        def look() -> str | None:
            if (found := self.find(pattern, since)) is None:
                self.assert_runs()
            return found

        return poll_until(look, self._wait_s if deadline_s is None else deadline_s, repr(pattern), self.tail)

    def children(self) -> dict[int, list[str]]:
        """The command lines of the children that run now, by pid."""
        found = {}
        try:
            pids = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        except OSError:
            pids = []
        for pid in pids:
            try:
                found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            except OSError:  # it has ended
                continue
        return found

    def end(self, signum: signal.Signals = signal.SIGINT, within_s: float = END_S) -> None:
        """Ask it to end, and check that it does in time and with success."""
        self.popen.send_signal(signum)
        try:
            status = self.popen.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{signum.name} did not end it within {within_s:g} s:\n{self.tail()}"
            ) from None
        assert status == 0, f"ended with {status}:\n{self.tail()}"

    def kill(self) -> None:
        """End it whatever state it is in; for the clean-up of a test that failed."""
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()


class ServeProcess:
    """`baton serve`, by its process."""

    def __init__(self, process: Process) -> None:
        self.process = process

    @property
    def url(self) -> str:
        """Where it listens, once it does."""
        return self.process.wait_for(r"listening on (http://127\.0\.0\.1:\d+)")

    def wait_ready(self) -> None:
        """Wait until /ready says so."""
        url = self.url

        def ready() -> bool:
            self.process.assert_runs()
            try:
                return httpx.get(url + "/ready", timeout=5, trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        poll_until(ready, START_S, "ready", self.process.tail)

    def nodes(self) -> dict[str, int]:
        """The node processes that run now, by node id: there may be several of a role."""
        return {
            words[words.index("--node-id") + 1]: pid
            for pid, words in self.process.children().items()
            if "--node-id" in words
        }
