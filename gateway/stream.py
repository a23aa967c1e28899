"""A request at a decode node, as the gateway holds it: what was asked, who had it, and what came so far.

It must not know links or which nodes there are; client.py moves it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from common.codec import IntArray
from common.errors import RequestRejected
from common.messages import Submit
from common.request import SamplingParams
from gateway.nodes import TokenEvent
from gateway.router import Node


class Stream:
    """See `RequestStream`; `deadline_s` is on the event loop's clock, None: there is none."""

    def __init__(
        self,
        request_id: int,
        prompt_ids: IntArray,
        sampling: SamplingParams,
        deadline_s: float | None,
        abort: Callable[[Stream], None],
    ) -> None:
        self.request_id = request_id
        self.node: Node  # who has it
        self.tried: set[int] = set()  # epochs of all who had it
        self.received = 0
        self.open = True
        self.timer: asyncio.TimerHandle | None = None
        self._prompt_ids = prompt_ids
        self._sampling = sampling
        self._deadline_s = deadline_s
        self._abort = abort
        self._events: asyncio.Queue[TokenEvent | RequestRejected] = asyncio.Queue()

    def given_to(self, node: Node, now: float) -> Submit:
        """Note who has it from now on; return what it is to be told."""
        self.node = node
        self.tried.add(node.peer.epoch)
        timeout_ms = None
        if self._deadline_s is not None:
            timeout_ms = max(1, math.ceil((self._deadline_s - now) * 1000))
        return Submit(self.request_id, self._sampling, self._prompt_ids, timeout_ms)

    async def next(self) -> TokenEvent:
        """Wait for more tokens; raises RequestRejected when the request failed."""
        event = await self._events.get()
        if isinstance(event, RequestRejected):
            raise event
        return event

    def abort(self) -> None:
        """Give the request up."""
        if self.open:
            self._abort(self)

    def stop_timer(self) -> None:
        """Watch the deadline no more."""
        if self.timer is not None:
            self.timer.cancel()

    def put(self, event: TokenEvent | RequestRejected) -> None:
        """Hand over what came."""
        self._events.put_nowait(event)
