"""Aborts at any moment of a hand-over: pages are free at once on D, soon on P, and never written again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from common.kv.layout import KVLayout
from tests.wire.endpoint_world import (
    P_NAME,
    VERIFY,
    Context,
    World,
)
from transfer.receiver_endpoint import TransferGaveOut
from transfer.sender_endpoint import (
    TransferArrived,
    TransferEnded,
    TransferStopped,
)

LARGE = KVLayout(layers=2, page_size=16, kv_heads=2, head_dim=64, dtype="float32")  # 32 KiB a page


@pytest.fixture
def world(context: Context, address: str) -> Iterator[World]:
    with closing(World(context, address)) as world:
        yield world


def settled(world: World) -> bool:
    """Neither side has anything open: D waits for no Quiesced, P holds no transfer."""
    arrived = {output.key for output in world.at_p if isinstance(output, TransferArrived)}
    return all(world.is_over(key) for key in arrived) and world.d.tokens_ahead(P_NAME) == 0


def abort_and_reuse(world: World, transfer_id: int, d_pages: list[int]) -> None:
    """D gives up and has its pages back at once; whatever arrives later must not touch them."""
    world.d.abort(transfer_id, world.now)
    world.d_pool.data[:, d_pages] = 7.0
    world.until(lambda: settled(world))
    assert bool((world.d_pool.data[:, d_pages] == 7.0).all())
    assert not any(output.transfer_id == transfer_id for output in world.at_d)


def test_abort_before_the_request_was_read(world: World) -> None:
    transfer_id = world.grant([1, 2])
    abort_and_reuse(world, transfer_id, [1, 2])
    world.hand_over([5], [1])


def test_abort_while_it_waits_at_p(world: World) -> None:
    transfer_id = world.grant([1, 2])
    key = world.arrived(transfer_id)
    abort_and_reuse(world, transfer_id, [1, 2])
    assert world.at_p[1:] == [TransferStopped(key), TransferEnded(key)]


def test_abort_between_chunks(world: World) -> None:
    transfer_id = world.grant([1, 2, 3])
    key = world.arrived(transfer_id)
    world.p.start(key)
    world.p.chunk(key, 0, [11], is_last=False)
    world.until(lambda: world.d.counters()["pages_received"] == 1)
    world.p.chunk(key, 1, [12], is_last=False)  # under way when D gives up
    abort_and_reuse(world, transfer_id, [1, 2, 3])
    assert world.at_p[1:] == [TransferStopped(key), TransferEnded(key)]


def test_abort_between_the_last_chunk_and_commit(world: World) -> None:
    transfer_id = world.grant([1])
    key = world.arrived(transfer_id)
    world.p.start(key)
    world.p.chunk(key, 0, [11], is_last=True)
    abort_and_reuse(world, transfer_id, [1])
    world.sample(key)  # its step was in flight
    assert world.at_p[1:] == [TransferStopped(key), TransferEnded(key)]


def test_abort_while_commit_is_under_way(world: World) -> None:
    transfer_id = world.grant([1])
    key = world.arrived(transfer_id)
    world.p.start(key)
    world.p.chunk(key, 0, [11], is_last=True)
    world.sample(key)
    world.poll_p()
    assert world.is_over(key)
    abort_and_reuse(world, transfer_id, [1])


def test_abort_while_pages_wait_for_credit(context: Context, address: str) -> None:
    config = replace(VERIFY, transfer_window=1)
    with closing(World(context, address, layout=LARGE, num_pages=1000, config=config)) as world:
        pages = list(range(1, 1001))
        key = world.arrived(world.grant(pages))
        world.p.start(key)
        world.p.chunk(key, 0, pages, is_last=True)
        abort_and_reuse(world, key.transfer_id, pages)
        sent = world.p.counters()["pages_sent"]
        assert sent < 1000
        world.hand_over(pages[::-1], pages)  # all credit came back
        assert world.same_pages(pages[::-1], pages)
        assert world.p.counters()["pages_sent"] == sent + 1000  # and none of the aborted ones went after all


def test_abort_of_what_is_over_changes_nothing(world: World) -> None:
    transfer_id = world.hand_over([7], [3])
    world.d.abort(transfer_id, world.now)
    world.d.abort(999, world.now)
    world.hand_over([8], [4])
    assert world.same_pages([7], [3])
    assert world.p.counters()["transfers_aborted"] == 0


def test_a_key_that_is_over_may_still_be_named_at_p(world: World) -> None:
    key = world.arrived(world.hand_over([7], [3]))
    world.p.start(key)
    world.p.chunk(key, 0, [9], is_last=True)
    world.sample(key)
    world.p.reject(key, 400, "no")
    assert world.p.take_outputs() == []


def test_what_p_rejects_is_not_to_be_tried_again(world: World) -> None:
    transfer_id = world.grant([1])
    world.p.reject(world.arrived(transfer_id), 400, "too long for the pool")
    world.until(lambda: bool(world.at_d))
    assert world.at_d == [TransferGaveOut(transfer_id, 400, "too long for the pool", retryable=False)]
    assert settled(world)
