"""The two endpoints of a hand-over over a real socket, each with a real pool, in one process and no hurry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import zmq

from common.config import TransferConfig
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.messages import Choice, Hello, PeerInfo, Role, Status, int32s
from common.peering import Acceptor, Connector, Peer, PeerMessage, PeerUp
from common.request import SamplingParams
from tests.wire.hellos import LAYOUT, hello
from tests.wire.loop import until
from transfer.receiver_endpoint import ReceiverEndpoint, TransferDone, TransferGaveOut
from transfer.sender_endpoint import (
    SenderEndpoint,
    TransferArrived,
    TransferEnded,
    TransferKey,
    TransferStopped,
)

Context = zmq.Context[zmq.Socket[bytes]]
D_EPOCH, P_EPOCH = 101, 202
P_NAME = "prefill-0"
SAMPLING = SamplingParams(max_tokens=1)
VERIFY = TransferConfig(verify_pages=True)


def filled_pool(layout: KVLayout, num_pages: int, seed: int) -> KVPool:
    """A pool with other values in every page."""
    pool = KVPool(layout, num_pages, torch.device("cpu"))
    pool.data[:, 1:].normal_(generator=torch.Generator().manual_seed(seed))
    return pool


def greeting_of(role: Role, pool: KVPool, config: TransferConfig) -> Hello:
    """A node's greeting, true to its pool and settings."""
    return replace(hello(role, layout=pool.layout), verify_pages=config.verify_pages)


def prefill_endpoint(
    context: Context, address: str, pool: KVPool, config: TransferConfig = VERIFY, local: Hello | None = None
) -> SenderEndpoint:
    """P's end."""
    greeting = local or greeting_of(Role.PREFILL, pool, config)
    return SenderEndpoint(context, address, pool, config, greeting, P_EPOCH)


def decode_endpoint(
    context: Context, address: str, pool: KVPool, config: TransferConfig = VERIFY
) -> ReceiverEndpoint:
    """D's end, told of one P."""
    d = ReceiverEndpoint(context, pool, config, greeting_of(Role.DECODE, pool, config), D_EPOCH)
    d.set_prefill_nodes([PeerInfo(P_NAME, address, P_EPOCH)], now=0.0)
    return d


class World:
    """D and P. The test is both owners: it grants at D and computes at P."""

    def __init__(
        self,
        context: Context,
        address: str,
        *,
        layout: KVLayout = LAYOUT,
        num_pages: int = 32,
        config: TransferConfig = VERIFY,
    ) -> None:
        self.now = 0.0
        self.p_pool = filled_pool(layout, num_pages, seed=1)
        self.d_pool = filled_pool(layout, num_pages, seed=2)
        self.p = prefill_endpoint(context, address, self.p_pool, config)
        self.d = decode_endpoint(context, self.p.address, self.d_pool, config)
        self.at_p: list[TransferArrived | TransferStopped | TransferEnded] = []
        self.at_d: list[TransferDone | TransferGaveOut] = []
        self.until(lambda: self.d.ready_nodes() == [P_NAME])

    def close(self) -> None:
        """Close both."""
        self.d.close()
        self.p.close()

    def poll_p(self) -> None:
        """P reads and sends."""
        self.at_p += self.p.poll(self.now)

    def poll_d(self) -> list[TransferDone | TransferGaveOut]:
        """D reads and sends; returns all that it ever reported."""
        self.at_d += self.d.poll(self.now)
        return self.at_d

    def until(self, condition: Callable[[], bool], *, step_s: float = 0.0) -> None:
        """Let both work until it is so; their clock goes on by `step_s` a turn."""

        def turn() -> bool:
            self.now += step_s
            self.poll_p()
            self.poll_d()
            return condition()

        until(turn, lambda: [*self.p.pollables(), *self.d.pollables()])

    # What the owners do -----------------------------------------------------------------------------------

    def grant(self, page_ids: Sequence[int], num_tokens: int | None = None) -> int:
        """D gives pages to a transfer; their own values must not be taken for the prompt's."""
        tokens = len(page_ids) * self.d_pool.layout.page_size if num_tokens is None else num_tokens
        return self.d.grant(P_NAME, int32s(range(tokens)), SAMPLING, page_ids)

    def arrived(self, transfer_id: int) -> TransferKey:
        """Wait for a transfer to arrive at P."""
        key = TransferKey(D_EPOCH, transfer_id)
        self.until(lambda: any(isinstance(o, TransferArrived) and o.key == key for o in self.at_p))
        return key

    def sample(self, key: TransferKey, token: int = 42) -> None:
        """P has the first token."""
        self.p.first_token(key, Choice(token, None), queue_ms=1.5, prefill_ms=2.5)

    def hand_over(self, p_pages: Sequence[int], d_pages: Sequence[int]) -> int:
        """A whole transfer in one chunk, until D has it."""
        transfer_id = self.grant(d_pages)
        key = self.arrived(transfer_id)
        self.p.start(key)
        self.p.chunk(key, 0, p_pages, is_last=True)
        self.sample(key)
        self.until(lambda: self.is_done(transfer_id) and self.is_over(key))
        return transfer_id

    # What became of it ------------------------------------------------------------------------------------

    def is_done(self, transfer_id: int) -> bool:
        """D reported it as done."""
        return any(isinstance(o, TransferDone) and o.transfer_id == transfer_id for o in self.at_d)

    def is_over(self, key: TransferKey) -> bool:
        """P reported it as ended, once."""
        ends = [o for o in self.at_p if isinstance(o, TransferEnded) and o.key == key]
        assert len(ends) <= 1
        return bool(ends)

    def same_pages(self, p_pages: Sequence[int], d_pages: Sequence[int]) -> bool:
        """The pages of D hold what those of P hold."""
        return torch.equal(self.p_pool.gather(p_pages), self.d_pool.gather(d_pages))


