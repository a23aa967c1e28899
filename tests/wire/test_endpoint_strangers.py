"""What D and strangers may do wrong, said by hand to a real P: answered, counted, survived."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from common.codec import MAX_FRAME_BYTES, Envelope
from common.messages import (
    CODEC,
    Abort,
    Choice,
    Chunk,
    Commit,
    Credit,
    Failed,
    Prefill,
    Quiesced,
    Role,
    int32s,
)
from common.request import PrefillStamps
from common.sockets import FrameSocket
from tests.wire.endpoint_world import (
    D_EPOCH,
    P_EPOCH,
    SAMPLING,
    Context,
    RawDecode,
    World,
    filled_pool,
    prefill_endpoint,
)
from tests.wire.hellos import LAYOUT, hello
from transfer.sender import FirstToken
from transfer.sender_endpoint import TransferArrived, TransferEnded, TransferKey, TransferStopped

CHOICE = Choice(42, None)
PAGE_BYTES = LAYOUT.page_bytes
MEBIBYTE = 1 << 20


@pytest.fixture
def raw(context: Context, address: str) -> Iterator[RawDecode]:
    p = prefill_endpoint(context, address, filled_pool(LAYOUT, 8, seed=1))
    with closing(RawDecode(context, p)) as world:
        yield world


def prefill(transfer_id: int) -> Prefill:
    return Prefill(transfer_id, SAMPLING, int32s([5, 6]), int32s([1]))


def key(transfer_id: int) -> TransferKey:
    return TransferKey(D_EPOCH, transfer_id)


def test_p_answers_an_abort_of_what_it_never_heard_of(raw: RawDecode) -> None:
    raw.send(Abort(77))
    raw.until(lambda: Quiesced(77) in raw.received)


def test_an_abort_before_its_request_is_remembered(raw: RawDecode) -> None:
    raw.send(Abort(7), prefill(7), prefill(8))
    raw.until(lambda: bool(raw.at_p))
    assert raw.at_p == [TransferArrived(key(8), prefill(8))]
    assert raw.p.counters()["aborts_before_request"] == 1


def test_who_was_told_that_nothing_is_written_is_told_for_good(raw: RawDecode) -> None:
    """The request may come after its Abort was answered over another connection."""
    raw.send(Abort(7))
    raw.until(lambda: Quiesced(7) in raw.received)
    raw.connector.close()
    raw.connect()
    raw.send(prefill(7), prefill(8))
    raw.until(lambda: bool(raw.at_p))
    assert raw.at_p == [TransferArrived(key(8), prefill(8))]
    assert raw.p.counters()["aborts_before_request"] == 1


def test_a_request_that_comes_twice_is_one(raw: RawDecode) -> None:
    raw.send(prefill(7), prefill(7), prefill(8))
    raw.until(lambda: len(raw.at_p) == 2)
    assert raw.at_p == [TransferArrived(key(7), prefill(7)), TransferArrived(key(8), prefill(8))]
    assert raw.p.counters()["messages_duplicate"] == 1


def test_messages_of_the_other_direction_are_counted_at_p(raw: RawDecode) -> None:
    raw.send(
        Commit(7, 1, PrefillStamps(), (CHOICE,)), Quiesced(7), Chunk(7, 0, 1, 1, (), (b"x",)), prefill(8)
    )
    raw.until(lambda: bool(raw.at_p))
    assert raw.p.counters()["messages_misplaced"] == 3


def test_a_transfer_that_d_does_not_list_twice_is_dropped(raw: RawDecode) -> None:
    raw.open_ids = (7, 8)
    raw.send(prefill(7), prefill(8))
    raw.until(lambda: len(raw.at_p) == 2)
    raw.p.start(key(8))
    raw.open_ids = (8,)
    raw.until(lambda: len(raw.at_p) == 4, step_s=0.3)
    assert raw.at_p[2:] == [TransferStopped(key(7)), TransferEnded(key(7))]
    raw.open_ids = ()
    raw.until(lambda: len(raw.at_p) == 6, step_s=0.3)
    assert raw.at_p[4:] == [TransferStopped(key(8)), TransferEnded(key(8))]
    assert not any(isinstance(m, Quiesced | Failed | Commit) for m in raw.received)


def test_limits_in_status_stand_in_for_a_lost_credit(context: Context, address: str) -> None:
    p = prefill_endpoint(context, address, filled_pool(LAYOUT, 8, seed=1))
    with closing(RawDecode(context, p)) as raw:
        raw.open_ids = (7,)
        raw.send(prefill(7))
        raw.until(lambda: bool(raw.at_p))
        raw.p.start(key(7))
        raw.p.chunk(key(7), 0, [3], is_last=True)
        raw.p.first_token(key(7), FirstToken((CHOICE,), PrefillStamps()))
        assert raw.p.take_outputs() == []  # no credit yet
        raw.credit_bytes = PAGE_BYTES
        raw.until(lambda: any(isinstance(m, Commit) for m in raw.received), step_s=0.3)
        assert raw.at_p[1:] == [TransferEnded(key(7))]
        assert not any(isinstance(m, Credit) for m in raw.received)


def test_strangers_at_ps_door_disturb_nobody(context: Context, address: str) -> None:
    """Garbage, pickles, huge frames and messages without a greeting, while a real D is served."""
    with closing(World(context, address)) as world, closing(FrameSocket.dealer(context, address)) as stranger:
        rubbish = [[b""], [b"GET / HTTP/1.1\r\n\r\n"], [pickle.dumps(prefill(1))], [os.urandom(1000)] * 5]
        for frames in [*rubbish, [bytes(f) for f in CODEC.encode(Envelope(P_EPOCH, 9, prefill(1)))]]:
            stranger.send(frames)
        world.until(lambda: world.p.counters()["messages_before_greeting"] == 1)
        assert world.p.counters()["messages_rejected"] == len(rubbish)
        stranger.send([bytes(MAX_FRAME_BYTES + 1)])
        world.until(stranger.lost_connection)
        world.hand_over([7], [3])
        assert world.same_pages([7], [3])
        assert len([o for o in world.at_p if isinstance(o, TransferArrived)]) == 1


def test_a_d_of_another_model_is_refused_and_others_are_served(context: Context, address: str) -> None:
    with closing(World(context, address)) as world:
        other = replace(hello(Role.DECODE), node_id="decode-1", model="model-b")
        frames = CODEC.encode(Envelope(5, 1, other))
        with closing(FrameSocket.dealer(context, address)) as socket:
            socket.send(frames)
            world.until(lambda: world.p.counters()["links_refused"] == 1)
        world.hand_over([7], [3])
