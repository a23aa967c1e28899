"""D's end of all transfers: performs what the receivers' machines decide.

A Connector for each prefill node. Grants, places chunks, reports what is done. Messages of a transfer that
is over are counted and dropped. Owned by the node's loop; not thread-safe.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import zmq

from common.clock import Clock
from common.codec import Header, IntArray
from common.config import TransferConfig
from common.connector import Connector
from common.device.streams import DONE, Event, Stream, Streams
from common.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from common.host import DeathWatch
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
from common.peer import Peer, PeerDown, PeerMessage, PeerUp
from common.reconcile import Reconciler
from common.request import SamplingParams
from common.sockets import Pollable
from transfer import receiver as rx
from transfer.planes.base import PlaneReceiver
from transfer.planes.cuda_ipc import CUDA_IPC
from transfer.planes.frames import FramesReceiver
from transfer.planes.one_sided import OneSidedReceiver
from transfer.planes.shm import SHM

log = logging.getLogger("baton.transfer")

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class TransferDone:
    """Pages and first token are in; the stamps are on our clock."""

    transfer_id: int
    commit: Commit


@dataclass(frozen=True, slots=True)
class TransferGaveOut:
    """The transfer will not be completed."""

    transfer_id: int
    status: int
    reason: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class TransferReleased:
    """The pages of a transfer that was aborted, or gave out, are D's again. Said once for each."""

    transfer_id: int


ReceiverOutput = TransferDone | TransferGaveOut | TransferReleased


@dataclass(eq=False, slots=True)
class _PrefillNode:
    """A prefill node that D knows of, up or not."""

    info: PeerInfo
    connector: Connector
    peer: Peer | None = None
    plane: PlaneReceiver | None = None
    reconciler: Reconciler = field(default_factory=Reconciler)
    is_draining: bool = False


@dataclass(eq=False, slots=True)
class _Incoming:
    """A transfer: its machine, D's pages, and the process that it is at."""

    machine: rx.Receiver
    page_ids: tuple[int, ...]
    num_tokens: int
    page_size: int
    epoch: int  # of P's process
    node: _PrefillNode | None  # None: the process is out of reach

    @property
    def tokens_ahead(self) -> int:
        """Prompt tokens that P has not yet computed, as far as D knows."""
        return max(0, self.num_tokens - self.machine.pages_in * self.page_size)


