"""P's end of all transfers: performs what the senders' machines decide.

An Acceptor for all decode nodes. Reports what arrived and what was given up; takes chunks that were computed
and sends them as the plane allows. An abort that comes before its request is remembered. Owned by the
node's loop; not thread-safe.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import zmq

from common.acceptor import Acceptor
from common.clock import Clock
from common.codec import IntArray
from common.config import TransferConfig
from common.device.streams import DONE, Event, Streams
from common.kv.pool import KVPool
from common.messages import Abort, Commit, Credit, Failed, Hello, Prefill, Quiesced, Rejected, Status
from common.peer import Peer, PeerDown, PeerMessage, PeerUp
from common.reconcile import Reconciler
from common.remembered import EarlyAborts
from common.sockets import Pollable
from transfer import sender as tx
from transfer.faulty_planes import planes_class
from transfer.planes.base import PlaneSender
from transfer.sender_planes import SenderPlanes, pool_openers
from transfer.states import SenderState
from transfer.transfer_stream import TransferStream

log = logging.getLogger("baton.transfer")


@dataclass(frozen=True, slots=True)
class TransferKey:
    """A transfer of any decode node: the node's epoch, and the id that it gave."""

    epoch: int
    transfer_id: int


@dataclass(frozen=True, slots=True)
class TransferArrived:
    """A decode node wants a prompt computed."""

    key: TransferKey
    prefill: Prefill


@dataclass(frozen=True, slots=True)
class TransferStopped:
    """Compute no more of it."""

    key: TransferKey


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """It is over, one way or the other: its pages here are free."""

    key: TransferKey


SenderOutput = TransferArrived | TransferStopped | TransferEnded


@dataclass(eq=False, slots=True)
class _DecodeNode:
    """A decode node that is up."""

    peer: Peer
    plane: PlaneSender
    reconciler: Reconciler = field(default_factory=Reconciler)


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """A transfer: its machine, D's pages, and the plane that moves it, which may outlive its link."""

    machine: tx.Sender
    target_ids: IntArray
    plane: PlaneSender


