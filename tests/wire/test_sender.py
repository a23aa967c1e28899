"""P's machine: every state meets every event, and what comes out of it."""

from __future__ import annotations

import pytest

from common.errors import LocalProtocolError
from common.messages import Abort, Choice, Commit, Failed, Quiesced, Rejected
from common.request import PrefillStamps
from transfer import sender as tx
from transfer.sender import Sender
from transfer.states import (
    SENDER_TABLE,
    SenderEvent,
    SenderState,
)

ID, NUM_PAGES = 7, 2
CHOICE = Choice(first_token=42, finish=None)
STAMPS = PrefillStamps(1.0, (2.0,))
COMMIT = Commit(ID, NUM_PAGES, STAMPS, (CHOICE,))
S, SE = SenderState, SenderEvent


FIRST_CHUNK = tx.ChunkComputed(0, (11,), is_last=False)
LAST_CHUNK = tx.ChunkComputed(1, (12,), is_last=True)
TOKEN = tx.FirstToken((CHOICE,), STAMPS)

SENDER_PATHS: dict[SenderState, tuple[tx.Input, ...]] = {
    S.QUEUED: (),
    S.COMPUTING: (tx.Start(), FIRST_CHUNK),
    S.SENDING: (tx.Start(), FIRST_CHUNK, LAST_CHUNK, tx.Posted(1)),
    S.COMMITTED: (tx.Start(), FIRST_CHUNK, LAST_CHUNK, tx.Posted(2), TOKEN),
    S.QUIESCING: (tx.Start(), FIRST_CHUNK, Abort(ID)),
    S.CLOSED: (Abort(ID),),
}

SENDER_INPUTS: dict[SenderEvent, tx.Input] = {
    SE.START: tx.Start(),
    SE.POSTED: tx.Posted(1),
    SE.FIRST_TOKEN: TOKEN,
    SE.ABORT: Abort(ID),
    SE.LOST: tx.Lost(),
    SE.REJECT: tx.Reject(400, "too long"),
    SE.FAIL: tx.Fail(500, "cannot"),
    SE.QUIET: tx.Quiet(),
}


def sender_in(state: SenderState) -> Sender:
    sender = Sender(ID, NUM_PAGES)
    for input_ in SENDER_PATHS[state]:
        sender.handle(input_)
    assert sender.state is state
    return sender


def sender_input(event: SenderEvent, state: SenderState) -> tx.Input:
    computed = sum(isinstance(input_, tx.ChunkComputed) for input_ in SENDER_PATHS[state])
    match event:
        case SE.CHUNK:
            return tx.ChunkComputed(computed, (13,), is_last=False)
        case SE.LAST_CHUNK:
            return tx.ChunkComputed(computed, tuple(range(13, 13 + NUM_PAGES - computed)), is_last=True)
        case _:
            return SENDER_INPUTS[event]


@pytest.mark.parametrize("event", [event for event in SE if event is not SE.COMPLETE])
@pytest.mark.parametrize("state", S)
def test_sender_steps_as_its_table_says(state: SenderState, event: SenderEvent) -> None:
    sender = sender_in(state)
    input_ = sender_input(event, state)
    if (state, event) in SENDER_TABLE:
        sender.handle(input_)
        assert sender.state is SENDER_TABLE[state, event]
    else:
        with pytest.raises(LocalProtocolError, match=f"while {state.name}"):
            sender.handle(input_)
        assert sender.state is state


def sent(outputs: tuple[tx.Output, ...]) -> list[object]:
    return [output.message for output in outputs if isinstance(output, tx.Send)]


@pytest.mark.parametrize("last", ["pages", "token"])
def test_it_commits_when_the_last_of_pages_and_first_token_is_there(last: str) -> None:
    sender = sender_in(S.SENDING)
    inputs: list[tx.Input] = [TOKEN, tx.Posted(1)] if last == "pages" else [tx.Posted(1), TOKEN]
    assert sender.handle(inputs[0]) == ()
    assert sender.handle(inputs[1]) == (tx.Send(COMMIT), tx.Ended())
    assert sender.state is S.COMMITTED


def test_there_is_one_first_token() -> None:
    sender = sender_in(S.SENDING)
    sender.handle(TOKEN)
    with pytest.raises(LocalProtocolError, match="second first token"):
        sender.handle(TOKEN)


def test_chunks_are_posted_in_order_and_add_up() -> None:
    sender = sender_in(S.COMPUTING)
    with pytest.raises(LocalProtocolError, match="chunk at page 0, expected 1"):
        sender.handle(FIRST_CHUNK)
    assert sender.handle(LAST_CHUNK) == (tx.Post(1, (12,)),)
    with pytest.raises(LocalProtocolError, match="last chunk ends at page 1 of 2"):
        sender_in(S.COMPUTING).handle(tx.ChunkComputed(1, (), is_last=True))


def test_a_chunk_that_completes_no_page_posts_nothing() -> None:
    sender = sender_in(S.COMPUTING)
    assert sender.handle(tx.ChunkComputed(1, (), is_last=False)) == ()


@pytest.mark.parametrize("state", [S.QUEUED, S.COMPUTING, S.SENDING])
def test_every_abort_is_answered_when_p_is_quiet(state: SenderState) -> None:
    sender = sender_in(state)
    outputs = sender.handle(Abort(ID))
    assert outputs[0] == tx.Stop()
    if not sender.ended:
        outputs = sender.handle(tx.Quiet())
    assert sent(outputs) == [Quiesced(ID)]
    assert outputs[-1] == tx.Ended()


@pytest.mark.parametrize("own", [tx.Lost(), tx.Fail(500, "cannot")])
def test_an_abort_that_meets_our_own_giving_up_is_answered(own: tx.Input) -> None:
    sender = sender_in(S.SENDING)
    sender.handle(own)
    sender.handle(Abort(ID))
    (answer,) = sent(sender.handle(tx.Quiet()))
    assert isinstance(answer, Quiesced | Failed)  # D takes either for the end


@pytest.mark.parametrize("later", [tx.Lost(), tx.Fail(500, "cannot"), Abort(ID)])
def test_what_comes_after_an_abort_does_not_change_its_answer(later: tx.Input) -> None:
    sender = sender_in(S.QUIESCING)
    assert sender.handle(later) == ()  # it was told to stop already
    assert sender.handle(tx.Quiet()) == (tx.Send(Quiesced(ID)), tx.Ended())


def test_a_lost_transfer_ends_in_silence() -> None:
    sender = sender_in(S.SENDING)
    assert sender.handle(tx.Lost()) == (tx.Stop(),)
    assert sender.handle(tx.Quiet()) == (tx.Ended(),)


def test_a_rejected_transfer_says_so_and_ends() -> None:
    assert sender_in(S.QUEUED).handle(tx.Reject(400, "too long")) == (
        tx.Send(Rejected(ID, 400, "too long")),
        tx.Ended(),
    )
