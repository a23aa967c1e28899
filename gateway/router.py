"""What the gateway knows of its nodes, and which decode node gets the next request. Pure.

Round robin over the decode nodes that say they are usable.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from common.messages import PeerInfo, Role, Status
from common.peer import Peer
from common.reconcile import Reconciler

STALLED_AFTER_S = 30.0
FORGOTTEN_AFTER_S = 60.0


@dataclass(eq=False, slots=True)
class Node:
    """A node that is up."""

    peer: Peer
    progress_s: float  # when it last made a step, or had nothing to do
    status: Status | None = None
    reconciler: Reconciler = field(default_factory=Reconciler)

    @property
    def is_decode(self) -> bool:
        """It is a decode node."""
        return self.peer.hello.role is Role.DECODE

    @property
    def is_draining(self) -> bool:
        """It said that it is about to leave."""
        return self.status is not None and self.status.draining

    def take_status(self, status: Status, now: float) -> None:
        """Note what the node says of itself."""
        if self.status is None or status.steps != self.status.steps:
            self.progress_s = now
        elif not (status.running or status.out_of_pages) and (status.queued == 0 or self.is_decode):
            self.progress_s = now  # what waits for a prefill node is no work of a decode node
        self.status = status

    def is_stalled(self, now: float) -> bool:
        """It has work and made no step for 30 s. A node that says nothing may have what we gave it."""
        status = self.status
        if status is None or not (status.running or status.queued or self.reconciler.open_ids()):
            return False
        return now - self.progress_s > STALLED_AFTER_S


class Router:
    """The nodes by name."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._gone: dict[str, float] = {}
        self._turn = 0

    def add(self, peer: Peer, now: float) -> Node:
        """A node is up."""
        self._gone.pop(peer.node_id, None)
        node = self._nodes[peer.node_id] = Node(peer, now)
        return node

    def remove(self, peer: Peer, now: float) -> Node | None:
        """A node is down; returns what was known of it, unless a newer one has taken its place."""
        node = self._nodes.get(peer.node_id)
        if node is None or node.peer is not peer:
            return None
        del self._nodes[peer.node_id]
        if not node.is_draining:  # who said that it would leave is not missed
            self._gone[peer.node_id] = now
        return node

    def of(self, peer: Peer) -> Node | None:
        """The node behind a peer, while it is the current one of its name."""
        node = self._nodes.get(peer.node_id)
        return node if node is not None and node.peer is peer else None

    def nodes(self) -> list[Node]:
        """All nodes that are up."""
        return list(self._nodes.values())

    def decode_nodes(self) -> list[Node]:
        """The decode nodes that are up."""
        return [node for node in self._nodes.values() if node.peer.hello.role is Role.DECODE]

    def stalled(self, now: float) -> tuple[str, ...]:
        """Names of the nodes that have work and make no steps."""
        return tuple(node.peer.node_id for node in self.nodes() if node.is_stalled(now))

    def capacity_tokens(self) -> int | None:
        """Tokens of the smallest pool of a decode node: `choose` does not ask for a request's size."""
        return min((node.peer.hello.capacity_tokens for node in self.decode_nodes()), default=None)

    def prefill_infos(self) -> tuple[PeerInfo, ...]:
        """The prefill nodes that are up, as decode nodes are told of them."""
        return tuple(
            PeerInfo(node.peer.node_id, node.peer.hello.listen, node.peer.epoch)
            for node in self._nodes.values()
            if node.peer.hello.role is Role.PREFILL and node.peer.hello.listen is not None
        )

    def gone(self, now: float) -> tuple[str, ...]:
        """Names of nodes that died in the last minute and did not come back."""
        self._gone = {name: at for name, at in self._gone.items() if now - at < FORGOTTEN_AFTER_S}
        return tuple(self._gone)

    def choose(self, tried: Collection[int] = ()) -> Node | None:
        """The next usable decode node in turn, or None; `tried` are epochs of those that had the request."""
        usable = [
            node
            for node in self.decode_nodes()
            if node.status is not None and node.status.usable and node.peer.epoch not in tried
        ]
        if not usable:
            return None
        self._turn += 1
        return usable[self._turn % len(usable)]
