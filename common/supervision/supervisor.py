"""Keep the processes of a server alive: wait for each to be ready, start again what died or stalled.

A death before a process was ever ready ends everything (`ChildFailed`); a later one, or a missing sign of
life, is followed by a new start when `RestartPolicy` says.

It must not know what the processes are for, except that the one of role `gateway` says on which port it
listens and whether the whole is usable, and is told how often each role was started again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from common.supervision.child import Child, ChildSpec, describe_status
from common.supervision.children import Children
from common.supervision.restart import Due, Phase, RestartPolicy

log = logging.getLogger("baton.supervisor")

GATEWAY = "gateway"
SET_UP_STATUS = 2


class ChildFailed(Exception):
    """A process ended before it was ever ready; the text is for the user, and ends with its last words."""

    def __init__(self, text: str, tail: Sequence[str], status: int) -> None:
        # Status 2: its own complaint about the set-up, one line, was shown as it came.
        lines = () if status == SET_UP_STATUS else tail
        said = "; it said last:" if lines else ""
        super().__init__(text + said + "".join(f"\n    {line}" for line in lines))
        self.status = status


@dataclass(slots=True)
class _Service:
    """A process that is kept alive, and the child that runs now."""

    spec: ChildSpec
    policy: RestartPolicy
    child: Child | None = None
    more_argv: tuple[str, ...] = ()
    why: str = "died"  # it is started again: or "left", "stalled", "slow"


@dataclass(slots=True)
class Job:
    """A process that ends by itself: its status, and what it said in its `ready`."""

    child: Child
    status: int | None = None
    info: dict[str, Any] = field(default_factory=dict)


class Supervisor:
    """Owns all processes of a server; a context manager that ends them.

    Every method that waits raises Stopped on SIGINT, SIGTERM and SIGHUP, and ChildFailed.

    Args:
        run_dir: where the children have their sockets. They remove it when this process is killed.
        env: environment of the children.
        stall_timeout_s: a ready child without a sign of life for so long is killed and started again.
        drain_grace_s: after SIGTERM, the gateway may take so long to end.
    """

    def __init__(
        self, run_dir: Path, env: Mapping[str, str], stall_timeout_s: float, drain_grace_s: float
    ) -> None:
        self._children = Children(run_dir, env, self, drain_grace_s)
        self._stall_timeout_s = stall_timeout_s
        self._services: list[_Service] = []
        self._job: Job | None = None
        self._restarts: dict[str, Counter[str]] = {}  # by role and reason
        self._usable: set[str] = set()  # gateways that say so
        self._port = 0

    def __enter__(self) -> Supervisor:
        self._children.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None
    ) -> None:
        self._children.__exit__(kind, e, t)

    def run_job(self, spec: ChildSpec) -> Job:
        """Run a process until it ends by itself; the services are kept alive meanwhile."""
        job = self._job = Job(self._children.spawn(spec))
        while job.status is None:
            self._step()
        return job

    def start(self, specs: Sequence[ChildSpec]) -> None:
        """Start the services. OSError: one cannot be started at all."""
        self._services = [_Service(spec, RestartPolicy(self._stall_timeout_s)) for spec in specs]
        for service in self._services:
            self._restarts[service.spec.role] = Counter()
            self._start(service)

    def wait_usable(self, say: Callable[[str], None] = lambda stage: None) -> int:
        """Wait until every gateway says that requests can be served; return their port. `say` shows it."""
        gateways = {service.spec.name for service in self._services if service.spec.role == GATEWAY}
        while not (
            gateways <= self._usable and all(service.policy.was_ever_ready for service in self._services)
        ):
            num_ready = sum(service.policy.was_ever_ready for service in self._services)
            say(f"starting: {num_ready} of {len(self._services)} processes are ready")
            self._step()
        return self._port

    def watch(self) -> NoReturn:
        """Keep the services alive; ends by an exception only."""
        while True:
            self._step()

    def on_notice(self, child: Child, notice: dict[str, Any]) -> None:
        """Take what a child said; every word of it is a sign of life."""
        service = self._service_of(child)
        if service is not None:
            self._take(service, notice)
        elif self._job is not None and self._job.child is child:
            self._job.info = notice

    def on_end(self, child: Child, status: int) -> None:
        """Plan the next start of a child that ended, or give up."""
        service = self._service_of(child)
        if service is None:
            if self._job is not None and self._job.child is child:
                self._job.status = status
            return
        service.child = None
        if status == 0:
            service.why = "left"
        self._usable.discard(child.spec.name)
        delay_s = service.policy.died(time.monotonic())
        how = f"{child.spec.name} {describe_status(status)}"
        if delay_s is None:
            raise ChildFailed(f"{how} before it was ready", child.tail, status)
        log.warning("%s; starting it again %s", how, f"in {delay_s:g} s" if delay_s else "now")

    def _service_of(self, child: Child) -> _Service | None:
        return next((service for service in self._services if service.child is child), None)

    def _step(self) -> None:
        """Wait for the next event or deadline and act on it."""
        deadlines = [service.policy.deadline() for service in self._services]
        self._children.wait(min((d for d in deadlines if d is not None), default=None))
        # Deadlines come after what has come in: when this process itself was stopped for a while (Ctrl-Z),
        # the signs of life are in the sockets, and nobody has stalled.
        now = time.monotonic()
        for service in self._services:
            self._act(service, service.policy.due(now))

    def _act(self, service: _Service, due: Due | None) -> None:
        name = service.spec.name
        match due:
            case None:
                pass
            case Due.START:
                self._restart(service)
            case Due.KILL_STALLED:
                log.error("%s gave no sign of life for %g s: killing it", name, self._stall_timeout_s)
                self._kill(service, due)
            case Due.KILL_SLOW:
                log.error("%s took too long to get ready: killing it", name)
                self._kill(service, due)

    def _kill(self, service: _Service, due: Due) -> None:
        service.why = due.value
        if service.child is not None:
            service.child.kill()

    def _start(self, service: _Service) -> None:
        service.policy.started(time.monotonic())
        service.child = self._children.spawn(service.spec, service.more_argv)

    def _restart(self, service: _Service) -> None:
        try:
            self._start(service)
        except OSError as error:
            delay_s = service.policy.died(time.monotonic())
            log.error("%s cannot be started: %s; trying again in %g s", service.spec.name, error, delay_s)
            return
        self._restarts[service.spec.role][service.why] += 1
        service.why = "died"
        self._tell_restarts()

    def _take(self, service: _Service, notice: dict[str, Any]) -> None:
        now = time.monotonic()
        is_gateway = service.spec.role == GATEWAY
        if notice["event"] == "ready" and service.policy.phase is Phase.STARTING:
            log.info("%s is ready", service.spec.name)
            service.policy.ready(now)
            if is_gateway:
                self._port = int(notice["port"])
                service.more_argv = ("--port", str(self._port))  # a port that the system picked is kept
                self._tell_restarts()
        service.policy.alive(now)
        if is_gateway and (usable := notice.get("usable")) is not None:
            (self._usable.add if usable else self._usable.discard)(service.spec.name)

    def _tell_restarts(self) -> None:
        for service in self._services:
            if service.spec.role == GATEWAY and service.child is not None:
                service.child.send({"restarts": dict(self._restarts)})
