"""`baton serve` as a process of ours: started, observed from outside, ended. Knows no request."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from conformance.waiting import poll_until

START_S = 120.0  # a loaded machine imports torch slowly
END_S = 10.0
OPTIONS = ("--port", "0", "--device", "cpu", "--debug-checks", "--verify-pages")
RULES = "rules"  # the file that BATON_FAULTS names


class NotStarted(Exception):
    """A server did not become ready: nothing was tried."""


class Server:
    """A server in a folder of its own, whose path must be short: there are sockets in it.

    Args:
        folder: empty; temporary files, the log and the rules of the fault points go there.
        options: of `baton serve`, beside the usual ones.
        patch: Python that every process runs at its start.
    """

    def __init__(self, folder: Path, model: Path, options: Sequence[str] = (), *, patch: str = "") -> None:
        self.folder = folder
        self.model = str(model)
        self._log = folder / "log"
        (folder / "tmp").mkdir()
        (folder / RULES).touch()
        env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        env |= {"TMPDIR": str(folder / "tmp"), "BATON_FAULTS": f"@{folder / RULES}", "OMP_NUM_THREADS": "1"}
        if patch:
            (folder / "patch").mkdir()
            (folder / "patch" / "sitecustomize.py").write_text(patch)
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder / "patch"), env.get("PYTHONPATH"))))
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cli", "serve", self.model, *OPTIONS, *options],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )

    @property
    def log(self) -> str:
        """Everything that it and its children said so far."""
        return self._log.read_text(errors="replace")

    @property
    def url(self) -> str:
        """Where it listens, once it does."""
        return self.wait_for(r"listening on (http://127\.0\.0\.1:\d+)")

    def wait_for(self, pattern: str, deadline_s: float = START_S, since: int = 0) -> str:
        """Wait for a line of the log, from character `since` on; returns the pattern's last group."""

        def look() -> str | None:
            found = re.findall(pattern, self.log[since:])
            if not found and self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.tail()}")
            return str(found[-1]) if found else None

        return poll_until(look, deadline_s, f"{pattern!r} in the log", self.tail)

    def wait_ready(self) -> None:
        """Wait until /ready says so.

        Raises:
            NotStarted: it does not.
        """

        def ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.tail()}")
            try:
                return httpx.get(self.url + "/ready", timeout=5, trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        try:
            poll_until(ready, START_S, "the server is ready", self.tail)
        except AssertionError as error:
            raise NotStarted(str(error)) from None

    def tail(self) -> str:
        """The end of the log."""
        return "\n".join(self.log.splitlines()[-15:])

    def nodes(self) -> dict[str, int]:
        """The children that run now: pid by node id, the gateway as `gateway`."""
        found = {}
        for child in _children(self.process.pid):
            words = _command(child)
            if "--node-id" in words:
                found[words[words.index("--node-id") + 1]] = child
            elif "gateway" in words:
                found["gateway"] = child
        return found

    def set_faults(self, rules: str) -> None:
        """Have the fault points obey these rules from now on, counted from 1."""
        new = self.folder / (RULES + ".new")
        new.write_text(rules)
        new.rename(self.folder / RULES)  # nobody reads half of it

    def stop(self) -> None:
        """End it as Ctrl-C does.

        Raises:
            AssertionError: it does not end in time, or not well.
        """
        self.process.send_signal(signal.SIGINT)
        try:
            status = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"Ctrl-C did not end the server within {END_S:g} s") from None
        if status != 0:
            raise AssertionError(f"the server ended with {status}:\n{self.tail()}")

    def kill(self) -> None:
        """End it whatever state it is in; its children end by themselves."""
        for pid in self.nodes().values():
            os.kill(pid, signal.SIGCONT)  # a stopped one could not
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
