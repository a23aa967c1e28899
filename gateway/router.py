"""What the gateway knows of its nodes, and which decode node gets the next request. Pure.

Round robin over the decode nodes that say they are usable.
"""

from __future__ import annotations

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

    def take_status(self, status: Status, now: float) -> None:
        """Note what the node says of itself."""
        if self.status is None or status.steps != self.status.steps or status.running == 0:
            self.progress_s = now
        self.status = status

    def is_stalled(self, now: float) -> bool:
        """It has work and made no step for 30 s. A node that says nothing may have what we gave it."""
        has_work = self.status is not None and (self.status.running > 0 or self.reconciler.open_ids())
        return bool(has_work) and now - self.progress_s > STALLED_AFTER_S


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
        """Names of nodes that went down in the last minute and did not come back."""
        self._gone = {name: at for name, at in self._gone.items() if now - at < FORGOTTEN_AFTER_S}
        return tuple(self._gone)

    def choose(self) -> Node | None:
        """The next usable decode node in turn, or None."""
        usable = [node for node in self.decode_nodes() if node.status is not None and node.status.usable]
        if not usable:
            return None
        self._turn += 1
        return usable[self._turn % len(usable)]
