"""D's end of all transfers: performs what the receivers' machines decide.

A Connector for each prefill node. Grants, places chunks, reports what is done. Messages of a transfer that
is over are counted and dropped. Owned by the node's loop; not thread-safe.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq

from common.codec import Header, IntArray
from common.config import TransferConfig
from common.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from common.kv.pool import KVPool
from common.link import mismatch
from common.messages import (
    Chunk,
    Commit,
    Failed,
    Hello,
    PeerInfo,
    Prefill,
    Quiesced,
    Rejected,
    Status,
    int32s,
)
from common.peering import Connector, Peer, PeerDown, PeerMessage, PeerUp
from common.reconcile import Reconciler
from common.request import SamplingParams
from common.sockets import Pollable
from transfer import receiver as rx
from transfer.planes.base import PlaneReceiver
from transfer.planes.frames import FramesReceiver

log = logging.getLogger("baton.transfer")

MEBIBYTE = 1 << 20
COUNTERS = (
    "transfers_started",
    "transfers_done",
    "transfers_failed",
    "transfers_aborted",
    "pages_received",
    "chunks_broken",
    "messages_late",
    "messages_misplaced",
    "peers_unusable",
)


@dataclass(frozen=True, slots=True)
class TransferDone:
    """Pages and first token are in."""

    transfer_id: int
    commit: Commit


@dataclass(frozen=True, slots=True)
class TransferGaveOut:
    """The transfer will not be completed. Its pages are D's again."""

    transfer_id: int
    status: int
    reason: str
    retryable: bool


ReceiverOutput = TransferDone | TransferGaveOut


@dataclass(eq=False, slots=True)
class _Incoming:
    machine: rx.Receiver
    page_ids: tuple[int, ...]
    num_tokens: int
    page_size: int

    @property
    def tokens_ahead(self) -> int:
        """Prompt tokens that P has not yet computed, as far as D knows."""
        return max(0, self.num_tokens - self.machine.pages_in * self.page_size)


@dataclass(eq=False, slots=True)
class _PrefillNode:
    """A prefill node that D knows of, up or not."""

    info: PeerInfo
    connector: Connector
    peer: Peer | None = None
    plane: PlaneReceiver | None = None
    reconciler: Reconciler = field(default_factory=Reconciler)
    transfers: dict[int, _Incoming] = field(default_factory=dict)


