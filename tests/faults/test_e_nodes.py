"""Row E4 of the catalogue on a clock of the test's; `baton conformance` has E1 to E4 on real processes."""

from __future__ import annotations

from typing import Any, cast

from common.messages import Status
from common.peer import Peer
from gateway.router import Router
from tests.wire.hellos import DECODE, PREFILL


def test_e4_not_for_a_minute_and_longer() -> None:
    """What the gateway's /health asks, on a clock that is ours."""
    router = Router()
    decode, prefill = (
        Peer(greeting, number, "frames", cast(Any, None))
        for number, greeting in enumerate((DECODE, PREFILL), 1)
    )
    for peer in (decode, prefill):
        router.add(peer, 0.0)
    node = router.of(decode)
    assert node is not None
    node.reconciler.opened(1, 1)
    node.take_status(Status(last_seq_seen=1, open_ids=(1,), running=1, steps=5, usable=True), 1.0)
    router.remove(prefill, 2.0)
    node.reconciler.closed(1)  # it failed, or finished
    for second in range(3, 90):
        node.take_status(Status(last_seq_seen=1, open_ids=(), steps=6), float(second))
        assert router.stalled(float(second)) == ()
    assert router.nodes() == [node]
