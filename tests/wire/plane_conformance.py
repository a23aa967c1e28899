"""What every data plane must do, between two real endpoints: one check for each promise, run on each plane.

A check opens its own world. It knows of the plane only whether P writes into D's pages by itself, which says
when D may have the pages of an aborted transfer back, never whether.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from common.kv.layout import KVLayout
from common.messages import Abort, Chunk, Commit, Prefill, Quiesced
from tests.wire.endpoint_world import P_NAME, SAMPLING, STAMPS, World
from tests.wire.hellos import LAYOUT
from tests.wire.tap import Hook, unchanged
from transfer.receiver_endpoint import TransferDone, TransferGaveOut

LARGE = KVLayout(layers=2, page_size=16, kv_heads=2, head_dim=64, dtype="float32")  # 32 KiB a page
SMALL = KVLayout(layers=1, page_size=1, kv_heads=1, head_dim=4, dtype="float32")  # 32 bytes
Bytes = np.ndarray[Any, np.dtype[np.uint8]]  # of pages: [layers, num_pages, bytes]


class OpenWorld(Protocol):
    """Makes a world of the plane that is checked, and closes it in the end."""

    def __call__(self, *, layout: KVLayout = LAYOUT, num_pages: int = 32, tapped: bool = False) -> World:
        """Open one."""


@dataclass(frozen=True)
class PlaneUnderTest:
    """A plane, who writes D's pages, and whether P's copies end when they are launched (as on a CPU)."""

    name: str
    one_sided: bool
    lagging: bool = False


Check = Callable[[PlaneUnderTest, OpenWorld], None]


# Whole hand-overs ------------------------------------------------------------------------------------------


def one_page_and_the_first_token_are_handed_over(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    world = open_world()
    transfer_id = world.hand_over([7], [3])
    assert world.same_pages([7], [3])
    (done,) = world.at_d
    assert isinstance(done, TransferDone)
    assert done.transfer_id == transfer_id
    assert [choice.first_token for choice in done.commit.choices] == [42]
    stamps = done.commit.stamps
    assert (done.commit.num_pages, stamps.start_s, stamps.chunks_s) == (1, STAMPS.start_s, STAMPS.chunks_s)
    assert stamps.committed_s is not None


def pages_arrive_in_their_places_and_touch_no_others(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    world = open_world()
    before = world.d_pool.data.clone()
    p_pages, d_pages = [9, 2, 30, 4], [5, 17, 1, 8]
    world.hand_over(p_pages, d_pages)
    assert world.same_pages(p_pages, d_pages)
    others = [page for page in range(33) if page not in d_pages]
    assert bool((world.d_pool.data[:, others] == before[:, others]).all())


def chunks_go_while_the_rest_is_computed(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    world = open_world()
    transfer_id = world.grant([1, 2, 3, 4], num_tokens=14)  # the last page is half full
    key = world.arrived(transfer_id)
    assert world.d.tokens_ahead(P_NAME) == 14
    world.p.start(key)
    for first_page, p_pages in ((0, [11, 12]), (2, [13]), (3, [])):
        world.p.chunk(key, first_page, p_pages, is_last=False)
    world.until(lambda: world.d.counters()["pages_received"] == 3)
    assert world.same_pages([11, 12, 13], [1, 2, 3])
    assert world.d.tokens_ahead(P_NAME) == 2
    world.p.chunk(key, 3, [14], is_last=True)
    world.sample(key)
    world.until(lambda: world.is_done(transfer_id))
    assert world.same_pages([11, 12, 13, 14], [1, 2, 3, 4])
    assert world.d.tokens_ahead(P_NAME) == 0


def transfers_that_run_at_once_do_not_mix(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    world = open_world()
    d_pages = {world.grant(pages): pages for pages in ([1, 2], [3, 4], [5, 6])}
    p_pages = {transfer_id: [10 * transfer_id, 10 * transfer_id + 1] for transfer_id in d_pages}
    keys = {transfer_id: world.arrived(transfer_id) for transfer_id in d_pages}
    for part in (0, 1):
        for transfer_id in reversed(d_pages):
            if part == 0:
                world.p.start(keys[transfer_id])
            world.p.chunk(keys[transfer_id], part, [p_pages[transfer_id][part]], is_last=part == 1)
    for transfer_id in d_pages:
        world.sample(keys[transfer_id], token=transfer_id)
    world.until(lambda: all(world.is_done(transfer_id) for transfer_id in d_pages))
    for output in world.at_d:
        assert isinstance(output, TransferDone)
        assert output.commit.choices[0].first_token == output.transfer_id
        assert world.same_pages(p_pages[output.transfer_id], d_pages[output.transfer_id])


def a_thousand_pages_go_in_order(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    world = open_world(layout=LARGE, num_pages=1000, tapped=True)
    seen: list[int] = []

    def note(message: Any) -> Sequence[Any]:
        if isinstance(message, Chunk):
            seen.extend(range(message.first_page, message.first_page + message.num_pages))
        return (message,)

    world.tap.to_d = note
    p_pages, d_pages = list(range(1000, 0, -1)), list(range(1, 1001))
    world.hand_over(p_pages, d_pages)
    assert seen == list(range(1000))
    assert world.same_pages(p_pages, d_pages)
    assert world.p.counters()["pages_sent"] == 1000 == world.d.counters()["pages_received"]


def more_pages_than_a_message_describes(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    world = open_world(layout=SMALL, num_pages=5000)
    world.hand_over(range(1, 5001), range(5000, 0, -1))
    assert world.same_pages(range(1, 5001), range(5000, 0, -1))


# Lost and doubled messages ---------------------------------------------------------------------------------


def losing(doomed: Callable[[Any], bool]) -> Hook:
    """Lose the first message that fits."""
    lost: list[Any] = []

    def hook(message: Any) -> Sequence[Any]:
        if not lost and doomed(message):
            lost.append(message)
            return ()
        return (message,)

    return hook


def first_page_is(page: int) -> Callable[[Any], bool]:
    return lambda message: isinstance(message, Chunk) and message.first_page == page


def is_a(kind: type) -> Callable[[Any], bool]:
    return lambda message: isinstance(message, kind)


def lose_one(world: World, doomed: Callable[[Any], bool]) -> None:
    """The transfer may be tried again, its pages come back, and the next one is right."""
    world.tap.to_d = world.tap.to_p = losing(doomed)
    transfer_id = world.grant([1, 2, 3])
    if not doomed(Prefill(transfer_id, SAMPLING)):
        key = world.arrived(transfer_id)
        world.p.start(key)
        for index, page in enumerate((11, 12, 13)):
            world.p.chunk(key, index, [page], is_last=index == 2)
        world.sample(key)
    world.until(lambda: world.is_released(transfer_id), step_s=0.1)
    gave_out = world.at_d[0]
    assert isinstance(gave_out, TransferGaveOut)
    assert (gave_out.transfer_id, gave_out.retryable) == (transfer_id, True)
    world.hand_over([21, 22, 23], [1, 2, 3])
    assert world.same_pages([21, 22, 23], [1, 2, 3])


def what_is_lost_is_found(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    for doomed in (first_page_is(0), first_page_is(1), first_page_is(2), is_a(Commit), is_a(Prefill)):
        lose_one(open_world(tapped=True), doomed)


def lose_a_word(world: World, kind: type) -> None:
    """The pages come back all the same."""
    world.tap.to_d = world.tap.to_p = losing(is_a(kind))
    transfer_id = world.grant([1])
    key = world.arrived(transfer_id)
    world.d.abort(transfer_id, world.now)
    world.until(lambda: world.is_released(transfer_id) and world.is_over(key), step_s=0.1)
    world.until(lambda: world.d.tokens_ahead(P_NAME) == 0, step_s=0.1)
    assert world.is_released(transfer_id)


def a_lost_abort_or_answer_is_said_again(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    for kind in (Abort, Quiesced):
        lose_a_word(open_world(tapped=True), kind)


def what_comes_twice_counts_once(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    world = open_world(tapped=True)
    world.tap.to_d = world.tap.to_p = lambda message: (message, message)
    world.hand_over([11, 12], [1, 2])
    transfer_id = world.grant([3])
    world.arrived(transfer_id)
    world.d.abort(transfer_id, world.now)
    world.until(lambda: world.is_released(transfer_id))
    world.hand_over([13], [3])
    assert world.same_pages([11, 12, 13], [1, 2, 3])
    assert sum(isinstance(output, TransferDone) for output in world.at_d) == 2
    assert world.d.counters()["messages_duplicate"] > 0 < world.p.counters()["messages_duplicate"]


# Wrong bytes -----------------------------------------------------------------------------------------------


def flip_a_word(pages: Bytes) -> None:
    """Change one bit of the last word of the second page."""
    pages[-1, 1, -1] ^= 4


def swap_two_pages(pages: Bytes) -> None:
    """Each of the two pages in the other's place."""
    pages[:, [0, 1]] = pages[:, [1, 0]]


