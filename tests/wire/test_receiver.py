"""D's machine: every state meets every event, and what comes out of it."""

from __future__ import annotations

import pytest

from common.errors import RemoteProtocolError
from common.messages import Abort, Choice, Chunk, Commit, Failed, Quiesced, Rejected, float32s, int32s
from common.request import PrefillStamps, SamplingParams
from transfer import receiver as rx
from transfer.receiver import Receiver
from transfer.states import (
    RECEIVER_TABLE,
    ReceiverEvent,
    ReceiverState,
)

ID, NUM_PAGES = 7, 2
CHOICE = Choice(first_token=42, finish=None)
COMMIT = Commit(ID, NUM_PAGES, PrefillStamps(), (CHOICE,))
R, RE = ReceiverState, ReceiverEvent


def chunk(first_page: int, num_pages: int = 1) -> Chunk:
    return Chunk(ID, first_page, num_pages, total_bytes=8, frames=(b"12345678",))


RECEIVER_PATHS: dict[ReceiverState, tuple[rx.Input, ...]] = {
    R.GRANTED: (),
    R.RECEIVING: (chunk(0), chunk(1)),
    R.DONE: (chunk(0), chunk(1), COMMIT),
    R.ABORTING: (rx.GiveUp(),),
    R.CLOSED: (rx.GiveUp(), Quiesced(ID)),
    R.FAILED: (Failed(ID, 503, "no"),),
}


def receiver_in(state: ReceiverState, *, one_sided: bool) -> Receiver:
    receiver = Receiver(ID, NUM_PAGES, one_sided=one_sided)
    for input_ in RECEIVER_PATHS[state]:
        receiver.handle(input_, 0.0)
    assert receiver.state is state
    return receiver


def receiver_input(event: ReceiverEvent, receiver: Receiver) -> rx.Input:
    match event:
        case RE.CHUNK:
            receiver.num_pages = receiver.pages_in + 1  # room for one more
            return chunk(receiver.pages_in)
        case RE.COMMIT:
            receiver.num_pages = receiver.pages_in
            return Commit(ID, receiver.num_pages, PrefillStamps(), (CHOICE,))
        case RE.BROKEN:
            return rx.Broken("checksum")
        case RE.ABORT:
            return rx.GiveUp()
        case RE.REFUSED:
            return Failed(ID, 503, "no")
        case RE.QUIESCED:
            return Quiesced(ID)
        case RE.LOST:
            return rx.Lost("its process ended", quiet=True)
        case RE.RETRY:
            return rx.Tick()


@pytest.fixture(params=[False, True], ids=["placed by D", "one-sided"])
def one_sided(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# The clock asks nobody but an aborting transfer, so that this never becomes an event.
TICKS_IGNORED = {state for state in R if state is not R.ABORTING}


@pytest.mark.parametrize("event", RE)
@pytest.mark.parametrize("state", R)
def test_receiver_steps_as_its_table_says(
    state: ReceiverState, event: ReceiverEvent, *, one_sided: bool
) -> None:
    receiver = receiver_in(state, one_sided=one_sided)
    input_ = receiver_input(event, receiver)
    if event is RE.RETRY and state in TICKS_IGNORED:
        assert receiver.handle(input_, 1e9) == ()
        assert (state, event) not in RECEIVER_TABLE
    elif (state, event) in RECEIVER_TABLE:
        receiver.handle(input_, 1e9)
        assert receiver.state is RECEIVER_TABLE[state, event]
    else:
        with pytest.raises(RemoteProtocolError, match=f"while {state.name}"):
            receiver.handle(input_, 1e9)
        assert receiver.state is state


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ((), chunk(1)),  # not the first
        ((chunk(0),), chunk(0)),  # once more
        ((chunk(0),), chunk(1, num_pages=2)),  # more than there are
        ((), chunk(0, num_pages=3)),
        ((), COMMIT),  # no pages in
        ((chunk(0),), COMMIT),  # one missing
        ((chunk(0), chunk(1)), Commit(ID, 1, PrefillStamps(), (CHOICE,))),  # other counts
        ((chunk(0), chunk(1)), Commit(ID, 2, PrefillStamps(), ())),  # no first token
        ((chunk(0), chunk(1)), Commit(ID, 2, PrefillStamps(), (CHOICE, CHOICE))),
    ],
)
def test_what_does_not_fit_ends_the_transfer_as_retryable(
    path: tuple[rx.Input, ...], wrong: rx.Input, *, one_sided: bool
) -> None:
    receiver = Receiver(ID, NUM_PAGES, one_sided=one_sided)
    for input_ in path:
        receiver.handle(input_, 0.0)
    gave_out, abort, *free = receiver.handle(wrong, 5.0)
    assert abort == rx.Send(Abort(ID))
    assert isinstance(gave_out, rx.GaveOut)
    assert (gave_out.status, gave_out.retryable) == (503, True)
    assert free == ([] if one_sided else [rx.PagesFree()])  # behind GaveOut: only then is it news
    assert receiver.state is R.ABORTING


