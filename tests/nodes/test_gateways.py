"""A decode node's gateways: which prefill nodes they name together, and whose epoch is whose."""

from __future__ import annotations

from typing import Any, cast

from common.messages import PeerInfo
from common.peer import Peer
from decode_node.gateways import Gateways
from tests.wire.hellos import Role, hello

OLD, NEW, OTHER = (PeerInfo(name, "ipc:///tmp/p", epoch) for name, epoch in (("p", 1), ("p", 2), ("q", 3)))


def peer(epoch: int) -> Peer:
    return Peer(hello(Role.GATEWAY), epoch, "", cast(Any, None))


def test_prefill_nodes_are_those_of_all_gateways_as_the_last_one_knows_them() -> None:
    gateways = Gateways([cast(Any, None)] * 2)
    one, two = gateways
    one.told((OLD,), 1.0)
    two.told((NEW, OTHER), 2.0)
    assert set(gateways.prefills()) == {NEW, OTHER}
    one.told((), 3.0)  # it has seen the old one's end; the other one has seen more
    assert set(gateways.prefills()) == {NEW, OTHER}
    two.down()
    assert gateways.prefills() == ()


def test_an_epoch_is_that_of_a_gateway_that_is_up() -> None:
    gateways = Gateways([cast(Any, None)] * 2)
    one, two = gateways
    assert gateways.of(5) is None
    one.up(peer(5))
    two.up(peer(6))
    one.reconciler.opened(1)
    assert (gateways.of(5), gateways.of(6)) == (one, two)
    one.down()
    assert (gateways.of(5), gateways.of(6)) == (None, two)
    one.up(peer(7))
    assert one.reconciler.open_ids() == (), "a new process has nothing open"
