"""What P may do wrong, said by hand to a real D: found, counted, survived, and nothing wrong is served."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from common.codec import MAX_FRAME_BYTES
from common.config import TransferConfig
from common.kv.checksum import page_checksums
from common.kv.pool import KVPool
from common.messages import (
    Abort,
    Choice,
    Chunk,
    Commit,
    Credit,
    Failed,
    Prefill,
    Quiesced,
    Rejected,
    Status,
    int32s,
)
from common.request import PrefillStamps
from tests.wire.endpoint_world import (
    P_NAME,
    SAMPLING,
    VERIFY,
    Context,
    RawPrefill,
    filled_pool,
)
from tests.wire.hellos import LAYOUT
from transfer.receiver_endpoint import TransferDone, TransferGaveOut, TransferReleased

CHOICE = Choice(42, None)
PAGE_BYTES = LAYOUT.page_bytes
MEBIBYTE = 1 << 20


class WrongPrefill(RawPrefill):
    """A P with pages 1 and 2 to hand over, against a D that granted its pages 5 and 6 for them."""

    def __init__(self, context: Context, address: str, config: TransferConfig = VERIFY) -> None:
        self.p_pool = filled_pool(LAYOUT, 8, seed=1)
        self.d_pool = filled_pool(LAYOUT, 8, seed=2)
        super().__init__(context, address, self.d_pool, config)
        self.sent_bytes = 0
        self.transfer_id = self.grant()

    def grant(self) -> int:
        """D wants two pages."""
        transfer_id = self.d.grant(P_NAME, int32s(range(8)), SAMPLING, [5, 6])
        self.until(
            lambda: any(isinstance(m, Prefill) and m.transfer_id == transfer_id for m in self.received)
        )
        return transfer_id

    def chunk(self, first_page: int, page_ids: list[int], transfer_id: int = 0) -> Chunk:
        """A chunk as it should be."""
        self.sent_bytes += len(page_ids) * PAGE_BYTES
        return Chunk(
            transfer_id or self.transfer_id,
            first_page,
            len(page_ids),
            self.sent_bytes,
            tuple(page_checksums(self.p_pool, page_ids, first_page)),
            (self.p_pool.gather(page_ids).numpy().tobytes(),),
        )

    def commit(self, transfer_id: int = 0) -> Commit:
        """The commit of both pages."""
        return Commit(transfer_id or self.transfer_id, 2, PrefillStamps(), (CHOICE,))

    def counted(self, name: str) -> int:
        """What D counted."""
        return self.d.counters()[name]

    def until_gave_out(self) -> TransferGaveOut:
        """D gives the transfer up, and tells P."""
        self.until(lambda: bool(self.at_d) and Abort(self.transfer_id) in self.received)
        output, released = self.at_d
        assert isinstance(output, TransferGaveOut)
        assert released == TransferReleased(self.transfer_id)
        assert (output.transfer_id, output.status, output.retryable) == (self.transfer_id, 503, True)
        return output

    def until_served_well(self) -> None:
        """The link is as good as ever: the next transfer of the same D and P is right."""
        self.at_d.clear()
        transfer_id = self.grant()
        self.send(self.chunk(0, [1, 2], transfer_id), self.commit(transfer_id))
        self.until(lambda: bool(self.at_d))
        assert isinstance(self.at_d[0], TransferDone)
        assert self.at_d[0].transfer_id == transfer_id
        assert bool((self.d_pool.data[:, [5, 6]] == self.p_pool.data[:, [1, 2]]).all())


@pytest.fixture
def wrong(context: Context, address: str) -> Iterator[WrongPrefill]:
    with closing(WrongPrefill(context, address)) as world:
        yield world


# Wrong pages reach D --------------------------------------------------------------------------------------


def flipped_bit(chunk: Chunk) -> Chunk:
    data = bytearray(chunk.frames[0])
    data[len(data) // 2] ^= 4
    return replace(chunk, frames=(bytes(data),))


def swapped_pages(chunk: Chunk) -> Chunk:
    """The bytes of each of the two pages, in every layer, in the other's place."""
    pages = memoryview(chunk.frames[0]).tobytes()
    size = LAYOUT.layer_page_bytes
    layers = [pages[at : at + 2 * size] for at in range(0, len(pages), 2 * size)]
    return replace(chunk, frames=(b"".join(layer[size:] + layer[:size] for layer in layers),))


def swapped_with_checksums(chunk: Chunk) -> Chunk:
    return replace(swapped_pages(chunk), checksums=chunk.checksums[::-1])


