"""The gateways of a decode node: a link to each, and what is open there.

Each owns the requests of its epoch; the death of one ends those, and no other's. Knows no scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from common.messages import PeerInfo
from common.node import GatewayLink
from common.peer import Peer
from common.reconcile import Reconciler


@dataclass(eq=False, slots=True)
class Gateway:
    """One of them."""

    link: GatewayLink
    peer: Peer | None = None
    reconciler: Reconciler = field(default_factory=Reconciler)
    said_usable: bool = False
    is_draining: bool = False
    prefills: tuple[PeerInfo, ...] = ()
    told_s: float = 0.0  # when it named those

    def up(self, peer: Peer) -> None:
        """A process is there: nothing of it is open yet."""
        self.peer, self.reconciler, self.is_draining = peer, Reconciler(), False

    def down(self) -> None:
        """It is gone, and with it what it said."""
        self.peer, self.said_usable, self.prefills = None, False, ()

    def told(self, prefills: tuple[PeerInfo, ...], now: float) -> None:
        """It named the prefill nodes that it sees."""
        self.prefills, self.told_s = prefills, now


class Gateways:
    """All of them."""

    def __init__(self, links: Sequence[GatewayLink]) -> None:
        self._all = tuple(Gateway(link) for link in links)

    def __iter__(self) -> Iterator[Gateway]:
        return iter(self._all)

    def of(self, epoch: int) -> Gateway | None:
        """The one that is up with that epoch."""
        return next((g for g in self._all if g.peer is not None and g.peer.epoch == epoch), None)

    def prefills(self) -> tuple[PeerInfo, ...]:
        """All prefill nodes that one of them sees; who was told last knows a node best."""
        by_name: dict[str, PeerInfo] = {}
        for gateway in sorted(self._all, key=lambda g: g.told_s):
            by_name |= {info.node_id: info for info in gateway.prefills}
        return tuple(by_name.values())
