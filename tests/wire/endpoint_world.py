"""The two endpoints of a hand-over over a real socket, each with a real pool, in one process and no hurry."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import zmq

from common.acceptor import Acceptor
from common.config import TransferConfig
from common.connector import Connector
from common.device.streams import Streams
from common.kv.layout import KVLayout
from common.kv.pages import Pages
from common.kv.pool import KVPool
from common.messages import Choice, Hello, PeerInfo, Role, SharedPool, Status, int32s
from common.peer import Peer, PeerMessage, PeerUp
from common.request import PrefillStamps, SamplingParams
from common.sockets import Pollable
from tests.wire.hellos import LAYOUT, hello, here
from tests.wire.loop import until
from tests.wire.tap import Tap
from transfer.planes.cuda_ipc import CUDA_IPC, cuda_pool
from transfer.planes.frames import FRAMES
from transfer.planes.shm import SHM
from transfer.receiver_endpoint import (
    ReceiverEndpoint,
    ReceiverOutput,
    TransferDone,
    TransferReleased,
)
from transfer.sender import FirstToken
from transfer.sender_endpoint import (
    SenderEndpoint,
    SenderOutput,
    TransferArrived,
    TransferEnded,
    TransferKey,
)
from transfer.sender_planes import OpenPages, SenderPlanes
from transfer.transfer_stream import TransferStream

CPU = torch.device("cpu")
Context = zmq.Context[zmq.Socket[bytes]]
D_EPOCH, P_EPOCH = 101, 202
P_NAME = "prefill-0"
SAMPLING = SamplingParams(max_tokens=1)
STAMPS = PrefillStamps(1.5, (2.5, 4.0))
VERIFY = TransferConfig(verify_pages=True)


def filled_pool(
    layout: KVLayout, num_pages: int, seed: int, *, shared: bool = False, device: torch.device = CPU
) -> KVPool:
    """A pool with other values in every page, the same for a seed on every device."""
    pool = KVPool(layout, num_pages, device, shared=shared)
    values = torch.empty(pool.data[:, 1:].shape)
    pool.data[:, 1:] = values.normal_(generator=torch.Generator().manual_seed(seed))
    finish_copies(device)
    return pool


def finish_copies(device: torch.device) -> None:
    """Wait for all that a device was given: planes copy on streams of their own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def greeting_of(role: Role, pool: KVPool, config: TransferConfig) -> Hello:
    """A node's greeting, true to its pool and settings; on a plane of one host it says where it really is."""
    greeting = replace(hello(role, layout=pool.layout), verify_pages=config.verify_pages)
    if config.transfer not in (SHM, CUDA_IPC):
        return greeting
    shm = None if pool.fd is None else SharedPool(pool.fd, pool.num_pages)
    return replace(here(greeting), planes=(config.transfer,), shm=shm, cuda=cuda_pool(pool))