def of_another_place(chunk: Chunk) -> Chunk:
    pool = KVPool(LAYOUT, 2, filled_pool(LAYOUT, 1, 1).device)
    return replace(chunk, checksums=tuple(page_checksums(pool, [1, 2], 5)))


def without_checksums(chunk: Chunk) -> Chunk:
    return replace(chunk, checksums=())


WRONG_BYTES = [flipped_bit, swapped_pages, swapped_with_checksums, of_another_place, without_checksums]


@pytest.mark.parametrize("spoil", WRONG_BYTES)
def test_wrong_bytes_are_found_by_their_checksum(
    wrong: WrongPrefill, spoil: Callable[[Chunk], Chunk]
) -> None:
    wrong.send(spoil(wrong.chunk(0, [1, 2])), wrong.commit())
    assert "checksum" in wrong.until_gave_out().reason
    assert wrong.counted("chunks_broken") == 1
    wrong.send(Quiesced(wrong.transfer_id))
    wrong.until_served_well()


@pytest.mark.parametrize(
    "size", [0, PAGE_BYTES, 2 * PAGE_BYTES - 1, 2 * PAGE_BYTES + 1, 3 * PAGE_BYTES, MAX_FRAME_BYTES]
)
def test_a_chunk_of_the_wrong_size_is_dropped_and_missed(wrong: WrongPrefill, size: int) -> None:
    wrong.send(replace(wrong.chunk(0, [1, 2]), frames=(bytes(size),)), wrong.commit())
    assert "committed with 0 of 2 pages" in wrong.until_gave_out().reason
    assert wrong.counted("messages_rejected") == 1
    wrong.send(Quiesced(wrong.transfer_id))
    wrong.until_served_well()


@pytest.mark.parametrize("num_frames", [0, 2, 100])
def test_a_chunk_in_the_wrong_number_of_frames_is_dropped_and_missed(
    wrong: WrongPrefill, num_frames: int
) -> None:
    chunk = wrong.chunk(0, [1, 2])
    wrong.send(replace(chunk, frames=chunk.frames * num_frames), wrong.commit())
    wrong.until_gave_out()
    assert wrong.counted("messages_rejected") == 1


@pytest.mark.parametrize("num_pages", [3, 10**4, 2**31 - 1])
def test_more_pages_than_were_granted_are_refused(wrong: WrongPrefill, num_pages: int) -> None:
    frames = (bytes(3 * PAGE_BYTES),) if num_pages == 3 else ()
    wrong.send(replace(wrong.chunk(0, [1, 2]), num_pages=num_pages, frames=frames))
    assert "more than 2 pages" in wrong.until_gave_out().reason


def test_more_pages_than_a_message_holds_are_refused_though_granted(context: Context, address: str) -> None:
    pool = filled_pool(replace(LAYOUT, page_size=1, layers=1), 5000, seed=2)
    with closing(RawPrefill(context, address, pool)) as raw:
        transfer_id = raw.d.grant(P_NAME, int32s(range(5000)), SAMPLING, range(1, 5001))
        raw.send(Chunk(transfer_id, 0, 5000, 1, (), ()))
        raw.until(lambda: bool(raw.at_d))
        assert isinstance(raw.at_d[0], TransferGaveOut)
        assert "0 bytes for 5000 pages" in raw.at_d[0].reason


def test_bytes_beyond_the_credit_are_found(wrong: WrongPrefill) -> None:
    wrong.send(replace(wrong.chunk(0, [1, 2]), total_bytes=65 * MEBIBYTE))
    assert "beyond the credit" in wrong.until_gave_out().reason
    assert wrong.counted("chunks_broken") == 1
    wrong.total_bytes = 65 * MEBIBYTE
    wrong.until(lambda: wrong.counted("messages_misplaced") >= 2, step_s=0.3)  # in each Status, too


# Messages out of place reach D ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (lambda w: [w.chunk(1, [2])], "expected 0"),  # the first is missing
        (lambda w: [w.chunk(0, [1]), w.chunk(0, [1])], "expected 1"),  # twice
        (lambda w: [w.commit()], "0 of 2 pages"),  # early
        (lambda w: [w.chunk(0, [1]), w.commit()], "1 of 2 pages"),
        (lambda w: [Quiesced(w.transfer_id)], "QUIESCED while GRANTED"),  # nobody asked
    ],
)
def test_messages_out_of_place_end_the_transfer(
    wrong: WrongPrefill, messages: Callable[[WrongPrefill], list[Any]], reason: str
) -> None:
    wrong.send(*messages(wrong))
    assert reason in wrong.until_gave_out().reason
    wrong.send(Quiesced(wrong.transfer_id))
    wrong.until_served_well()