class RawPrefill:
    """A P that says whatever the test tells it to, against a real D."""

    def __init__(self, context: Context, address: str, pool: KVPool, config: TransferConfig = VERIFY) -> None:
        self.now = 0.0
        self.open_ids: tuple[int, ...] = ()
        self.total_bytes = 0
        local = greeting_of(Role.PREFILL, pool, config)
        self.acceptor = Acceptor(context, address, local, P_EPOCH, self._status)
        self.d = decode_endpoint(context, address, pool, config)
        self.at_d: list[TransferDone | TransferGaveOut] = []
        self.received: list[Any] = []
        self._peers: list[Peer] = []
        self.until(lambda: bool(self._peers) and self.d.ready_nodes() == [P_NAME])

    def close(self) -> None:
        """Close both."""
        self.d.close()
        self.acceptor.close()

    def send_raw(self, frames: list[bytes]) -> None:
        """Send D bytes that need not be a message."""
        assert self.acceptor.socket.send(frames, self._peers[-1].session.identity)

    def send(self, *messages: Any) -> None:
        """Say something to D."""
        for message in messages:
            assert self._peers[-1].send(message) > 0

    def until(self, condition: Callable[[], bool], *, step_s: float = 0.0) -> None:
        """Let both work until it is so."""

        def turn() -> bool:
            self.now += step_s
            for event in self.acceptor.poll(self.now):
                if isinstance(event, PeerUp):
                    self._peers.append(event.peer)
                elif isinstance(event, PeerMessage):
                    self.received.append(event.message)
            self.at_d += self.d.poll(self.now)
            return condition()

        until(turn, lambda: [*self.acceptor.pollables(), *self.d.pollables()])

    def _status(self, _: Peer) -> Status:
        return Status(last_seq_seen=0, open_ids=self.open_ids, total_bytes=self.total_bytes)


class RawDecode:
    """A D that says whatever the test tells it to, against a real P."""

    def __init__(self, context: Context, p: SenderEndpoint) -> None:
        self.now = 0.0
        self.open_ids: tuple[int, ...] = ()
        self.credit_bytes = 0
        self.p = p
        self.at_p: list[TransferArrived | TransferStopped | TransferEnded] = []
        self.received: list[Any] = []
        self._peers: list[Peer] = []
        local = replace(hello(Role.DECODE), verify_pages=True)
        self.connector = Connector(context, p.address, local, D_EPOCH, self._status, now=self.now)
        self.until(lambda: bool(self._peers))

    def close(self) -> None:
        """Close both."""
        self.connector.close()
        self.p.close()

    def send(self, *messages: Any) -> None:
        """Say something to P."""
        for message in messages:
            assert self._peers[-1].send(message) > 0

    def until(self, condition: Callable[[], bool], *, step_s: float = 0.0) -> None:
        """Let both work until it is so."""

        def turn() -> bool:
            self.now += step_s
            for event in self.connector.poll(self.now):
                if isinstance(event, PeerUp):
                    self._peers.append(event.peer)
                elif isinstance(event, PeerMessage):
                    self.received.append(event.message)
            self.at_p += self.p.poll(self.now)
            return condition()

        until(turn, lambda: [*self.connector.pollables(), *self.p.pollables()])

    def _status(self, _: Peer) -> Status:
        return Status(last_seq_seen=0, open_ids=self.open_ids, total_bytes=self.credit_bytes)
