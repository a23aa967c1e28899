"""The two real endpoints on the plane frames: credits, the right P, death. test_planes.py has the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from common.codec import MAX_FRAME_BYTES
from common.config import TransferConfig
from common.errors import LocalProtocolError
from common.kv.layout import KVLayout
from common.messages import PeerInfo, Role
from tests.wire.child_node import child_node
from tests.wire.endpoint_world import (
    D_EPOCH,
    P_EPOCH,
    P_NAME,
    Context,
    World,
    filled_pool,
    prefill_endpoint,
)
from tests.wire.hellos import LAYOUT, hello, here
from tests.wire.loop import until
from transfer.receiver_endpoint import TransferGaveOut, TransferReleased
from transfer.sender_endpoint import (
    SenderOutput,
    TransferArrived,
    TransferEnded,
    TransferKey,
    TransferStopped,
)

LARGE = KVLayout(layers=2, page_size=16, kv_heads=2, head_dim=64, dtype="float32")  # 32 KiB a page
HUGE = KVLayout(
    layers=34, page_size=16, kv_heads=8, head_dim=128, dtype="float32"
)  # more than a frame a page


@pytest.fixture
def world(context: Context, address: str) -> Iterator[World]:
    with closing(World(context, address)) as world:
        yield world


# Credit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [True, False])
def test_a_thousand_pages_flow_through_a_window_that_is_smaller(
    context: Context, address: str, verify: bool
) -> None:
    config = TransferConfig(verify_pages=verify, transfer_window=1)
    with closing(World(context, address, layout=LARGE, num_pages=1000, config=config)) as world:
        p_pages, d_pages = list(range(1000, 0, -1)), list(range(1, 1001))
        transfer_id = world.grant(d_pages)
        key = world.arrived(transfer_id)
        world.p.start(key)
        world.p.chunk(key, 0, p_pages, is_last=True)
        world.sample(key)
        for _ in range(10):
            world.poll_p()
        assert 0 < world.p.counters()["pages_sent"] < 1000  # the rest waits for credit
        assert not world.is_over(key)
        world.until(lambda: world.is_done(transfer_id))
        assert world.same_pages(p_pages, d_pages)
        assert world.p.counters()["pages_sent"] == 1000 == world.d.counters()["pages_received"]


def test_a_page_larger_than_a_frame_travels_in_several(context: Context, address: str) -> None:
    assert HUGE.page_bytes > MAX_FRAME_BYTES
    with closing(World(context, address, layout=HUGE, num_pages=3)) as world:
        world.hand_over([3, 1], [2, 3])
        assert world.same_pages([3, 1], [2, 3])


def test_pages_of_an_aborted_transfer_do_not_wait_for_credit(context: Context, address: str) -> None:
    config = TransferConfig(verify_pages=True, transfer_window=1)
    with closing(World(context, address, layout=LARGE, num_pages=1000, config=config)) as world:
        pages = list(range(1, 1001))
        key = world.arrived(world.grant(pages))
        world.p.start(key)
        world.p.chunk(key, 0, pages, is_last=True)
        world.d.abort(key.transfer_id, world.now)
        world.until(lambda: world.is_over(key))
        sent = world.p.counters()["pages_sent"]
        assert sent < 1000
        world.hand_over(pages[::-1], pages)  # all credit came back
        assert world.same_pages(pages[::-1], pages)
        assert world.p.counters()["pages_sent"] == sent + 1000  # and none of the aborted ones went after all


def test_a_key_that_is_over_may_still_be_named_at_p(world: World) -> None:
    key = world.arrived(world.hand_over([7], [3]))
    world.p.start(key)
    world.p.chunk(key, 0, [9], is_last=True)
    world.sample(key)
    world.p.reject(key, 400, "no")
    assert world.p.take_outputs() == []


# Which P it is --------------------------------------------------------------------------------------------


def test_an_address_that_cannot_be_used_costs_that_p_alone(world: World) -> None:
    usable = PeerInfo(P_NAME, world.p.address, P_EPOCH)
    world.d.set_prefill_nodes([PeerInfo("prefill-1", "ipc:///" + "x" * 200, 5), usable], world.now)
    assert world.d.counters()["peers_unusable"] == 1
    world.hand_over([7], [3])


def test_a_p_that_is_not_the_one_that_was_listed_is_refused(world: World) -> None:
    world.d.set_prefill_nodes([PeerInfo("prefill-9", world.p.address, P_EPOCH)], world.now)
    world.until(lambda: world.d.counters()["links_refused"] == 1)
    assert world.d.ready_nodes() == []


# Death ----------------------------------------------------------------------------------------------------


def test_when_p_is_gone_its_transfers_may_go_to_another(world: World) -> None:
    transfers = [world.grant([page]) for page in (1, 2)]
    world.arrived(transfers[1])
    world.p.close()
    until(lambda: bool(world.poll_d()), world.d.pollables)
    for output, transfer_id in zip(world.at_d[::2], transfers, strict=True):
        assert isinstance(output, TransferGaveOut)
        assert (output.transfer_id, output.status, output.retryable) == (transfer_id, 503, True)
        assert P_NAME in output.reason
    assert world.at_d[1::2] == [TransferReleased(transfer_id) for transfer_id in transfers]
    assert world.d.ready_nodes() == []
    with pytest.raises(LocalProtocolError, match="prefill-0 is not up"):
        world.d.hello(P_NAME)


def test_a_p_that_came_back_is_used_again(world: World, context: Context) -> None:
    world.hand_over([7], [3])
    address = world.p.address
    world.p.close()
    world.at_d.clear()
    until(lambda: world.poll_d() == [] == world.d.ready_nodes(), world.d.pollables)
    world.p = prefill_endpoint(context, address, world.p_pool)
    world.d.set_prefill_nodes([PeerInfo(P_NAME, address, P_EPOCH + 1)], world.now)
    world.until(lambda: world.d.ready_nodes() == [P_NAME])
    world.hand_over([8], [4])
    assert world.same_pages([8], [4])


def test_a_p_that_is_no_longer_listed_is_dropped(world: World) -> None:
    transfer_id = world.grant([1])
    world.arrived(transfer_id)
    world.d.set_prefill_nodes([], world.now)
    output, released = world.d.poll(world.now)
    assert isinstance(output, TransferGaveOut)
    assert output.retryable
    assert released == TransferReleased(transfer_id)
    key = TransferKey(D_EPOCH, transfer_id)
    world.until(lambda: world.is_over(key), step_s=1.0)  # P learns it when it cannot send a Status


def test_a_killed_decode_node_ends_its_transfers_at_p(context: Context, address: str) -> None:
    pool = filled_pool(LAYOUT, 4, seed=1)
    outputs: list[SenderOutput] = []
    p = prefill_endpoint(context, address, pool, TransferConfig(), here(hello(Role.PREFILL)))
    with closing(p):

        def happened(kind: type[SenderOutput]) -> bool:
            outputs.extend(p.poll(0.0))  # at 0: known from the pidfd, not from a Status that failed
            return any(isinstance(output, kind) for output in outputs)

        with child_node(p.address) as child:
            until(lambda: happened(TransferArrived), p.pollables)
            child.kill()
            until(lambda: happened(TransferEnded), p.pollables)
        assert [type(output) for output in outputs] == [TransferArrived, TransferStopped, TransferEnded]
