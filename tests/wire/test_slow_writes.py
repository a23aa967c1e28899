"""Writes into D's pages that are under way for long: over a link that breaks, when D dies, when P closes.

The promise of a one-sided plane: once P has said `Quiesced`, nothing of the transfer is written any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from common.messages import Quiesced
from tests.wire.endpoint_world import P_NAME, Context, World
from tests.wire.loop import until
from tests.wire.plane_aborts import OTHERS
from tests.wire.plane_child import plane_child
from tests.wire.slow_streams import HeldStream
from tests.wire.test_plane_deaths import LonePrefill, mapped_pools
from transfer.planes.shm import SHM
from transfer.sender_endpoint import TransferArrived, TransferEnded, TransferKey, TransferStopped

ABORTS_S = 5.0  # in which D asks again and again


@pytest.fixture
def stream() -> Iterator[HeldStream]:
    """P's; nothing waits for it when the test is over, however it ends."""
    stream = HeldStream()
    yield stream
    stream.let_go()


def launched(world: World, p_pages: list[int], d_pages: list[int]) -> TransferKey:
    """A transfer whose pages are all under way; its first token is there."""
    key = world.arrived(world.grant(d_pages))
    world.p.start(key)
    world.p.chunk(key, 0, p_pages, is_last=True)
    world.sample(key)
    return key


def test_an_abort_is_answered_when_the_writes_are_over(
    context: Context, address: str, stream: HeldStream
) -> None:
    with closing(World(context, address, plane=SHM, stream=stream)) as world:
        key = launched(world, [11, 12], [1, 2])
        other = launched(world, [13], [3])
        world.d.abort(key.transfer_id, world.now)
        until_s = world.now + ABORTS_S
        world.until(lambda: world.now > until_s, step_s=0.1)
        assert TransferStopped(key) in world.at_p
        assert not world.is_over(key)
        assert not world.is_released(key.transfer_id)
        stream.let_go()
        world.until(lambda: world.is_released(key.transfer_id) and world.is_done(other.transfer_id))
        assert world.is_over(key)
        assert world.same_pages([13], [3])


def test_a_transfer_of_a_broken_link_is_quiet_only_when_its_writes_are_over(
    context: Context, address: str, stream: HeldStream
) -> None:
    with closing(World(context, address, plane=SHM, stream=stream, tapped=True)) as world:
        answers: list[int] = []

        def note(message: object) -> tuple[object, ...]:
            if isinstance(message, Quiesced):
                answers.append(message.transfer_id)
            return (message,)

        key = launched(world, [11, 12], [1, 2])
        world.tap.cut()
        world.until(lambda: bool(world.poll_d()))  # D has given it up
        world.tap.mend()
        world.tap.to_d = note
        world.until(lambda: world.d.ready_nodes() == [P_NAME], step_s=0.1)
        # The same process is linked again, asks, and hears nothing; P serves it.
        other = launched(world, [13], [3])
        until_s = world.now + ABORTS_S
        world.until(lambda: world.now > until_s, step_s=0.1)
        assert [o for o in world.at_p if o.key == key][1:] == [TransferStopped(key)]
        assert answers == []
        assert not world.is_released(key.transfer_id)
        stream.let_go()
        world.until(lambda: world.is_released(key.transfer_id), step_s=0.1)
        assert world.same_pages([11, 12], [1, 2])  # late, and into pages that nobody else had
        assert answers[0] == key.transfer_id
        assert world.is_over(key)
        world.d_pool.data[:, [1, 2]] = OTHERS
        world.until(lambda: world.is_done(other.transfer_id))
        assert world.same_pages([13], [3])
        assert bool((world.d_pool.data[:, [1, 2]] == OTHERS).all())


def test_the_memory_of_a_dead_d_is_let_go_when_the_writes_are_over(
    context: Context, address: str, stream: HeldStream
) -> None:
    before = mapped_pools()
    with closing(LonePrefill(context, address, SHM, stream)) as lone:
        with plane_child("decode", lone.p.address, SHM) as dead:
            key = lone.until_seen(TransferArrived, 1)
            lone.p.start(key)
            lone.p.chunk(key, 0, [3], is_last=False)
            dead.kill()
            assert lone.until_seen(TransferStopped, 1) == key
        assert not any(isinstance(output, TransferEnded) for output in lone.seen)
        assert mapped_pools() == before + 1
        stream.let_go()
        assert lone.until_seen(TransferEnded, 1) == key
        until(lambda: mapped_pools() == before, list)


def test_p_closes_while_writes_are_under_way(context: Context, address: str, stream: HeldStream) -> None:
    before = mapped_pools()
    world = World(context, address, plane=SHM, stream=stream)
    launched(world, [11, 12], [1, 2])
    world.close()
    assert mapped_pools() == before + 2  # D's own, and P's mapping of it
    stream.let_go()
    until(lambda: mapped_pools() == before + 1, list)
