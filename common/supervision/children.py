"""The running children of a process and the signals that end it, as one selector: spawn, wait, shut down.

It must not know what follows from a child's death or words; it hands both on. Signals, deaths (pidfds), the
children's lines and their output are all descriptors; nothing is polled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from common.supervision.child import Child, ChildSpec
from common.supervision.stop_signals import StopSignals
from terminal.progress import beside_progress

log = logging.getLogger("baton.supervisor")

GRACE_S = 3.0  # all is over within 5 s of a signal: this, and what the kernel needs after SIGKILL
KILL_S = 1.5


class Stopped(Exception):
    """A signal asked us to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"signal {signum}")
        self.signum = signum


class Listener(Protocol):
    """Who decides what follows from what the children do."""

    def on_notice(self, child: Child, notice: dict[str, Any]) -> None:
        """Take what a child said."""

    def on_end(self, child: Child, status: int) -> None:
        """Take note that a child ended (negative status: by a signal). Not called during the shutdown."""


def _show(data: bytes) -> None:
    # A terminal that was closed takes no more output; the server goes on until it is told to stop.
    with contextlib.suppress(OSError), beside_progress():
        while data:
            data = data[os.write(2, data) :]


class Children:
    """Owns child processes; a context manager that ends them.

    Args:
        run_dir: where the children have their sockets. They remove it when this process is killed.
        env: environment of the children.
        listener: is told what they say and how they end.
        drain_grace_s: after SIGTERM, the ones that end first may take so long.
    """

    def __init__(
        self, run_dir: Path, env: Mapping[str, str], listener: Listener, drain_grace_s: float = 0.0
    ) -> None:
        self._run_dir = run_dir
        self._env = env
        self._listener = listener
        self._drain_grace_s = drain_grace_s
        self._running: set[Child] = set()
        self._selector = selectors.DefaultSelector()
        self._signals = StopSignals()
        self._is_closing = False
        self._is_hurried = False

    def __enter__(self) -> Children:
        self._signals.__enter__()
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None
    ) -> None:
        try:
            self._shutdown(drains=isinstance(e, Stopped) and e.signum == signal.SIGTERM)
        finally:
            self._selector.close()
            self._signals.__exit__(kind, e, t)

    def spawn(self, spec: ChildSpec, more_argv: tuple[str, ...] = ()) -> Child:
        """Start a process. OSError: it cannot be started."""
        child = Child(spec, self._env, self._run_dir, more_argv)
        self._running.add(child)
        for fd, handler in (
            (child.line.fileno(), self._on_line),
            (child.output, self._on_output),
            (child.pidfd, self._on_death),
        ):
            self._selector.register(fd, selectors.EVENT_READ, _bind(handler, child))
        return child

    def wait(self, until: float | None) -> None:
        """Wait for the next event, or until that time of the monotonic clock, and act on it.

        Raises:
            Stopped: by SIGINT, SIGTERM or SIGHUP.
        """
        timeout = None if until is None else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(timeout):
            key.data()

    def _on_signal(self) -> None:
        signum = self._signals.take()
        if signum is None:
            return
        if not self._is_closing:
            raise Stopped(signum)
        self._is_hurried = True  # asked again: no more of this grace

    def _on_line(self, child: Child) -> None:
        notices, is_open = child.read_notices()
        if not is_open:
            self._unregister(child.line.fileno())
        if not self._is_closing:
            for notice in notices:
                self._listener.on_notice(child, notice)

    def _on_output(self, child: Child) -> None:
        data, is_open = child.read_output()
        if not is_open:
            self._unregister(child.output)
        _show(data)

    def _on_death(self, child: Child) -> None:
        status = child.reap()
        self._on_line(child)
        _show(child.last_words())
        for fd in (child.line.fileno(), child.output, child.pidfd):
            self._unregister(fd)
        child.close()
        self._running.discard(child)
        if not self._is_closing:
            self._listener.on_end(child, status)

    def _unregister(self, fd: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def _shutdown(self, *, drains: bool) -> None:
        """Ask all to end, a grace, SIGKILL to what is left.

        The one that clients see goes first: it would tell them, and the log, that the others died. When this
        process was asked for it by SIGTERM, it may finish what it is at; nobody is started again meanwhile.
        """
        self._is_closing = True
        first = [child for child in self._running if child.spec.ends_first]
        if drains and self._drain_grace_s > 0:
            until = time.monotonic() + self._drain_grace_s + GRACE_S / 2
            self._end(first, until, at_once=False)
            self._is_hurried = False  # who asks again while requests run wants an end, and no massacre
        deadline = time.monotonic() + GRACE_S
        self._end(first, deadline - GRACE_S / 2, at_once=True)
        self._end(list(self._running), deadline, at_once=True)
        for child in self._running:
            child.kill()
        deadline = time.monotonic() + KILL_S
        while self._running and time.monotonic() < deadline:
            self.wait(deadline)
        for child in self._running:
            log.error("%s (process %d) does not end", child.spec.name, child.pid)

    def _end(self, children: Sequence[Child], deadline: float, *, at_once: bool) -> None:
        for child in self._running.intersection(children):
            child.terminate(at_once=at_once)
        while not self._running.isdisjoint(children) and not self._is_hurried and time.monotonic() < deadline:
            self.wait(deadline)


def _bind(handler: Callable[[Child], None], child: Child) -> Callable[[], None]:
    def on_event() -> None:
        # The selector may report a descriptor whose child was collected earlier in the same turn.
        if not child.is_over:
            handler(child)

    return on_event