def spoil(world: World, chunk: Chunk, d_pages: Sequence[int], change: Callable[[Bytes], None]) -> Chunk:
    """Change a chunk's bytes where they are when its message is under way: in its frames, or at D already."""
    layout = world.d_pool.layout
    shape = (layout.layers, chunk.num_pages, layout.layer_page_bytes)
    if chunk.frames:
        data = np.frombuffer(b"".join(chunk.frames), np.uint8).reshape(shape).copy()
        change(data)
        return replace(chunk, frames=(data.tobytes(),))
    data = world.d_pool.gather(d_pages).cpu().numpy().reshape(shape)
    change(data)
    world.d_pool.scatter(d_pages, torch.from_numpy(data).view(-1).to(world.d_pool.device))
    world.finish_copies()
    return chunk


def spoil_one(world: World, change: Callable[[Bytes], None]) -> None:
    """The transfer fails and may be tried again; the next one is right."""

    def hook(message: Any) -> Sequence[Any]:
        return (spoil(world, message, [5, 6], change) if isinstance(message, Chunk) else message,)

    world.tap.to_d = hook
    transfer_id = world.grant([5, 6])
    key = world.arrived(transfer_id)
    world.p.start(key)
    world.p.chunk(key, 0, [1, 2], is_last=True)
    world.sample(key)
    world.until(lambda: world.is_released(transfer_id))
    (gave_out, _) = world.at_d
    assert isinstance(gave_out, TransferGaveOut)
    assert gave_out.retryable
    assert "checksum" in gave_out.reason
    world.tap.to_d = unchanged
    world.hand_over([1, 2], [5, 6])
    assert world.same_pages([1, 2], [5, 6])


def wrong_bytes_are_found_by_their_checksum(plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    for change in (flip_a_word, swap_two_pages):
        spoil_one(open_world(tapped=True), change)


HAND_OVERS: tuple[Check, ...] = (
    one_page_and_the_first_token_are_handed_over,
    pages_arrive_in_their_places_and_touch_no_others,
    chunks_go_while_the_rest_is_computed,
    transfers_that_run_at_once_do_not_mix,
    a_thousand_pages_go_in_order,
    more_pages_than_a_message_describes,
    what_is_lost_is_found,
    a_lost_abort_or_answer_is_said_again,
    what_comes_twice_counts_once,
    wrong_bytes_are_found_by_their_checksum,
)