@pytest.mark.parametrize(
    ("asked", "lengths", "fits"),
    [
        (None, (0, 0, 0), True),
        (None, (1, 0, 0), False),  # of a request that did not ask
        (None, (0, 2, 2), False),
        (2, (4, 8, 8), True),  # a prompt of five tokens
        (2, (0, 0, 0), False),
        (2, (5, 10, 10), False),
        (2, (4, 8, 7), False),
        (2, (4, 7, 8), False),
        (2, (4, 4, 4), False),  # one each, where two were asked for
        (0, (4, 0, 0), True),
        (0, (4, 4, 4), False),
    ],
)
def test_log_probabilities_must_fit_the_prompt(
    asked: int | None, lengths: tuple[int, int, int], fits: bool, *, one_sided: bool
) -> None:
    scored = rx.Scored.of(SamplingParams(1, num_prompt_logprobs=asked), prompt_len=5)
    receiver = Receiver(ID, NUM_PAGES, one_sided=one_sided, scored=scored)
    for input_ in (chunk(0), chunk(1)):
        receiver.handle(input_, 0.0)
    own, ids, top = lengths
    commit = Commit(
        ID,
        NUM_PAGES,
        PrefillStamps(),
        (CHOICE,),
        float32s([-1] * own),
        int32s([7] * ids),
        float32s([-1] * top),
    )
    outputs = receiver.handle(commit, 5.0)
    if fits:
        assert outputs == (rx.Done(commit),)
    else:
        assert isinstance(outputs[0], rx.GaveOut)
        assert outputs[0].retryable
        assert receiver.state is R.ABORTING


def test_an_abort_is_repeated_each_second_until_p_is_quiet(*, one_sided: bool) -> None:
    receiver = receiver_in(R.GRANTED, one_sided=one_sided)
    at_once: tuple[rx.Output, ...] = () if one_sided else (rx.PagesFree(),)
    at_last: tuple[rx.Output, ...] = (rx.PagesFree(),) if one_sided else ()
    assert receiver.deadline() is None
    assert receiver.handle(rx.GiveUp(), 10.0) == (rx.Send(Abort(ID)), *at_once)
    assert receiver.deadline() == 11.0
    assert receiver.handle(rx.Tick(), 10.9) == ()
    assert receiver.handle(rx.Tick(), 11.0) == (rx.Send(Abort(ID)),)
    assert receiver.deadline() == 12.0
    assert receiver.handle(Quiesced(ID), 11.5) == at_last
    assert receiver.deadline() is None


@pytest.mark.parametrize("late", [chunk(0), COMMIT, rx.GiveUp(), rx.Broken("x")])
def test_nothing_is_placed_or_reported_while_aborting(late: rx.Input, *, one_sided: bool) -> None:
    receiver = receiver_in(R.ABORTING, one_sided=one_sided)
    assert receiver.handle(late, 1.0) == ()


def test_what_p_refuses_for_good_is_not_tried_again(*, one_sided: bool) -> None:
    assert Receiver(ID, 1, one_sided=one_sided).handle(Rejected(ID, 400, "too long"), 0.0) == (
        rx.GaveOut(400, "too long", retryable=False),
        rx.PagesFree(),
    )
    assert Receiver(ID, 1, one_sided=one_sided).handle(Failed(ID, 503, "no"), 0.0) == (
        rx.GaveOut(503, "no", retryable=True),
        rx.PagesFree(),
    )


# When D's pages are D's again -----------------------------------------------------------------------------

OUT_OF_REACH = rx.Lost("link down", quiet=False)


@pytest.mark.parametrize("state", [R.GRANTED, R.RECEIVING])
def test_a_p_out_of_reach_may_still_write(state: ReceiverState) -> None:
    receiver = receiver_in(state, one_sided=True)
    gave_out, abort = receiver.handle(OUT_OF_REACH, 3.0)
    assert gave_out == rx.GaveOut(503, "link down", retryable=True)
    assert abort == rx.Send(Abort(ID))
    assert receiver.handle(OUT_OF_REACH, 4.0) == ()
    for now in range(5, 3600, 60):  # no time that passes ends it
        assert receiver.handle(rx.Tick(), float(now)) == (rx.Send(Abort(ID)),)
        assert not receiver.ended


@pytest.mark.parametrize("state", [R.GRANTED, R.RECEIVING])
def test_where_d_places_the_bytes_a_p_out_of_reach_is_over(state: ReceiverState) -> None:
    receiver = receiver_in(state, one_sided=False)
    gave_out = rx.GaveOut(503, "link down", retryable=True)
    assert receiver.handle(OUT_OF_REACH, 3.0) == (gave_out, rx.PagesFree())
    assert receiver.ended


@pytest.mark.parametrize(
    "quiet",
    [Quiesced(ID), Failed(ID, 503, "no"), Rejected(ID, 400, "no"), rx.Lost("it died", quiet=True)],
    ids=lambda quiet: type(quiet).__name__,
)
def test_pages_are_free_once_p_is_quiet_or_dead(quiet: rx.Input) -> None:
    receiver = receiver_in(R.ABORTING, one_sided=True)
    assert receiver.handle(quiet, 1.0) == (rx.PagesFree(),)
    assert receiver.state is R.CLOSED


def test_a_dead_p_writes_no_more() -> None:
    receiver = receiver_in(R.RECEIVING, one_sided=True)
    assert receiver.handle(rx.Lost("it died", quiet=True), 1.0) == (
        rx.GaveOut(503, "it died", retryable=True),
        rx.PagesFree(),
    )