def prefill_endpoint(
    context: Context,
    address: str,
    pool: KVPool,
    config: TransferConfig = VERIFY,
    local: Hello | None = None,
    stream: TransferStream | None = None,
    openers: Mapping[str, OpenPages] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SenderEndpoint:
    """P's end."""
    greeting = local or greeting_of(Role.PREFILL, pool, config)
    stream = stream or TransferStream(Streams(pool.device))
    planes = None if openers is None else SenderPlanes(pool, config, stream, openers)
    return SenderEndpoint(
        context, address, pool, config, greeting, P_EPOCH, stream=stream, planes=planes, clock=clock
    )


def decode_endpoint(
    context: Context,
    address: str,
    pool: KVPool,
    config: TransferConfig = VERIFY,
    local: Hello | None = None,
    streams: Streams | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ReceiverEndpoint:
    """D's end, told of one P."""
    greeting = local or greeting_of(Role.DECODE, pool, config)
    d = ReceiverEndpoint(context, pool, config, greeting, D_EPOCH, streams=streams, clock=clock)
    d.set_prefill_nodes([PeerInfo(P_NAME, address, P_EPOCH)], now=0.0)
    return d


class World:
    """D and P, and a tap between them if wanted. The test is both owners: it grants at D, computes at P."""

    def __init__(
        self,
        context: Context,
        address: str,
        *,
        layout: KVLayout = LAYOUT,
        num_pages: int = 32,
        config: TransferConfig = VERIFY,
        plane: str = FRAMES,
        tapped: bool = False,
        greet: Callable[[Hello], Hello] = lambda greeting: greeting,
        stream: TransferStream | None = None,
        p_device: torch.device = CPU,
        d_device: torch.device = CPU,
        p_ahead_s: float = 0.0,
    ) -> None:
        self.now = 0.0
        self.p_clock = lambda: self.now + p_ahead_s
        self.plane = plane
        self.config = replace(config, transfer=plane)
        self.p_pool = filled_pool(layout, num_pages, seed=1, device=p_device)
        self.d_pool = filled_pool(layout, num_pages, seed=2, shared=plane == SHM, device=d_device)
        p_hello, d_hello = (
            greet(greeting_of(role, pool, self.config))
            for role, pool in ((Role.PREFILL, self.p_pool), (Role.DECODE, self.d_pool))
        )
        # A process cannot map its own GPU memory, and need not.
        here_already = {CUDA_IPC: lambda ours, theirs: self.d_pages()} if d_device.type == "cuda" else None
        self.p = prefill_endpoint(
            context, address, self.p_pool, self.config, p_hello, stream, here_already, self.p_clock
        )
        self.taps = [Tap(context, address + "-tap", self.p.address)] if tapped else []
        self.front = address + "-tap" if tapped else self.p.address
        self.d_streams = Streams(d_device)
        self.d = decode_endpoint(
            context, self.front, self.d_pool, self.config, d_hello, self.d_streams, lambda: self.now
        )
        self.at_p: list[SenderOutput] = []
        self.at_d: list[ReceiverOutput] = []
        self.until(lambda: self.d.ready_nodes() == [P_NAME])

    def close(self) -> None:
        """Close all."""
        self.d.close()
        self.p.close()
        for tap in self.taps:
            tap.close()
        if self.d_pool.fd is not None:
            os.close(self.d_pool.fd)

    def d_pages(self) -> Pages:
        """D's pages, as kernels of P's GPU see them."""
        from common.kv.device_pages import DevicePages

        memory, pool = self.d_pool.device_memory, self.d_pool
        assert memory is not None
        return DevicePages(pool.layout, pool.num_pages, self.p_pool.device, memory.address, memory)

    def finish_copies(self) -> None:
        """Wait for what both devices were given."""
        finish_copies(self.p_pool.device)
        finish_copies(self.d_pool.device)

    @property
    def tap(self) -> Tap:
        """What is between them."""
        return self.taps[0]

    def list_p(self, epoch: int = P_EPOCH) -> None:
        """The gateway tells D of P."""
        self.d.set_prefill_nodes([PeerInfo(P_NAME, self.front, epoch)], self.now)
        self.until(lambda: self.d.ready_nodes() == [P_NAME], step_s=0.1)

    def poll_p(self) -> bool:
        """P reads and sends; False, for one expression with what follows."""
        self.at_p += self.p.poll(self.now)
        return False

    def poll_d(self) -> list[ReceiverOutput]:
        """D reads and sends; returns all that it ever reported."""
        self.at_d += self.d.poll(self.now)
        return self.at_d

    def until(self, condition: Callable[[], bool], *, step_s: float = 0.0) -> None:
        """Let both work until it is so; their clock goes on by `step_s` a turn."""

        def turn() -> bool:
            self.now += step_s
            self.poll_p()
            for tap in self.taps:
                tap.poll()
            self.poll_d()
            return condition()

        def pollables() -> list[Pollable]:
            of_taps = [item for tap in self.taps for item in tap.pollables()]
            return [*self.p.pollables(), *self.d.pollables(), *of_taps]

        until(turn, pollables)

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
        self.p.first_token(key, FirstToken((Choice(token, None),), STAMPS))

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

    def is_released(self, transfer_id: int) -> bool:
        """D reported that the pages of a transfer that did not end well are its own again, once."""
        count = self.at_d.count(TransferReleased(transfer_id))
        assert count <= 1
        return count == 1

    def is_over(self, key: TransferKey) -> bool:
        """P reported it as ended, once."""
        ends = [o for o in self.at_p if isinstance(o, TransferEnded) and o.key == key]
        assert len(ends) <= 1
        return bool(ends)

    def same_pages(self, p_pages: Sequence[int], d_pages: Sequence[int]) -> bool:
        """The pages of D hold what those of P hold."""
        self.finish_copies()
        return torch.equal(self.p_pool.gather(p_pages).cpu(), self.d_pool.gather(d_pages).cpu())


class RawPrefill:
    """A P that says whatever the test tells it to, against a real D."""

    def __init__(self, context: Context, address: str, pool: KVPool, config: TransferConfig = VERIFY) -> None:
        self.now = 0.0
        self.open_ids: tuple[int, ...] = ()
        self.total_bytes = 0
        local = greeting_of(Role.PREFILL, pool, config)
        self.acceptor = Acceptor(context, address, local, P_EPOCH, self._status)
        self.d = decode_endpoint(context, address, pool, config)
        self.at_d: list[ReceiverOutput] = []
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

    def __init__(self, context: Context, p: SenderEndpoint, local: Hello | None = None) -> None:
        self.now = 0.0
        self._context = context
        self._local = local or replace(hello(Role.DECODE), verify_pages=True)
        self.open_ids: tuple[int, ...] = ()
        self.credit_bytes = 0
        self.p = p
        self.at_p: list[SenderOutput] = []
        self.received: list[Any] = []
        self._peers: list[Peer] = []
        self.connect()

    def connect(self) -> None:
        """Greet P over a new connection."""
        self.connector = Connector(
            self._context, self.p.address, self._local, D_EPOCH, self._status, now=self.now
        )
        links = len(self._peers)
        self.until(lambda: len(self._peers) > links)

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
