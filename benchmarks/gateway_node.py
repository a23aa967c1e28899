"""A decode node for measuring a gateway: it speaks the real protocol, and answers at once.

Its tokens come from a list, over and over; nothing is computed. It must not know HTTP or who reads.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from common.connector import Connector
from common.host import this_process
from common.kv.layout import KVLayout
from common.messages import (
    Abort,
    Begun,
    Finish,
    Granted,
    Hello,
    PageLedger,
    Role,
    Stats,
    StatsRequest,
    Status,
    Submit,
    Tokens,
    int32s,
)
from common.peer import Peer, PeerMessage, new_epoch
from common.request import FinishReason, PrefillStamps
from common.sockets import Pollable

_CAPACITY_TOKENS = 1 << 20
_LAYOUT = KVLayout(layers=1, page_size=16, kv_heads=1, head_dim=8, dtype="float32")


@dataclass(slots=True)
class _Open:
    """A request that was submitted and has not ended."""

    max_tokens: int
    granted: Granted
    sent: int = 0


class StandInNode:
    """Owns the link to one gateway; used by one thread, and closed.

    Args:
        model: fingerprint of the gateway's model.
        token_ids: what requests are answered with.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, model: str, token_ids: Sequence[int]
    ) -> None:
        hello = Hello(
            "decode-0", Role.DECODE, this_process(), model, _LAYOUT, capacity_tokens=_CAPACITY_TOKENS
        )
        self._open: dict[int, _Open] = {}
        self._token_ids = itertools.cycle(token_ids)
        self._steps = 0
        self.submitted = 0
        self.aborted = 0
        self._link = Connector(context, address, hello, new_epoch(), self._status, now=time.monotonic())

    @property
    def num_open(self) -> int:
        """Requests that wait for tokens."""
        return len(self._open)

    def pollables(self) -> list[Pollable]:
        """What to wait for."""
        return self._link.pollables()

    def poll(self) -> None:
        """Read what the gateway says; to be called ten times a second at least."""
        for event in self._link.poll(time.monotonic()):
            match event:
                case PeerMessage(peer, Submit(request_id, sampling)):
                    self.submitted += 1
                    now = time.monotonic()
                    granted = Granted((request_id,), "prefill-0", now, now)
                    self._open[request_id] = _Open(sampling.max_tokens, granted)
                    peer.send(granted)
                case PeerMessage(_, Abort(request_id)):
                    self.aborted += self._open.pop(request_id, None) is not None
                case PeerMessage(peer, StatsRequest(query_id)):
                    peer.send(Stats(query_id, PageLedger(total=1, free=1), {}))

    def step(self) -> int:
        """Give every request its next token, in one message; returns how many got one."""
        peer = self._link.peer
        if peer is None or not self._open:
            return 0
        ids = tuple(self._open)
        first = int32s(request.sent for request in self._open.values())
        now, begun, finished = time.monotonic(), [], []
        for request_id, request in list(self._open.items()):
            request.sent += 1
            if request.sent == 1:
                begun.append(Begun(request.granted, PrefillStamps(now, (now,), now), now))
            if request.sent == request.max_tokens:
                finished.append(Finish(request_id, FinishReason.LENGTH, now, now))
                del self._open[request_id]
        tokens = int32s(itertools.islice(self._token_ids, len(ids)))
        ones = int32s([1] * len(ids))
        peer.send(Tokens(ids, tuple(finished), first, ones, tokens, begun=tuple(begun)))
        self._steps += 1
        return len(ids)

    def close(self) -> None:
        """Leave."""
        self._link.close()

    def _status(self, _: Peer) -> Status:
        return Status(
            last_seq_seen=0,
            open_ids=tuple(self._open),
            running=len(self._open),
            steps=self._steps,
            usable=True,
        )
