"""What happens to the server during the soak: one accident after the other, never two at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx

from benchmarks.soak_requests import Crowd
from conformance.process import START_S
from conformance.server import Server

NODES = ("prefill-0", "decode-0", "prefill-1", "decode-1")
STALL_TIMEOUT_S = 4
BURST = 200
_LAST_SHARE = 0.1  # of the kills and the like may hit the last node of a kind that works
_FAULTS_S = (3.0, 10.0)  # for how long fault points are on
_KINDS = ("any", "Abort", "Chunk", "Commit", "Credit", "Prefill", "Quiesced", "Status", "Submit", "Tokens")


@dataclass
class Accidents:
    """Who lets them happen.

    Args:
        faults: fault points are set now and then, beside what is done from outside.
    """

    server: Server
    crowd: Crowd
    draw: random.Random
    faults: bool
    happened: list[tuple[float, str]] = field(default_factory=list)  # second, what
    counts: Counter[str] = field(default_factory=Counter)

    async def go_on(self, http: httpx.AsyncClient, until_s: float) -> None:
        """Let them happen until the time is over, then heal everything."""
        kinds: list[Callable[[httpx.AsyncClient], Awaitable[str]]] = [
            self.kill, self.kill, self.stop, self.stop, self.stall, self.restart, self.overload,
        ]  # fmt: skip
        if self.faults:
            kinds += [self.fault_points] * 4
        while time.monotonic() < until_s:
            await asyncio.sleep(self.draw.uniform(0.5, 3.0))
            at_s = time.monotonic() - self.crowd.tally.start_s
            what = await self.draw.choice(kinds)(http)
            self.counts[what] += 1
            self.happened.append((at_s, what))
        self.server.set_faults("")

    async def kill(self, http: httpx.AsyncClient) -> str:
        """SIGKILL."""
        self._signal(await self._victim(http), signal.SIGKILL)
        return "kill"

    async def restart(self, http: httpx.AsyncClient) -> str:
        """SIGTERM: it drains, and is started again."""
        self._signal(await self._victim(http), signal.SIGTERM)
        return "restart"

    async def stop(self, http: httpx.AsyncClient) -> str:
        """SIGSTOP for less than is noticed."""
        await self._stop_for(await self._victim(http), self.draw.uniform(0.05, STALL_TIMEOUT_S / 2))
        return "stop"

    async def stall(self, http: httpx.AsyncClient) -> str:
        """SIGSTOP for so long that the supervisor kills it."""
        await self._stop_for(await self._victim(http), STALL_TIMEOUT_S + 3.0)
        return "stall"

    async def overload(self, http: httpx.AsyncClient) -> str:
        """More requests at once than are taken."""
        await self.crowd.burst(http, BURST)
        return "overload"

    async def fault_points(self, http: httpx.AsyncClient) -> str:
        """Messages are lost, late, doubled; planes stall; pages change; allocations are refused."""
        self.server.set_faults("; ".join(self._rule() for _ in range(self.draw.randint(1, 4))))
        await asyncio.sleep(self.draw.uniform(*_FAULTS_S))
        self.server.set_faults("")
        return "fault points"

    # ------------------------------------------------------------------------------------------------------

    def _rule(self) -> str:
        draw = self.draw
        nth, kind, ms = draw.randint(1, 30), draw.choice(_KINDS), draw.randint(50, 1500)
        return draw.choice(
            (
                f"drop:{kind}@{nth}*{draw.randint(1, 3)}",
                f"double:{kind}@{nth}*{draw.randint(1, 9)}",
                f"reorder:{kind}@{nth}*{draw.randint(1, 3)}",
                f"delay:{kind}@{nth}*{draw.randint(1, 3)}:{ms}ms",
                f"stall:plane@{nth}:{ms}ms",
                f"fail:plane@{nth}",
                f"cut:plane@{nth}",
                f"corrupt:page@{nth}",
                f"swap:pages@{nth}",
                f"refuse:allocation@{nth}*{draw.randint(1, 20)}",
                f"refuse:growth@{nth}*{draw.randint(1, 20)}",
                f"barrier:{draw.choice(('after-prefill', 'before-commit', 'arrived', 'merge'))}@{nth}:{ms}ms",
            )
        )

    async def _victim(self, http: httpx.AsyncClient) -> str:
        """Wait until one of them works, and mostly another of its kind as well."""
        victim = self.draw.choice(NODES)
        kind = victim.partition("-")[0]
        twins = {node for node in NODES if node.startswith(kind)}
        needed = {victim} if self.draw.random() < _LAST_SHARE else twins
        end_s = time.monotonic() + START_S
        while not needed <= await self.working(http):
            if time.monotonic() > end_s:
                raise AssertionError(f"{needed} do not come back:\n{self.server.tail()}")
            await asyncio.sleep(0.1)
        return victim

    async def working(self, http: httpx.AsyncClient) -> set[str]:
        """Nodes that answer the gateway."""
        with contextlib.suppress(httpx.TransportError):
            there = {node["id"] for node in (await http.get("/debug/kv")).json()["nodes"]}
            return there & self.server.nodes().keys()
        return set()

    async def _stop_for(self, victim: str, seconds: float) -> None:
        self._signal(victim, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self._signal(victim, signal.SIGCONT)

    def _signal(self, victim: str, signum: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, KeyError):
            os.kill(self.server.nodes()[victim], signum)