class ReceiverEndpoint:
    """D's end. Pages given with `grant` belong to the transfer until it is done or released.

    On a GPU what D itself copies into pages is on the forward stream, behind all that was launched before.

    Args:
        streams: of the node; None: its own.
        clock: the one that `poll` is given the time of.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        pool: KVPool,
        config: TransferConfig,
        local: Hello,
        epoch: int,
        *,
        streams: Streams | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._clock = clock
        self._context = context
        self._pool = pool
        self._streams = streams or Streams(pool.device)
        self._config = config
        self._local = local
        self._epoch = epoch
        self._nodes: dict[str, _PrefillNode] = {}
        self._transfers: dict[int, _Incoming] = {}
        self._unusable: set[PeerInfo] = set()
        self._placed: Event = DONE  # the end of what D itself last copied into pages
        self._out_of_reach = DeathWatch(local.host)
        self._next_id = 1
        self._turn = 0
        self._outputs: list[ReceiverOutput] = []
        self._counters: Counter[str] = Counter()

    # Which prefill nodes there are --------------------------------------------------------------------------

    def set_prefill_nodes(
        self, prefills: Sequence[PeerInfo], now: float, *, others_died: bool = True
    ) -> None:
        """Connect to the ones that are new, drop the ones that are gone or started again."""
        wanted = {info.node_id: info for info in prefills}
        for node_id, node in list(self._nodes.items()):
            if wanted.get(node_id) != node.info:
                node.is_draining |= not others_died  # then they are not counted as lost
                self._drop(node, "the gateway no longer lists it", now)
        for node_id, info in wanted.items():
            if node_id in self._nodes:
                continue
            try:
                self._nodes[node_id] = self._connect(info, now)
            except ConfigError as error:  # an address that this process cannot use is not its end
                if info not in self._unusable:  # it is told of again and again
                    self._unusable.add(info)
                    self._counters["peers_unusable"] += 1
                    log.error("%s: prefill node %s: %s", self._local.node_id, node_id, error)

    def ready_nodes(self) -> list[str]:
        """Prefill nodes that can be given work, the next in turn first."""
        nodes = self._nodes.items()
        up = [node_id for node_id, node in nodes if node.peer is not None and not node.is_draining]
        return up[self._turn % len(up) :] + up[: self._turn % len(up)] if up else []

    def tokens_ahead(self, node_id: str) -> int:
        """Prompt tokens granted to a prefill node and not yet computed there."""
        return sum(transfer.tokens_ahead for transfer in self._at(self._nodes[node_id]))

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
        if node.peer is None or node.plane is None:
            raise LocalProtocolError(f"{node_id} is not up")
        if node.plane.one_sided:
            # Only a D with planes of both kinds may find anything to wait for, and at most a step: a copy for
            # the last owner of a page, who gave it up, must not come behind what P writes there.
            self._placed.synchronize()
        transfer_id, self._next_id = self._next_id, self._next_id + 1
        self._transfers[transfer_id] = _Incoming(
            rx.Receiver(
                transfer_id,
                len(page_ids),
                one_sided=node.plane.one_sided,
                num_choices=sampling.num_choices,
                scored=rx.Scored.of(sampling, len(prompt_ids)),
            ),
            tuple(page_ids),
            len(prompt_ids),
            self._pool.layout.page_size,
            node.peer.epoch,
            node,
        )
        self._turn += 1
        self._counters["transfers_started"] += 1
        seq = node.peer.send(Prefill(transfer_id, sampling, prompt_ids, int32s(page_ids)))
        node.reconciler.opened(transfer_id, seq)
        return transfer_id

    def abort(self, transfer_id: int, now: float) -> None:
        """Give a transfer up. Its pages are D's again when `poll` says that it is released."""
        if (transfer := self._transfers.get(transfer_id)) is not None:
            self._counters["transfers_aborted"] += 1
            self._feed(transfer, rx.GiveUp(), now)

    # The loop -----------------------------------------------------------------------------------------------

    def pollables(self) -> list[Pollable]:
        """What to wait for."""
        sockets = [item for node in self._nodes.values() for item in node.connector.pollables()]
        return [*sockets, *self._out_of_reach.pollables()]

    def deadline(self) -> float | None:
        """When `poll` has something to do at the latest."""
        deadlines = [node.connector.deadline() for node in self._nodes.values()]
        deadlines += [transfer.machine.deadline() for transfer in self._transfers.values()]
        return min((d for d in deadlines if d is not None), default=None)

    def poll(self, now: float) -> list[ReceiverOutput]:
        """Read all messages, do what is due, report what ended."""
        for node in list(self._nodes.values()):
            for event in node.connector.poll(now):
                match event:
                    case PeerUp(peer):
                        self._up(node, peer)
                    case PeerDown(peer, reason):
                        self._down(node, peer, f"prefill node {node.info.node_id}: {reason}", now)
                    case PeerMessage(peer, Commit(stamps=stamps) as commit):
                        commit = replace(commit, stamps=stamps.shifted(peer.offset_s))
                        self._message(node, commit, now)
                    case PeerMessage(_, message):
                        self._message(node, message, now)
        for epoch in self._out_of_reach.dead():
            for transfer in [t for t in self._transfers.values() if t.node is None and t.epoch == epoch]:
                self._feed(transfer, rx.Lost("its process ended", quiet=True), now)
        for transfer in list(self._transfers.values()):
            self._feed(transfer, rx.Tick(), now)
        outputs, self._outputs = self._outputs, []
        return outputs

    def counters(self) -> Counter[str]:
        """Counts since start, by name."""
        total = Counter(self._counters)
        for node in self._nodes.values():
            total.update(node.connector.counters)
        return total

    def close(self) -> None:
        """Close all links."""
        for node in self._nodes.values():
            node.connector.close()
        self._out_of_reach.close()

    # --------------------------------------------------------------------------------------------------------

    def _at(self, node: _PrefillNode) -> list[_Incoming]:
        return [transfer for transfer in self._transfers.values() if transfer.node is node]

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

        who = self._context, info.address, self._local, self._epoch
        connector = Connector(*who, status, now=now, place=place, check=check, clock=self._clock)
        node = _PrefillNode(info, connector)
        return node

    def _up(self, node: _PrefillNode, peer: Peer) -> None:
        log.info("%s: linked to %s, plane %s", self._local.node_id, peer.node_id, peer.plane)
        node.peer = peer
        node.is_draining = False
        node.reconciler = Reconciler()
        verify = self._config.verify_pages
        if peer.plane in (SHM, CUDA_IPC):
            node.plane = OneSidedReceiver(self._pool, verify_pages=verify)
        else:
            window = self._config.transfer_window * MEBIBYTE
            node.plane = FramesReceiver(
                self._pool, peer.send, self._streams, window_bytes=window, verify_pages=verify
            )
        self._out_of_reach.forget(peer.epoch)
        for transfer in self._transfers.values():
            if transfer.node is None and transfer.epoch == peer.epoch:
                transfer.node = node  # the same process: it can be asked again whether it is quiet

    def _down(self, node: _PrefillNode, peer: Peer | None, reason: str, now: float) -> None:
        self._counters["prefill_nodes_lost"] += node.peer is not None and not node.is_draining
        node.peer = None
        if node.plane is not None:
            node.plane.close()
            node.plane = None
        for transfer in self._at(node):
            transfer.node = None
            self._feed(transfer, rx.Lost(reason, quiet=False), now)
            if not transfer.machine.ended and peer is not None:
                self._out_of_reach.watch(transfer.epoch, peer.hello.host)

    def _drop(self, node: _PrefillNode, reason: str, now: float) -> None:
        self._down(node, node.peer, f"prefill node {node.info.node_id}: {reason}", now)
        node.connector.close()
        self._counters.update(node.connector.counters)
        del self._nodes[node.info.node_id]

    def _message(self, node: _PrefillNode, message: object, now: float) -> None:
        match message:
            case Status():
                self._status(node, message, now)
            case Chunk() | Commit() | Rejected() | Quiesced():
                self._transfer_message(node, message.transfer_id, message, now)
            case Failed():
                self._counters["prefill_nodes_failed"] += not node.is_draining
                self._transfer_message(node, message.id, message, now)
            case _:
                self._counters["messages_misplaced"] += 1

    def _transfer_message(
        self, node: _PrefillNode, transfer_id: int, message: rx.Message, now: float
    ) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.node is node:
            self._feed(transfer, message, now)
            return
        self._counters["messages_late"] += 1
        if isinstance(message, Chunk):
            self._pass_over(node, message)

    def _status(self, node: _PrefillNode, status: Status, now: float) -> None:
        assert node.plane is not None
        node.is_draining = status.draining
        try:
            node.plane.on_status(status)
        except RemoteProtocolError as error:
            log.error("%s: %s: %s", self._local.node_id, node.info.node_id, error)
            self._counters["messages_misplaced"] += 1
        for transfer_id in node.reconciler.on_status(status.last_seq_seen, status.open_ids):
            self._counters["transfers_lost"] += 1
            lost = rx.Lost(f"{node.info.node_id} does not know the transfer", quiet=True)
            self._feed(self._transfers[transfer_id], lost, now)

    def _feed(self, transfer: _Incoming, input_: rx.Input, now: float) -> None:
        try:
            outputs = transfer.machine.handle(input_, now)
            if isinstance(input_, Chunk | Commit) and any(isinstance(o, rx.GaveOut) for o in outputs):
                self._counters["pages_wrong"] += 1
        except RemoteProtocolError as error:
            self._counters["messages_misplaced"] += 1
            outputs = transfer.machine.handle(rx.Broken(str(error)), now)
        for output in outputs:
            self._perform(transfer, output, now)
        if isinstance(input_, Chunk) and not any(isinstance(o, rx.Place) for o in outputs):
            assert transfer.node is not None
            self._pass_over(transfer.node, input_)
        if transfer.machine.ended and self._transfers.pop(transfer.machine.transfer_id, None) is not None:
            self._close(transfer)

    def _perform(self, transfer: _Incoming, output: rx.Output, now: float) -> None:
        transfer_id = transfer.machine.transfer_id
        match output:
            case rx.Send(message):
                self._close(transfer)  # from now on Quiesced is waited for, not the first token
                if transfer.node is not None and transfer.node.peer is not None:
                    transfer.node.peer.send(message)
            case rx.Place(chunk):
                self._place(transfer, chunk, now)
            case rx.Done(commit):
                self._counters["transfers_done"] += 1
                self._outputs.append(TransferDone(transfer_id, commit))
            case rx.GaveOut(status, reason, retryable):
                self._counters["transfers_failed"] += 1
                log.warning("%s: transfer %d: %s", self._local.node_id, transfer_id, reason)
                self._outputs.append(TransferGaveOut(transfer_id, status, reason, retryable))
            case rx.PagesFree():
                self._outputs.append(TransferReleased(transfer_id))

    def _close(self, transfer: _Incoming) -> None:
        if transfer.node is not None:
            transfer.node.reconciler.closed(transfer.machine.transfer_id)

    def _place(self, transfer: _Incoming, chunk: Chunk, now: float) -> None:
        assert transfer.node is not None
        assert transfer.node.plane is not None
        try:
            pages = transfer.page_ids[chunk.first_page : chunk.first_page + chunk.num_pages]
            transfer.node.plane.take(chunk, pages)
            if not transfer.node.plane.one_sided:
                self._placed = self._streams.record(Stream.FORWARD)
            self._counters["pages_received"] += chunk.num_pages
        except RemoteProtocolError as error:
            self._counters["chunks_broken"] += 1
            self._feed(transfer, rx.Broken(str(error)), now)

    def _pass_over(self, node: _PrefillNode, chunk: Chunk) -> None:
        """A chunk that nobody waits for: its bytes go nowhere, its credit comes back."""
        if node.plane is not None:
            try:
                node.plane.take(chunk, None)
            except RemoteProtocolError:
                self._counters["messages_rejected"] += 1