class ReceiverEndpoint:
    """D's end. Pages given with `grant` belong to the transfer until it is reported, or aborted."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        pool: KVPool,
        config: TransferConfig,
        local: Hello,
        epoch: int,
    ) -> None:
        self._context = context
        self._pool = pool
        self._config = config
        self._local = local
        self._epoch = epoch
        self._nodes: dict[str, _PrefillNode] = {}
        self._of_transfer: dict[int, _PrefillNode] = {}
        self._next_id = 1
        self._turn = 0
        self._outputs: list[ReceiverOutput] = []
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    # Which prefill nodes there are --------------------------------------------------------------------------

    def set_prefill_nodes(self, prefills: Sequence[PeerInfo], now: float) -> None:
        """Connect to the ones that are new, drop the ones that are gone or started again."""
        wanted = {info.node_id: info for info in prefills}
        for node_id, node in list(self._nodes.items()):
            if wanted.get(node_id) != node.info:
                self._drop(node, "the gateway no longer lists it", now)
        for node_id, info in wanted.items():
            if node_id in self._nodes:
                continue
            try:
                self._nodes[node_id] = self._connect(info, now)
            except ConfigError as error:  # an address that this process cannot use is not its end
                self._counters["peers_unusable"] += 1
                log.error("%s: prefill node %s: %s", self._local.node_id, node_id, error)

    def ready_nodes(self) -> list[str]:
        """Prefill nodes that can be given work, the next in turn first."""
        up = [node_id for node_id, node in self._nodes.items() if node.peer is not None]
        return up[self._turn % len(up) :] + up[: self._turn % len(up)] if up else []

    def tokens_ahead(self, node_id: str) -> int:
        """Prompt tokens granted to a prefill node and not yet computed there."""
        return sum(t.tokens_ahead for t in self._nodes[node_id].transfers.values())

    def hello(self, node_id: str) -> Hello:
        """What a node that is up greeted with."""
        peer = self._nodes[node_id].peer
        if peer is None:
            raise LocalProtocolError(f"{node_id} is not up")
        return peer.hello

    # Transfers ----------------------------------------------------------------------------------------------

    def grant(
        self,
        node_id: str,
        prompt_ids: IntArray,
        sampling: SamplingParams,
        page_ids: Sequence[int],
    ) -> int:
        """Have a prefill node that is up compute a prompt into these pages; returns the transfer's id."""
        node = self._nodes[node_id]
        if node.peer is None:
            raise LocalProtocolError(f"{node_id} is not up")
        transfer_id, self._next_id = self._next_id, self._next_id + 1
        incoming = _Incoming(
            rx.Receiver(transfer_id, len(page_ids)),
            tuple(page_ids),
            len(prompt_ids),
            self._pool.layout.page_size,
        )
        node.transfers[transfer_id] = incoming
        self._of_transfer[transfer_id] = node
        self._turn += 1
        self._counters["transfers_started"] += 1
        seq = node.peer.send(Prefill(transfer_id, sampling, prompt_ids, int32s(page_ids)))
        node.reconciler.opened(transfer_id, seq)
        return transfer_id

    def abort(self, transfer_id: int, now: float) -> None:
        """Give a transfer up. Its pages are D's again at once: on this plane D alone writes them."""
        node = self._of_transfer.get(transfer_id)
        if node is not None:
            self._counters["transfers_aborted"] += 1
            self._feed(node, transfer_id, rx.GiveUp(), now)

    # The loop -----------------------------------------------------------------------------------------------

    def pollables(self) -> list[Pollable]:
        """What to wait for."""
        return [item for node in self._nodes.values() for item in node.connector.pollables()]

    def deadline(self) -> float | None:
        """When `poll` has something to do at the latest."""
        deadlines = [node.connector.deadline() for node in self._nodes.values()]
        for node in self._nodes.values():
            deadlines += [transfer.machine.deadline() for transfer in node.transfers.values()]
        return min((d for d in deadlines if d is not None), default=None)

    def poll(self, now: float) -> list[ReceiverOutput]:
        """Read all messages, do what is due, report what ended."""
        for node in list(self._nodes.values()):
            for event in node.connector.poll(now):
                match event:
                    case PeerUp(peer):
                        self._up(node, peer)
                    case PeerDown(_, reason):
                        self._down(node, f"prefill node {node.info.node_id}: {reason}", now)
                    case PeerMessage(_, message):
                        self._message(node, message, now)
            for transfer_id in list(node.transfers):
                self._feed(node, transfer_id, rx.Tick(), now)
        outputs, self._outputs = self._outputs, []
        return outputs

    def counters(self) -> dict[str, int]:
        """Counts since start, by name."""
        total = Counter(self._counters)
        for node in self._nodes.values():
            total.update(node.connector.counters)
        return dict(total)

    def close(self) -> None:
        """Close all links."""
        for node in self._nodes.values():
            node.connector.close()

    # ------------------------------------------------------------------------------------------------------

    def _connect(self, info: PeerInfo, now: float) -> _PrefillNode:
        def place(peer: Peer, header: Header) -> Sequence[memoryview] | None:
            return node.plane.place(header) if node.plane is not None and node.peer is peer else None

        def status(_: Peer) -> Status:
            return Status(
                last_seq_seen=0,
                open_ids=node.reconciler.open_ids(),
                total_bytes=0 if node.plane is None else node.plane.limit_bytes(),
            )

        def check(ours: Hello, theirs: Hello) -> str | None:
            if theirs.node_id != info.node_id:
                return f"{info.address} should be {info.node_id}, it is {theirs.node_id}"
            return mismatch(ours, theirs)

        connector = Connector(
            self._context, info.address, self._local, self._epoch, status, now=now, place=place, check=check
        )
        node = _PrefillNode(info, connector)
        return node

    def _up(self, node: _PrefillNode, peer: Peer) -> None:
        log.info("%s: linked to %s, plane %s", self._local.node_id, peer.node_id, peer.plane)
        node.peer = peer
        node.reconciler = Reconciler()
        node.plane = FramesReceiver(
            self._pool,
            peer.send,
            window_bytes=self._config.transfer_window * MEBIBYTE,
            verify_pages=self._config.verify_pages,
        )

    def _down(self, node: _PrefillNode, reason: str, now: float) -> None:
        node.peer = None
        if node.plane is not None:
            node.plane.close()
            node.plane = None
        for transfer_id in list(node.transfers):
            self._feed(node, transfer_id, rx.Lost(reason), now)

    def _drop(self, node: _PrefillNode, reason: str, now: float) -> None:
        self._down(node, f"prefill node {node.info.node_id}: {reason}", now)
        node.connector.close()
        self._counters.update(node.connector.counters)
        del self._nodes[node.info.node_id]

    def _message(self, node: _PrefillNode, message: object, now: float) -> None:
        match message:
            case Status():
                self._status(node, message, now)
            case Chunk():
                if message.transfer_id in node.transfers:
                    self._feed(node, message.transfer_id, message, now)
                else:
                    self._late(node, message)
            case Commit() | Rejected() | Quiesced():
                self._feed(node, message.transfer_id, message, now)
            case Failed():
                self._feed(node, message.id, message, now)
            case _:
                self._counters["messages_misplaced"] += 1

    def _status(self, node: _PrefillNode, status: Status, now: float) -> None:
        assert node.plane is not None
        try:
            node.plane.on_status(status)
        except RemoteProtocolError as error:
            log.error("%s: %s: %s", self._local.node_id, node.info.node_id, error)
            self._counters["messages_rejected"] += 1
        for transfer_id in node.reconciler.on_status(status.last_seq_seen, status.open_ids):
            self._feed(node, transfer_id, rx.Lost(f"{node.info.node_id} does not know the transfer"), now)

    def _feed(self, node: _PrefillNode, transfer_id: int, input_: rx.Input, now: float) -> None:
        transfer = node.transfers.get(transfer_id)
        if transfer is None:
            self._counters["messages_late"] += 1
            return
        try:
            outputs = transfer.machine.handle(input_, now)
        except RemoteProtocolError as error:
            self._counters["messages_misplaced"] += 1
            outputs = transfer.machine.handle(rx.Broken(str(error)), now)
        for output in outputs:
            self._perform(node, transfer, output, now)
        if isinstance(input_, Chunk) and not any(isinstance(o, rx.Place) for o in outputs):
            self._late(node, input_)
        if transfer.machine.ended and node.transfers.pop(transfer_id, None) is not None:
            self._of_transfer.pop(transfer_id, None)
            node.reconciler.closed(transfer_id)

    def _perform(self, node: _PrefillNode, transfer: _Incoming, output: rx.Output, now: float) -> None:
        transfer_id = transfer.machine.transfer_id
        match output:
            case rx.Send(message):
                node.reconciler.closed(transfer_id)  # from now on Quiesced is waited for, not the first token
                if node.peer is not None:
                    node.peer.send(message)
            case rx.Place(chunk):
                self._place(node, transfer, chunk, now)
            case rx.Done(commit):
                self._counters["transfers_done"] += 1
                self._outputs.append(TransferDone(transfer_id, commit))
            case rx.GaveOut(status, reason, retryable):
                self._counters["transfers_failed"] += 1
                log.warning("%s: transfer %d: %s", self._local.node_id, transfer_id, reason)
                self._outputs.append(TransferGaveOut(transfer_id, status, reason, retryable))
            case rx.Closed():
                pass

    def _place(self, node: _PrefillNode, transfer: _Incoming, chunk: Chunk, now: float) -> None:
        assert node.plane is not None
        try:
            node.plane.take(chunk, transfer.page_ids[chunk.first_page : chunk.first_page + chunk.num_pages])
            self._counters["pages_received"] += chunk.num_pages
        except RemoteProtocolError as error:
            self._counters["chunks_broken"] += 1
            self._feed(node, transfer.machine.transfer_id, rx.Broken(str(error)), now)

    def _late(self, node: _PrefillNode, chunk: Chunk) -> None:
        """A chunk that nobody waits for: its bytes go nowhere, its credit comes back."""
        self._counters["messages_late"] += 1
        if node.plane is not None:
            try:
                node.plane.take(chunk, None)
            except RemoteProtocolError:
                self._counters["messages_rejected"] += 1
