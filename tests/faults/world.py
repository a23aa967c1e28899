"""A gateway, a decode node and a prefill node in one thread: real objects and sockets, a clock of the test's.

    client ── gateway ──line── decode node ──line── prefill node ──line── gateway

Each turn of the world lets all work once and takes a millisecond; when nobody has anything to do, it goes on
at the next deadline. So ten seconds of Statuses cost a moment, and nothing depends on how fast this machine
is. A process can be held: it is not given its turn, as if it were stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, TypeVar

import zmq

import common.acceptor
import common.connector
from common.config import DecodeConfig, NodeConfig, TransferConfig
from common.host import this_process
from common.messages import Hello, HelloAck, PageLedger, Role, int32s
from common.request import SamplingParams
from common.sockets import FrameSocket
from decode_node.entry import Entry, Phase, RequestKey
from decode_node.node import DecodeNode
from gateway.client import NodeClient
from prefill_node.node import PrefillNode
from tests.faults.world_asked import Asked
from tests.faults.world_engines import SIZES, Sizes, engine_of
from tests.faults.world_line import CountedSocket, Line, Route, Rule, Way, await_arrival, is_readable
from tests.faults.world_time import VirtualLoop

T = TypeVar("T")

TURN_S = 0.001
PATIENCE_S = 60.0  # of real time: a broken test ends; a busy machine does not break one
DEADLINE_S = 10.0  # within which every request ends
GATEWAY_EPOCH = 77
G, D, P = "gateway", "decode", "prefill"
ROUTES: tuple[Route, ...] = ((D, G), (G, D), (P, G), (G, P), (D, P), (P, D))


class World:
    """See above.

    Args:
        rules: faults that are there before anybody says anything.
        edit: what becomes of messages between D and P.
        ahead_s: by how much clocks of nodes are ahead of the gateway's; then each is on a host of its own.
    """

    def __init__(
        self,
        folder: Path,
        sockets: Path,
        *,
        plane: str = "frames",
        overlap: bool = False,
        sizes: Sizes = SIZES,
        rules: Sequence[Rule] = (),
        edit: Callable[[Any], Any] = lambda message: message,
        ahead_s: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.now = 1000.0
        self.ahead_s = {D: 0.0, P: 0.0, **ahead_s}
        self.waited_s = 0.0  # of it, for deadlines
        self.held: set[str] = set()  # who is not given its turn
        self._has_more = {D: True, P: True}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._loop = VirtualLoop(lambda: self.now)
        addresses = {name: f"ipc://{sockets}/{name}.sock" for name in (G, P, "d-g", "p-g", "d-p")}
        d_engine, p_engine = (
            replace(engine_of(folder, role, sizes), overlap=overlap) for role in (Role.DECODE, Role.PREFILL)
        )
        hello = Hello("gateway-0", Role.GATEWAY, this_process(), d_engine.spec.fingerprint)
        self.client = self._loop.run_until_complete(self._make_client(addresses[G], hello))
        self.lines = [
            Line(self._context, D, G, addresses["d-g"], addresses[G]),
            Line(self._context, P, G, addresses["p-g"], addresses[G]),
            Line(self._context, D, P, addresses["d-p"], addresses[P]),
        ]
        self.lines[0].edit = self._edit_host
        self.lines[1].edit = self._edit_hello
        self.lines[2].edit = lambda message: edit(self._edit_host(message))
        for line in self.lines:
            line.rules.extend(rule for rule in rules if rule.route in line.routes)
        transfer = TransferConfig(transfer=plane, verify_pages=True)
        self.p = PrefillNode(
            p_engine,
            transfer,
            NodeConfig(join=addresses["p-g"], node_id="prefill-0"),
            addresses[P],
            debug_checks=True,
            clock=lambda: self.now + self.ahead_s[P],
        )
        self.d = DecodeNode(
            d_engine,
            transfer,
            DecodeConfig(max_queued=sizes.max_queued),
            NodeConfig(join=addresses["d-g"], node_id="decode-0"),
            max_running=sizes.max_running,
            debug_checks=True,
            clock=lambda: self.now + self.ahead_s[D],
        )

    async def _make_client(self, address: str, hello: Hello) -> NodeClient:
        return NodeClient(self._context, address, hello, GATEWAY_EPOCH)

    def _edit_hello(self, message: object) -> object:
        message = self._edit_host(message)
        if isinstance(message, Hello) and message.role is Role.PREFILL:
            return replace(message, listen=self.lines[2].front_address)
        return message

    def _edit_host(self, message: object) -> object:
        """Have each node be on a host of its own, if they have clocks of their own."""
        if isinstance(message, HelloAck):
            return replace(message, hello=self._edit_host(message.hello))
        if isinstance(message, Hello) and any(self.ahead_s.values()):
            return replace(message, host=replace(message.host, boot_id=f"the host of {message.role.value}"))
        return message

    def close(self) -> None:
        """Close all."""
        self.d.close()
        self.p.close()
        self.client.close()
        for line in self.lines:
            line.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.round()
        self._loop.close()
        self._context.destroy(linger=0)

    # Time -------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Let all work once; when nobody had anything to do, go on at the next deadline."""
        if self._work():
            self.now += TURN_S
            return
        deadlines = [line.deadline() for line in self.lines]
        deadlines += [self._loop.deadline()] if G not in self.held else []
        deadlines += [self._deadline(name, node) for name, node, _ in self._nodes() if name not in self.held]
        next_s = min((d for d in deadlines if d is not None), default=self.now)
        later_s = max(self.now + TURN_S, next_s)
        self.waited_s += later_s - self.now
        self.now = later_s

    def until(self, condition: Callable[[], bool], within_s: float = DEADLINE_S) -> None:
        """Go on until it is so; fails after so many seconds of the world's clock."""
        limit_s, patience_s = self.now + within_s, time.monotonic() + PATIENCE_S
        while not condition():
            assert self.now <= limit_s, f"not within {within_s} s: {self.describe()}"
            assert time.monotonic() < patience_s, f"the world stands still: {self.describe()}"
            self.turn()

    def run(self, seconds: float) -> None:
        """Go on for so long."""
        end_s = self.now + seconds
        self.until(lambda: self.now >= end_s, seconds + 1.0)

    def two_statuses(self) -> None:
        """Go on until two more Statuses have come on every route, and what they caused has happened."""
        before = {route: self.passed(route, "Status") for route in ROUTES}
        self.until(lambda: all(self.passed(route, "Status") >= count + 2 for route, count in before.items()))
        self.run(20 * TURN_S)

    def _work(self) -> bool:
        """Let all work, each when what is on its way to it is there; False when nobody had anything to do."""
        to_gateway = [(line.back_address, "up") for line in self.lines[:2]]
        moved = self._pump()
        if G not in self.held:
            await_arrival(to_gateway, [self._loop.fileno()])
            moved |= self._loop.round()
        moved |= self._pump()
        for name, node, ways in self._nodes():
            if name not in self.held:
                await_arrival(ways, node.pollables())
                moved |= self._turn_if_awake(name, node)
        return moved

    def _pump(self) -> bool:
        """Have the lines pass on all that is on its way to them."""
        moved = sum(line.pump(self.now) for line in self.lines)
        ways = [way for line in self.lines for way in line.ways_in]
        while await_arrival(ways, [item for line in self.lines for item in line.pollables()]):
            moved += sum(line.pump(self.now) for line in self.lines)
        return moved > 0

    def _nodes(self) -> list[tuple[str, DecodeNode | PrefillNode, list[Way]]]:
        """Nodes, and the ways to them."""
        d_g, p_g, d_p = self.lines
        return [
            (D, self.d, [(d_g.front_address, "down"), (d_p.front_address, "down")]),
            (P, self.p, [(p_g.front_address, "down"), (d_p.back_address, "up")]),
        ]

    def _turn_if_awake(self, name: str, node: DecodeNode | PrefillNode) -> bool:
        """Give it a turn if its own loop would: one turn too many could hide a hang."""
        deadline_s = self._deadline(name, node)
        is_due = deadline_s is not None and deadline_s <= self.now
        if not (self._has_more[name] or is_due or is_readable(node.pollables())):
            return False
        self._has_more[name] = node.turn(self.now + self.ahead_s[name])
        return True

    def _deadline(self, name: str, node: DecodeNode | PrefillNode) -> float | None:
        """When a node has something to do, on the world's clock."""
        deadline_s = node.deadline()
        return None if deadline_s is None else deadline_s - self.ahead_s[name]

    # Requests ---------------------------------------------------------------------------------------------

    def until_usable(self) -> None:
        """Go on until requests are taken."""
        self.until(self.client.usable)

    def ask(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Asked:
        """Submit a request, greedy, whose tokens are read as they come; `fields`: more of its sampling."""
        sampling = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True, **fields)
        (asked,) = self.ask_for(prompt, sampling)
        return asked

    def ask_for(self, prompt: Sequence[int], sampling: SamplingParams) -> list[Asked]:
        """Submit a prompt; returns its choices, whose tokens are read as they come."""
        streams = self.client.submit(int32s(prompt), sampling)
        choices = [Asked(stream, prompt, self.now) for stream in streams]
        for asked in choices:
            self._loop.create_task(asked.follow())
        return choices

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Have something done beside."""
        return self._loop.create_task(work)

    def abort(self, asked: Asked) -> None:
        """Its client leaves."""
        asked.is_aborted = True
        asked.stream.abort()

    def until_ended(self, *asked: Asked) -> None:
        """Go on until each has its answer or its error, within its deadline."""
        since_s = min((each.since_s for each in asked), default=self.now)
        self.until(lambda: all(each.ended for each in asked), since_s + DEADLINE_S - self.now)

    # What is inside ---------------------------------------------------------------------------------------

    def passed(self, route: Route, kind: str) -> int:
        """Messages of a kind that were passed on."""
        return sum(line.passed[route, kind] for line in self.lines)

    def release(self, rule: Rule) -> None:
        """Let what a rule held go on."""
        next(line for line in self.lines if rule.route in line.routes).release(rule)

    def add(self, rule: Rule) -> Rule:
        """Have a fault from now on."""
        next(line for line in self.lines if rule.route in line.routes).rules.append(rule)
        return rule

    def ledgers(self) -> tuple[PageLedger, PageLedger]:
        """Of D and of P."""
        return self.d._scheduler.ledger(), self.p._scheduler.ledger()

    def is_clean(self) -> bool:
        """All pages of both are free, and nobody knows of a request."""
        is_free = all(ledger.free == ledger.total for ledger in self.ledgers())
        return is_free and not self.entries() and not self.p._endpoint._transfers

    def entries(self) -> list[Entry]:
        """D's requests, the first first."""
        return list(self.d._scheduler._entries.values())

    def phase(self, asked: Asked) -> Phase | None:
        """Where a request is at D; None when D does not know it."""
        entry = self.d._scheduler._entries.get(self.key(asked))
        return None if entry is None else entry.phase

    def key(self, asked: Asked) -> RequestKey:
        """What D calls a request."""
        stream: Any = asked.stream  # the seam does not have it
        return RequestKey(GATEWAY_EPOCH, stream.request_id)

    def counter(self, name: str) -> int:
        """Of D and P together."""
        return sum(counters.get(name, 0) for _, counters in (self.d._stats(), self.p._stats()))

    def describe(self) -> str:
        """What there is, for a failure."""
        phases = [entry.phase.name for entry in self.entries()]
        passed = {f"{a}>{b} {kind}": n for line in self.lines for ((a, b), kind), n in line.passed.items()}
        return f"now {self.now:.3f}, D {phases} {self.ledgers()}, passed {passed}"


@contextmanager
def world(folder: Path, **options: Any) -> Iterator[World]:
    """Make a world of the model in a folder, wait until it takes requests, and close it; see World."""
    CountedSocket.under_way.clear()
    for module in (common.acceptor, common.connector):
        vars(module)["FrameSocket"] = CountedSocket
    try:
        with TemporaryDirectory(prefix="baton-") as sockets:
            made = World(folder, Path(sockets), **options)
            try:
                made.until_usable()
                yield made
            finally:
                made.close()
    finally:
        for module in (common.acceptor, common.connector):
            vars(module)["FrameSocket"] = FrameSocket
