"""What every data plane must do when a transfer is given up or its link breaks: the suite's second half.

The promise: once D has a page back, nothing that P does writes there any more. So each check gives the pages
to somebody else as soon as they are released, and looks at them again when both ends are quiet.
"""

from __future__ import annotations

from tests.wire.endpoint_world import P_NAME, World
from tests.wire.loop import until
from tests.wire.plane_conformance import Check, OpenWorld, PlaneUnderTest
from transfer.receiver_endpoint import TransferGaveOut
from transfer.sender_endpoint import TransferArrived, TransferEnded, TransferKey, TransferStopped

OTHERS = 7.0  # what the next owner of a page writes there
SPARE = [31]  # a page that no check grants


def settled(world: World) -> bool:
    """Neither side has anything open: D waits for no Quiesced, P holds no transfer."""
    arrived = {output.key for output in world.at_p if isinstance(output, TransferArrived)}
    return all(world.is_over(key) for key in arrived) and world.d.tokens_ahead(P_NAME) == 0


def give_to_others(world: World, transfer_id: int, d_pages: list[int]) -> None:
    """The pages are released, and stay as their next owner writes them."""
    world.until(lambda: world.is_released(transfer_id), step_s=0.1)
    with world.d_streams.forward():  # where all of D's own work on its pages is
        world.d_pool.data[:, d_pages] = OTHERS
    world.until(lambda: settled(world) and world.d.ready_nodes() == [P_NAME], step_s=0.1)
    world.hand_over([30], SPARE)
    assert world.same_pages([30], SPARE)  # and all copies are finished
    assert bool((world.d_pool.data[:, d_pages] == OTHERS).all())


def abort_and_reuse(plane: PlaneUnderTest, world: World, transfer_id: int, d_pages: list[int]) -> None:
    """D gives up, and the pages are its own: at once where it places the bytes, else when P has answered."""
    world.d.abort(transfer_id, world.now)
    world.poll_d()
    assert world.is_released(transfer_id) is not plane.one_sided  # P has said nothing yet
    give_to_others(world, transfer_id, d_pages)
    others = [output for output in world.at_d if isinstance(output, TransferGaveOut)]
    assert others == []  # who gave up needs no news of it


def stopped_and_ended(world: World, key: TransferKey) -> bool:
    """P was told to stop, and then that it is over."""
    return [o for o in world.at_p if o.key == key][1:] == [TransferStopped(key), TransferEnded(key)]


def abort_before_the_request_was_read(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    world = open_world()
    abort_and_reuse(plane, world, world.grant([1, 2]), [1, 2])


def abort_while_it_waits_at_p(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    world = open_world()
    key = world.arrived(world.grant([1, 2]))
    abort_and_reuse(plane, world, key.transfer_id, [1, 2])
    assert stopped_and_ended(world, key)


def abort_between_chunks(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    world = open_world()
    key = world.arrived(world.grant([1, 2, 3]))
    world.p.start(key)
    world.p.chunk(key, 0, [11], is_last=False)
    world.until(lambda: world.d.counters()["pages_received"] == 1)
    world.p.chunk(key, 1, [12], is_last=False)  # under way when D gives up
    abort_and_reuse(plane, world, key.transfer_id, [1, 2, 3])
    assert stopped_and_ended(world, key)


def abort_before_more_is_computed(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    """P goes on for a while, because it does not know yet."""
    world = open_world()
    key = world.arrived(world.grant([1, 2, 3]))
    world.p.start(key)
    world.d.abort(key.transfer_id, world.now)
    world.poll_d()
    for index, page in enumerate((11, 12, 13)):
        world.p.chunk(key, index, [page], is_last=index == 2)
    assert world.same_pages([11, 12, 13], [1, 2, 3]) is plane.one_sided  # this is why D has to wait
    world.poll_d()
    assert world.is_released(key.transfer_id) is not plane.one_sided
    give_to_others(world, key.transfer_id, [1, 2, 3])


def abort_between_the_last_chunk_and_commit(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    world = open_world()
    key = world.arrived(world.grant([1]))
    world.p.start(key)
    world.p.chunk(key, 0, [11], is_last=True)
    abort_and_reuse(plane, world, key.transfer_id, [1])
    world.sample(key)  # its step was in flight
    assert stopped_and_ended(world, key)


def abort_while_commit_is_under_way(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    world = open_world()
    key = world.arrived(world.grant([1]))
    world.p.start(key)
    world.p.chunk(key, 0, [11], is_last=True)
    world.sample(key)
    until(lambda: world.poll_p() or world.is_over(key), world.p.pollables)
    world.d.abort(key.transfer_id, world.now)
    give_to_others(world, key.transfer_id, [1])


def abort_of_what_is_over_changes_nothing(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    world = open_world()
    transfer_id = world.hand_over([7], [3])
    world.d.abort(transfer_id, world.now)
    world.d.abort(999, world.now)
    world.hand_over([8], [4])
    assert world.same_pages([7, 8], [3, 4])
    assert not world.is_released(transfer_id)
    assert world.p.counters()["transfers_aborted"] == 0


def what_p_rejects_is_not_to_be_tried_again(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    world = open_world()
    transfer_id = world.grant([1])
    world.p.reject(world.arrived(transfer_id), 400, "too long for the pool")
    give_to_others(world, transfer_id, [1])
    assert world.at_d[0] == TransferGaveOut(transfer_id, 400, "too long for the pool", retryable=False)


# The link breaks, both live --------------------------------------------------------------------------------


def a_broken_link_is_no_death(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    """P lives out of D's reach, and goes on; its pages are D's when it can be asked again."""
    world = open_world(tapped=True)
    key = world.arrived(world.grant([1, 2]))
    world.p.start(key)
    world.p.chunk(key, 0, [11], is_last=False)
    world.until(lambda: world.d.counters()["pages_received"] == 1)
    world.tap.cut()
    world.until(lambda: bool(world.poll_d()))
    gave_out = world.at_d[0]
    assert isinstance(gave_out, TransferGaveOut)
    assert (gave_out.transfer_id, gave_out.retryable) == (key.transfer_id, True)
    world.p.chunk(key, 1, [12], is_last=True)  # P has not noticed
    assert world.same_pages([12], [2]) is plane.one_sided
    until_s = world.now + 3600.0
    while world.now < until_s:  # no time that passes makes the pages D's
        world.now += 60.0
        world.poll_d()
    assert world.is_released(key.transfer_id) is not plane.one_sided
    world.tap.mend()
    give_to_others(world, key.transfer_id, [1, 2])


def a_p_that_is_dropped_and_listed_again_is_asked_again(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    world = open_world()
    transfer_id = world.grant([1, 2])
    world.arrived(transfer_id)
    world.d.set_prefill_nodes([], world.now)
    world.poll_d()
    assert world.is_released(transfer_id) is not plane.one_sided
    world.list_p()
    give_to_others(world, transfer_id, [1, 2])


ABORTS: tuple[Check, ...] = (
    abort_before_the_request_was_read,
    abort_while_it_waits_at_p,
    abort_between_chunks,
    abort_before_more_is_computed,
    abort_between_the_last_chunk_and_commit,
    abort_while_commit_is_under_way,
    abort_of_what_is_over_changes_nothing,
    what_p_rejects_is_not_to_be_tried_again,
    a_broken_link_is_no_death,
    a_p_that_is_dropped_and_listed_again_is_asked_again,
)
