"""`baton serve` for rows: with fault points whose rules change, and code that puts a fault back in."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from conformance.process import START_S, Process, ServeProcess, environment

END_S = 10.0
OPTIONS = ("--port", "0", "--device", "cpu", "--debug-checks", "--verify-pages")
RULES = "rules"  # the file that BATON_FAULTS names


class NotStarted(Exception):
    """A server did not become ready: nothing was tried."""


class Server(ServeProcess):
    """A server in a folder of its own, whose path must be short: there are sockets in it.

    Args:
        folder: empty; temporary files, the log and the rules of the fault points go there.
        options: of `baton serve`, beside the usual ones.
        patch: Python that every process runs at its start.
    """

    def __init__(self, folder: Path, model: Path, options: Sequence[str] = (), *, patch: str = "") -> None:
        self.folder = folder
        self.temp_dir = folder / "tmp"
        self.model = str(model)
        self.temp_dir.mkdir()
        (folder / RULES).touch()
        self.env = environment(self.temp_dir)  # without rules: for other commands, too
        if patch:
            (folder / "patch").mkdir()
            (folder / "patch" / "sitecustomize.py").write_text(patch)
            paths = (str(folder / "patch"), self.env.get("PYTHONPATH"))
            self.env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        env = self.env | {"BATON_FAULTS": f"@{folder / RULES}"}
        words = ("serve", self.model, *OPTIONS, *options)
        super().__init__(Process(self.temp_dir, folder / "log", *words, env=env))

    @property
    def log(self) -> str:
        """Everything that it and its children said so far."""
        return self.process.log()

    def wait_for(self, pattern: str, deadline_s: float = START_S, since: int = 0) -> str:
        """Wait for a line of the log, from character `since` on; returns the pattern's last group."""
        return self.process.wait_for(pattern, deadline_s, since)

    def wait_ready(self) -> None:
        """Wait until /ready says so.

        Raises:
            NotStarted: it does not.
        """
        try:
            super().wait_ready()
        except AssertionError as error:
            raise NotStarted(str(error)) from None

    def tail(self) -> str:
        """The end of the log."""
        return self.process.tail()

    def nodes(self) -> dict[str, int]:
        """The children that run now: pid by node id, the gateway as `gateway`."""
        gateways = [pid for pid, words in self.process.children().items() if "gateway" in words]
        return super().nodes() | ({"gateway": gateways[0]} if gateways else {})

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
        try:
            self.process.end(signal.SIGINT, END_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it whatever state it is in; its children end by themselves."""
        for pid in self.nodes().values():
            os.kill(pid, signal.SIGCONT)  # a stopped one could not
        self.process.kill()
