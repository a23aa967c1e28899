"""P's end of all transfers: performs what the senders' machines decide.

An Acceptor for all decode nodes. Reports what arrived and what was given up; takes chunks that were computed
and sends them as the plane allows. An abort that comes before its request is remembered. Owned by the
node's loop; not thread-safe.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq

from common.codec import IntArray
from common.config import TransferConfig
from common.kv.pool import KVPool
from common.link import first_common_plane
from common.messages import Abort, Choice, Credit, Hello, HostIdentity, Prefill, Quiesced, Rejected, Status
from common.peering import Acceptor, Peer, PeerDown, PeerMessage, PeerUp
from common.reconcile import Reconciler
from common.sockets import Pollable
from transfer import sender as tx
from transfer.planes.base import PlaneSender
from transfer.planes.frames import FRAMES, FramesSender
from transfer.planes.shm import SHM, ShmSender, ShmUnavailable, open_pool
from transfer.states import SenderState

log = logging.getLogger("baton.transfer")

REMEMBERED_ABORTS = 4096
COUNTERS = (
    "transfers_started",
    "transfers_rejected",
    "transfers_aborted",
    "aborts_before_request",
    "pages_sent",
    "planes_fallen_back",
    "messages_duplicate",
    "messages_misplaced",
)


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
    transfers: dict[int, tx.Sender] = field(default_factory=dict)
    target_ids: dict[int, IntArray] = field(default_factory=dict)  # D's pages of each transfer


class SenderEndpoint:
    """P's end. A key that ended may still be named by the owner; nothing happens then."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        pool: KVPool,
        config: TransferConfig,
        local: Hello,
        epoch: int,
    ) -> None:
        self._pool = pool
        self._config = config
        self._mapped: dict[HostIdentity, KVPool] = {}  # pools of decode nodes that greeted in this turn
        self._early_aborts: OrderedDict[TransferKey, None] = OrderedDict()
        self._acceptor = Acceptor(context, address, local, epoch, self._status, self._choose_plane)
        self._nodes: dict[int, _DecodeNode] = {}  # by epoch
        self._outputs: list[SenderOutput] = []
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    @property
    def address(self) -> str:
        """Where decode nodes connect."""
        return self._acceptor.address

    # What the owner says ---------------------------------------------------------------------------------

    def start(self, key: TransferKey) -> None:
        """Pages were found and the first chunk is planned."""
        self._feed(key, tx.Start())

    def chunk(self, key: TransferKey, first_page: int, page_ids: Sequence[int], *, is_last: bool) -> None:
        """The forward that fills these pages was launched; send them behind it."""
        self._feed(key, tx.ChunkComputed(first_page, tuple(page_ids), is_last))
        node = self._nodes.get(key.epoch)
        if node is not None:
            self._move(node)

    def first_token(self, key: TransferKey, choice: Choice, *, queue_ms: float, prefill_ms: float) -> None:
        """The first token was sampled."""
        self._feed(key, tx.FirstToken(choice, queue_ms, prefill_ms))

    def reject(self, key: TransferKey, status: int, reason: str) -> None:
        """It cannot be taken at all."""
        self._counters["transfers_rejected"] += 1
        self._feed(key, tx.Reject(status, reason))

    # The loop --------------------------------------------------------------------------------------------

    def pollables(self) -> list[Pollable]:
        """What to wait for."""
        return self._acceptor.pollables()

    def deadline(self) -> float | None:
        """When `poll` has something to do at the latest."""
        return self._acceptor.deadline()

    def poll(self, now: float) -> list[SenderOutput]:
        """Read all messages, send what can go, report what happened."""
        for event in self._acceptor.poll(now):
            match event:
                case PeerUp(peer):
                    self._up(peer)
                case PeerDown(peer, _):
                    self._down(peer)
                case PeerMessage(peer, message):
                    if (node := self._nodes.get(peer.epoch)) is not None and node.peer is peer:
                        self._message(node, message)
        self._mapped.clear()
        for node in self._nodes.values():
            self._settle(node)
            self._move(node)
        return self.take_outputs()

    @property
    def has_more(self) -> bool:
        """Pages can move at once: `poll` should come soon."""
        return any(node.plane.has_more for node in self._nodes.values())

    def take_outputs(self) -> list[SenderOutput]:
        """What happened since the last call, by what the owner said, too."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def counters(self) -> dict[str, int]:
        """Counts since start, by name."""
        total = Counter(self._counters)
        total.update(self._acceptor.counters)
        return dict(total)

    def close(self) -> None:
        """Close all links."""
        for node in self._nodes.values():
            node.plane.close()
        self._acceptor.close()

    # ----------------------------------------------------------------------------------------------------

    def _up(self, peer: Peer) -> None:
        log.info("linked to %s, plane %s", peer.node_id, peer.plane)
        verify = self._config.verify_pages
        plane: PlaneSender
        if peer.plane == SHM:
            target = self._mapped[peer.hello.host]
            plane = ShmSender(self._pool, target, peer.send, verify_pages=verify)
        else:
            plane = FramesSender(self._pool, peer.send, verify_pages=verify)
        self._nodes[peer.epoch] = _DecodeNode(peer, plane)

    def _choose_plane(self, ours: Hello, theirs: Hello) -> str:
        """Take shm where D's pool can be mapped; what falls back says so."""
        plane = first_common_plane(ours, theirs)
        if plane != SHM:
            return plane
        try:
            self._mapped[theirs.host] = open_pool(ours, theirs)
        except ShmUnavailable as error:
            log.warning("%s: no shared memory with %s: %s", ours.node_id, theirs.node_id, error)
            if FRAMES not in ours.planes or FRAMES not in theirs.planes:
                return ""
            self._counters["planes_fallen_back"] += 1
            return FRAMES
        return SHM

    def _down(self, peer: Peer) -> None:
        node = self._nodes.get(peer.epoch)
        if node is None or node.peer is not peer:
            return
        for transfer_id in list(node.transfers):
            self._feed(TransferKey(peer.epoch, transfer_id), tx.Lost())
        node.plane.close()
        del self._nodes[peer.epoch]

    def _status(self, peer: Peer) -> Status:
        node = self._nodes.get(peer.epoch)
        return Status(
            last_seq_seen=0,
            open_ids=() if node is None else tuple(node.transfers),
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
        if key in self._early_aborts:
            del self._early_aborts[key]
            self._counters["aborts_before_request"] += 1
            return
        if transfer_id in node.transfers:
            self._counters["messages_duplicate"] += 1
            return
        if not node.plane.can_reach(prefill.page_ids):
            self._counters["transfers_rejected"] += 1
            reason = f"pages were granted that are not in the pool of {node.peer.node_id}"
            node.peer.send(Rejected(transfer_id, 500, reason))
            return
        node.transfers[transfer_id] = tx.Sender(transfer_id, len(prefill.page_ids))
        node.target_ids[transfer_id] = prefill.page_ids
        node.reconciler.opened(transfer_id)
        self._counters["transfers_started"] += 1
        self._outputs.append(TransferArrived(key, prefill))

    def _aborted(self, node: _DecodeNode, transfer_id: int) -> None:
        key = TransferKey(node.peer.epoch, transfer_id)
        if transfer_id in node.transfers:
            self._counters["transfers_aborted"] += 1
            self._feed(key, Abort(transfer_id))
            return
        # Over, or not yet here. Answered either way: D waits for it. Remembered beyond the link: its request
        # may still come over an older connection, after D was told that nothing is written any more.
        self._early_aborts[key] = None
        while len(self._early_aborts) > REMEMBERED_ABORTS:
            self._early_aborts.popitem(last=False)
        node.peer.send(Quiesced(transfer_id))

    def _move(self, node: _DecodeNode) -> None:
        for posted in node.plane.poll():
            self._counters["pages_sent"] += posted.num_pages
            self._feed(TransferKey(node.peer.epoch, posted.transfer_id), tx.Posted(posted.num_pages))

    def _settle(self, node: _DecodeNode) -> None:
        """Tell the machines that were given up when the plane reads nothing of theirs any more."""
        for transfer_id, machine in list(node.transfers.items()):
            if machine.state is SenderState.QUIESCING and node.plane.quiesce(transfer_id):
                self._feed(TransferKey(node.peer.epoch, transfer_id), tx.Quiet())

    def _feed(self, key: TransferKey, input_: tx.Input) -> None:
        node = self._nodes.get(key.epoch)
        machine = None if node is None else node.transfers.get(key.transfer_id)
        if node is None or machine is None:
            return
        for output in machine.handle(input_):
            match output:
                case tx.Send(message):
                    node.peer.send(message)
                case tx.Post(first_page, page_ids):
                    targets = node.target_ids[key.transfer_id][first_page : first_page + len(page_ids)]
                    node.plane.post(key.transfer_id, first_page, page_ids, targets)
                case tx.Stop():
                    self._outputs.append(TransferStopped(key))
                    self._settle(node)
                case tx.Ended():
                    node.transfers.pop(key.transfer_id, None)
                    node.target_ids.pop(key.transfer_id, None)
                    node.reconciler.closed(key.transfer_id)
                    self._outputs.append(TransferEnded(key))
