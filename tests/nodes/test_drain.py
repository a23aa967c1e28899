"""Nodes on their way out: what is refused, what is handed back, what goes on, and when they may leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, cast

import pytest

from common.errors import LocalProtocolError
from common.messages import NODE_DRAINING, PeerInfo, Status
from common.peer import Peer
from decode_node.entry import RefusedOut, RequestKey
from decode_node.scheduler import DecodeScheduler
from gateway.router import Router
from tests.nodes.test_decode_scheduler import (
    IDLE,
    arrive,
    commit,
    drawn,
    prebuild,
    scheduler,
    submit,
    tokens_of,
)
from tests.nodes.test_retraction import crowd
from tests.wire.conftest import address, context
from tests.wire.endpoint_world import P_EPOCH, P_NAME, Context, World
from tests.wire.hellos import DECODE
from transfer.receiver_endpoint import TransferGaveOut

__all__ = ["address", "context"]

# The decode node's scheduler ----------------------------------------------------------------------------


def handed_back(s: DecodeScheduler) -> list[RequestKey]:
    refused = [out for out in s.out if isinstance(out, RefusedOut)]
    assert all((out.status, out.code) == (503, NODE_DRAINING) for out in refused)
    assert all(out.retry_after_s is not None for out in refused)
    return [out.key for out in refused]


def test_what_has_no_pages_goes_back_and_what_has_some_is_finished() -> None:
    s = scheduler()
    running, granted, waiting = submit(s, 1, max_tokens=2), submit(s, 2, max_tokens=1), submit(s, 3)
    arrive(s, 7)
    prebuild(s)
    grant = s.admit(IDLE)
    assert grant is not None
    s.granted(grant, 8, 1.0)
    assert grant.entry.key == granted

    s.drain()
    assert handed_back(s) == [waiting]
    assert not s.is_idle
    late = submit(s, 4)
    assert handed_back(s) == [waiting, late]
    assert s.num_queued == 0

    step = s.next_step(2.0)
    assert step is not None
    s.process(step, drawn(11), 3.0)
    assert [token for _, token, _ in tokens_of(s, running)] == [9, 11]
    assert not s.is_idle, "one is still arriving"
    s.transfer_done(8, commit(8, 12), 4.0)
    assert [token for _, token, _ in tokens_of(s, granted)] == [12]
    s.check_invariants()


def test_an_idle_node_may_leave_at_once() -> None:
    s = scheduler()
    s.drain()
    assert s.is_idle
    assert s.out == []


def test_a_hand_over_that_fails_meanwhile_is_tried_again() -> None:
    s = scheduler()
    submit(s, 1)
    grant = s.admit(IDLE)
    assert grant is not None
    s.granted(grant, 7, 1.0)
    s.drain()
    s.transfer_gave_out(7, 503, "it died", retryable=True, can_prefill=True)
    s.transfer_released(7)
    assert handed_back(s) == []
    assert s.admit(IDLE) is not None


def test_who_was_retracted_has_tokens_out_and_is_finished_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_node.admission.NEAR_TOKENS", 4)
    world = crowd(overlap=True)
    while not world.s.num_retracted:
        world.turn()
    world.s.drain()
    assert handed_back(world.s) == []
    world.run(200)
    assert [len(told) for told in world.told.values()] == [16, 16]
    assert world.s.is_idle


def test_an_abort_ends_what_was_waited_for() -> None:
    s = scheduler()
    key = submit(s, 1)
    arrive(s, 7)
    s.drain()
    s.abort(key)
    assert s.is_idle


# The gateway's list of nodes ----------------------------------------------------------------------------


def peer(name: str, epoch: int) -> Peer:
    return Peer(replace(DECODE, node_id=name), epoch, "frames", cast(Any, None))


def test_a_request_is_offered_to_each_usable_decode_node_once() -> None:
    router = Router()
    for epoch in (1, 2, 3):
        node = router.add(peer(f"decode-{epoch}", epoch), 0.0)
        node.status = Status(last_seq_seen=0, open_ids=(), usable=epoch != 3, draining=epoch == 3)
    tried: set[int] = set()
    while (chosen := router.choose(tried)) is not None:
        assert chosen.peer.epoch not in tried
        tried.add(chosen.peer.epoch)
    assert tried == {1, 2}


@pytest.mark.parametrize(("draining", "missing"), [(False, ("decode-1",)), (True, ())])
def test_who_said_that_it_would_leave_is_not_missed(draining: bool, missing: tuple[str, ...]) -> None:
    router = Router()
    gone = peer("decode-1", 1)
    router.add(gone, 0.0).status = Status(last_seq_seen=0, open_ids=(), draining=draining)
    router.remove(gone, 1.0)
    assert router.gone(2.0) == missing


# Between prefill and decode node ------------------------------------------------------------------------


@pytest.fixture
def world(context: Context, address: str) -> Iterator[World]:
    with closing(World(context, address)) as world:
        yield world


def test_a_prefill_node_finishes_what_it_has_and_gets_nothing_new(world: World) -> None:
    transfer_id = world.grant([3, 4])
    key = world.arrived(transfer_id)
    world.p.start(key)
    world.p.drain()
    world.until(lambda: world.d.ready_nodes() == [])
    assert not world.p.is_drained
    world.p.chunk(key, 0, [1, 2], is_last=True)
    world.sample(key)
    world.until(lambda: world.is_done(transfer_id) and world.is_over(key))
    assert world.same_pages([1, 2], [3, 4])
    world.until(lambda: world.p.is_drained, step_s=0.1)


def test_a_prefill_that_was_on_its_way_fails_and_may_go_elsewhere(world: World) -> None:
    world.p.drain()
    assert world.d.ready_nodes() == [P_NAME], "it has not heard yet"
    transfer_id = world.grant([3, 4])
    world.until(lambda: world.is_released(transfer_id))
    (gave_out,) = [output for output in world.at_d if isinstance(output, TransferGaveOut)]
    assert (gave_out.transfer_id, gave_out.status, gave_out.retryable) == (transfer_id, 503, True)
    assert world.d.ready_nodes() == []


def test_the_last_word_is_waited_for(world: World) -> None:
    """A Commit that is still in P's socket would be lost with it."""
    transfer_id = world.hand_over([1], [3])
    world.p.drain()
    assert world.is_done(transfer_id)
    assert not world.p.is_drained, "D's Status does not say yet that it was read"
    world.until(lambda: world.p.is_drained, step_s=0.1)


def test_a_decode_node_that_comes_late_hears_that_it_drains(world: World) -> None:
    world.p.drain()
    world.until(lambda: world.d.ready_nodes() == [])
    info = PeerInfo(P_NAME, world.front, P_EPOCH)
    world.d.set_prefill_nodes((), world.now)
    world.d.set_prefill_nodes([info], world.now)

    def is_linked() -> bool:
        with suppress(LocalProtocolError):
            return world.d.hello(P_NAME).node_id == P_NAME
        return False

    world.until(lambda: is_linked() and world.d.ready_nodes() == [], step_s=0.1)