class SenderEndpoint:
    """P's end. A key that ended may still be named by the owner; nothing happens then.

    A link that goes down ends its transfers, each when nothing of it is under way any more. Until then an
    `Abort` of one, over the next link of the same process, is not answered.

    Args:
        stream: where pages are copied; None: a stream of its own.
        planes: which planes there are; None: all.
        clock: the one that `poll` is given the time of.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        pool: KVPool,
        config: TransferConfig,
        local: Hello,
        epoch: int,
        *,
        stream: TransferStream | None = None,
        planes: SenderPlanes | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._clock = clock
        self._stream = stream or TransferStream(Streams(pool.device))
        self._planes = planes or planes_class()(pool, config, self._stream, pool_openers(pool.device))
        self._early_aborts: EarlyAborts[TransferKey] = EarlyAborts()
        self._acceptor = Acceptor(context, address, local, epoch, self._status, self._planes.choose, clock)
        self._nodes: dict[int, _DecodeNode] = {}  # by epoch
        self._transfers: dict[TransferKey, _Outgoing] = {}
        self._outputs: list[SenderOutput] = []
        self._counters: Counter[str] = Counter()
        self.is_draining = False

    @property
    def address(self) -> str:
        """Where decode nodes connect."""
        return self._acceptor.address

    # What the owner says ---------------------------------------------------------------------------------

    def start(self, key: TransferKey) -> None:
        """Pages were found and the first chunk is planned."""
        self._feed(key, tx.Start())

    def chunk(
        self,
        key: TransferKey,
        first_page: int,
        page_ids: Sequence[int],
        *,
        is_last: bool,
        after: Event = DONE,
    ) -> None:
        """The forward that fills these pages was launched; send them behind `after`, an event behind it."""
        self._feed(key, tx.ChunkComputed(first_page, tuple(page_ids), is_last), after)
        node = self._nodes.get(key.epoch)
        if node is not None:
            self._move(node)

    def first_token(self, key: TransferKey, token: tx.FirstToken) -> None:
        """The first token of each choice was sampled."""
        self._feed(key, token)

    def reject(self, key: TransferKey, status: int, reason: str) -> None:
        """It cannot be taken at all."""
        self._counters["transfers_rejected"] += 1
        self._feed(key, tx.Reject(status, reason))

    def drain(self) -> None:
        """Take no more transfers, and tell the decode nodes."""
        self.is_draining = True
        for node in self._nodes.values():
            node.peer.send(self._status(node.peer))

    @property
    def is_drained(self) -> bool:
        """No transfer is left, and the decode nodes have read what became of the last."""
        return not self._transfers and all(node.peer.has_heard for node in self._nodes.values())

    # The loop --------------------------------------------------------------------------------------------

    def pollables(self) -> list[Pollable]:
        """What to wait for."""
        return [*self._acceptor.pollables(), *self._stream.pollables()]

    def deadline(self) -> float | None:
        """When `poll` has something to do at the latest."""
        return self._acceptor.deadline()

    def poll(self, now: float) -> list[SenderOutput]:
        """Read all messages, send what can go, report what happened."""
        self._stream.clear()
        for event in self._acceptor.poll(now):
            match event:
                case PeerUp(peer):
                    self._up(peer)
                case PeerDown(peer, _):
                    self._down(peer)
                case PeerMessage(peer, message):
                    if (node := self._nodes.get(peer.epoch)) is not None and node.peer is peer:
                        self._message(node, message)
        self._planes.forget()
        for key in list(self._transfers):
            self._settle(key)
        for node in self._nodes.values():
            self._move(node)
        return self.take_outputs()

    @property
    def has_more(self) -> bool:
        """Pages can start to move at once: `poll` should come soon."""
        return any(node.plane.has_more for node in self._nodes.values())

    def take_outputs(self) -> list[SenderOutput]:
        """What happened since the last call, by what the owner said, too."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def counters(self) -> Counter[str]:
        """Counts since start, by name."""
        total = Counter(self._counters)
        total.update(self._acceptor.counters)
        total["planes_fallen_back"] = self._planes.num_fallen_back
        return total

    def close(self) -> None:
        """Close all links, and wait for the copies that are under way."""
        for node in self._nodes.values():
            node.plane.close()
        self._acceptor.close()
        self._stream.close()

    # ----------------------------------------------------------------------------------------------------

    def _up(self, peer: Peer) -> None:
        log.info("linked to %s, plane %s", peer.node_id, peer.plane)
        self._nodes[peer.epoch] = _DecodeNode(peer, self._planes.make(peer))

    def _down(self, peer: Peer) -> None:
        node = self._nodes.get(peer.epoch)
        if node is None or node.peer is not peer:
            return
        del self._nodes[peer.epoch]
        for key in [key for key, transfer in self._transfers.items() if transfer.plane is node.plane]:
            self._feed(key, tx.Lost())
        node.plane.close()

    def _status(self, peer: Peer) -> Status:
        node = self._nodes.get(peer.epoch)
        return Status(
            last_seq_seen=0,
            open_ids=tuple(key.transfer_id for key in self._transfers if key.epoch == peer.epoch),
            draining=self.is_draining,
            total_bytes=0 if node is None else node.plane.total_bytes(),
        )

    def _message(self, node: _DecodeNode, message: object) -> None:
        epoch = node.peer.epoch
        match message:
            case Prefill():
                self._arrived(node, message)
            case Abort(transfer_id):
                self._aborted(node, transfer_id)
            case Credit(limit_bytes):
                node.plane.on_credit(limit_bytes)
            case Status():
                node.plane.on_credit(message.total_bytes)
                for transfer_id in node.reconciler.on_status(message.last_seq_seen, message.open_ids):
                    self._feed(TransferKey(epoch, transfer_id), tx.Lost())
            case _:
                self._counters["messages_misplaced"] += 1

    def _arrived(self, node: _DecodeNode, prefill: Prefill) -> None:
        transfer_id = prefill.transfer_id
        key = TransferKey(node.peer.epoch, transfer_id)
        if self._early_aborts.take(key):
            self._counters["aborts_before_request"] += 1
            return
        if key in self._transfers:
            self._counters["messages_duplicate"] += 1
            return
        if self.is_draining:  # it was on its way, or D missed the Status: it tries another prefill node
            self._counters["transfers_rejected"] += 1
            node.peer.send(self._status(node.peer))
            node.peer.send(Failed(transfer_id, 503, "the prefill node is about to leave"))
            return
        if not node.plane.can_reach(prefill.page_ids):
            self._counters["transfers_rejected"] += 1
            reason = f"pages were granted that are not in the pool of {node.peer.node_id}"
            node.peer.send(Rejected(transfer_id, 500, reason))
            return
        machine = tx.Sender(transfer_id, len(prefill.page_ids))
        self._transfers[key] = _Outgoing(machine, prefill.page_ids, node.plane)
        node.reconciler.opened(transfer_id)
        self._counters["transfers_started"] += 1
        self._outputs.append(TransferArrived(key, prefill))

    def _aborted(self, node: _DecodeNode, transfer_id: int) -> None:
        key = TransferKey(node.peer.epoch, transfer_id)
        if key in self._transfers:
            self._counters["transfers_aborted"] += 1
            self._feed(key, Abort(transfer_id))
            return
        # Over, or not yet here. Answered either way: D waits for it. Remembered beyond the link: its request
        # may still come over an older connection, after D was told that nothing is written any more.
        self._early_aborts.remember(key)
        node.peer.send(Quiesced(transfer_id))

    def _move(self, node: _DecodeNode) -> None:
        for posted in node.plane.poll():
            self._counters["pages_sent"] += posted.num_pages
            self._feed(TransferKey(node.peer.epoch, posted.transfer_id), tx.Posted(posted.num_pages))

    def _settle(self, key: TransferKey) -> None:
        """Tell a machine that was given up when its plane touches nothing of it any more."""
        transfer = self._transfers[key]
        if transfer.machine.state is SenderState.QUIESCING and transfer.plane.quiesce(key.transfer_id):
            self._feed(key, tx.Quiet())

    def _feed(self, key: TransferKey, input_: tx.Input, after: Event = DONE) -> None:
        transfer = self._transfers.get(key)
        if transfer is None:
            return
        node = self._nodes.get(key.epoch)  # None: its link is down
        for output in transfer.machine.handle(input_):
            match output:
                case tx.Send(message):
                    if isinstance(message, Commit):
                        stamps = replace(message.stamps, committed_s=self._clock())
                        message = replace(message, stamps=stamps)
                    if node is not None:
                        node.peer.send(message)
                case tx.Post(first_page, page_ids):
                    targets = transfer.target_ids[first_page : first_page + len(page_ids)]
                    transfer.plane.post(key.transfer_id, first_page, page_ids, targets, after)
                case tx.Stop():
                    self._outputs.append(TransferStopped(key))
                    self._settle(key)
                case tx.Ended():
                    del self._transfers[key]
                    if node is not None:
                        node.reconciler.closed(key.transfer_id)
                    self._outputs.append(TransferEnded(key))