def test_what_comes_for_a_transfer_that_is_over_is_counted_and_dropped(wrong: WrongPrefill) -> None:
    wrong.send(wrong.chunk(0, [1, 2]), wrong.commit())
    wrong.until(lambda: bool(wrong.at_d))
    late = [
        wrong.chunk(0, [3, 4]),
        wrong.commit(),
        Quiesced(wrong.transfer_id),
        Rejected(wrong.transfer_id, 400, "no"),
        Failed(wrong.transfer_id, 503, "no"),
    ]
    wrong.send(*late)
    wrong.until(lambda: wrong.counted("messages_late") == len(late))
    assert len(wrong.at_d) == 1
    assert bool((wrong.d_pool.data[:, [5, 6]] == wrong.p_pool.data[:, [1, 2]]).all())
    wrong.until_served_well()


@pytest.mark.parametrize("why", ["unknown", "aborted", "out of order"])
def test_chunks_that_are_not_placed_give_their_credit_back(wrong: WrongPrefill, why: str) -> None:
    limit = 64 * MEBIBYTE
    wrong.until(lambda: Credit(limit) in wrong.received)
    if why == "aborted":
        wrong.d.abort(wrong.transfer_id, wrong.now)
    wrong.sent_bytes = limit // 2
    wrong.send(wrong.chunk(int(why == "out of order"), [1], 999 if why == "unknown" else 0))
    wrong.until(lambda: Credit(limit + wrong.sent_bytes) in wrong.received)  # at now = 0: by no Status


def test_credit_for_what_was_lost_comes_back_with_status(wrong: WrongPrefill) -> None:
    wrong.total_bytes = 40 * MEBIBYTE
    wrong.until(lambda: Credit(104 * MEBIBYTE) in wrong.received, step_s=0.3)
    wrong.until(
        lambda: any(m.total_bytes == 104 * MEBIBYTE for m in wrong.received if isinstance(m, Status)),
        step_s=0.3,
    )


def test_messages_of_the_other_direction_are_counted(wrong: WrongPrefill) -> None:
    wrong.send(Prefill(1, SAMPLING, int32s([1]), int32s([1])), Credit(5), Abort(wrong.transfer_id))
    wrong.until(lambda: wrong.counted("messages_misplaced") == 3)
    wrong.send(wrong.chunk(0, [1, 2]), wrong.commit())
    wrong.until(lambda: bool(wrong.at_d))
    assert isinstance(wrong.at_d[0], TransferDone)


def test_a_transfer_that_p_does_not_list_twice_is_over(wrong: WrongPrefill) -> None:
    wrong.open_ids = (wrong.transfer_id,)
    num_statuses = 5 + sum(isinstance(m, Status) for m in wrong.received)
    wrong.until(lambda: sum(isinstance(m, Status) for m in wrong.received) == num_statuses, step_s=0.3)
    assert wrong.at_d == []
    wrong.open_ids = ()
    wrong.until(lambda: bool(wrong.at_d), step_s=0.3)
    assert wrong.at_d == [
        TransferGaveOut(wrong.transfer_id, 503, f"{P_NAME} does not know the transfer", retryable=True),
        TransferReleased(wrong.transfer_id),
    ]


def test_an_abort_that_is_not_answered_is_said_again(wrong: WrongPrefill) -> None:
    wrong.d.abort(wrong.transfer_id, wrong.now)
    wrong.until(lambda: wrong.received.count(Abort(wrong.transfer_id)) == 3, step_s=0.3)
    assert wrong.d.tokens_ahead(P_NAME) == 8
    wrong.send(Quiesced(wrong.transfer_id))
    wrong.until(lambda: wrong.d.tokens_ahead(P_NAME) == 0)
    done_s = wrong.now + 3.0
    wrong.until(lambda: wrong.now > done_s, step_s=0.3)
    assert wrong.received.count(Abort(wrong.transfer_id)) == 3
    assert wrong.at_d == [TransferReleased(wrong.transfer_id)]


def test_garbage_from_p_is_counted_and_survived(wrong: WrongPrefill) -> None:
    for frames in ([b""], [pickle.dumps(wrong.commit())], [b"\xc1", os.urandom(3000)]):
        wrong.send_raw(frames)
    wrong.until(lambda: wrong.counted("messages_rejected") == 3)
    wrong.send(wrong.chunk(0, [1, 2]), wrong.commit())
    wrong.until(lambda: bool(wrong.at_d))
    assert isinstance(wrong.at_d[0], TransferDone)
