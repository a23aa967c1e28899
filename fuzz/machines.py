"""One machine alone: any input in any state gives declared outputs, or the error that it declares.

What the peer causes is RemoteProtocolError at a receiver, and nothing at a link; a sender is fed by our own
node, whose mistakes are LocalProtocolError. An error leaves the machine as it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

from common import link
from common.codec import Envelope
from common.errors import LocalProtocolError, RemoteProtocolError
from common.messages import Abort, Choice, Chunk, Commit, Failed, HelloAck, Quiesced, Rejected, Status
from common.request import FinishReason, PrefillStamps
from fuzz.mutation import changed_bytes
from fuzz.reading import Choices
from tests.wire.golden import INSTANCES
from tests.wire.hellos import DECODE, PREFILL
from transfer import receiver as rx
from transfer import sender as tx
from transfer.states import ReceiverState, SenderState

MAX_BYTES = 400
MAX_INPUTS = 120
_CHOICE = Choice(7, None)


# D's machine of a transfer ---------------------------------------------------------------------------------


def _for_receiver(choices: Choices) -> rx.Input:
    match choices.below(10):
        case 0 | 1 | 2:
            return Chunk(1, choices.below(6), 1 + choices.below(4), total_bytes=1)
        case 3 | 4:
            return Commit(1, choices.below(6), PrefillStamps(), (_CHOICE,) * (choices.below(8) != 0))
        case 5:
            return Rejected(1, 400, "no") if choices.below(2) else Failed(1, 503, "no")
        case 6:
            return Quiesced(1)
        case 7:
            return rx.GiveUp() if choices.below(2) else rx.Broken("no")
        case 8:
            return rx.Lost("gone", quiet=bool(choices.below(2)))
        case _:
            return rx.Tick()


def _receiver(data: bytes) -> str:
    choices, now = Choices(data), 0.0
    one_sided, num_pages = bool(choices.below(2)), 1 + choices.below(5)
    machine = rx.Receiver(1, num_pages, one_sided=one_sided)
    said: list[str] = []
    placed = 0
    for _ in range(MAX_INPUTS):
        if not choices.left:
            break
        input_, before = _for_receiver(choices), machine.state
        now += choices.below(4) / 2
        ended = machine.ended
        try:
            outputs = machine.handle(input_, now)
        except RemoteProtocolError:
            assert machine.state is before, "an error changed the state"
            if not ended:
                assert not isinstance(input_, rx.GiveUp | rx.Lost | rx.Tick), (
                    "what we do has a row while open"
                )
            continue
        assert not ended or not outputs, "something is to be done for a transfer that is over"
        for output in outputs:
            assert isinstance(output, get_args(rx.Output)), output
            if isinstance(output, rx.Place):
                assert not said, "pages are placed behind the end"
                assert output.chunk.first_page == placed
                placed += output.chunk.num_pages
                assert placed <= num_pages
            elif not isinstance(output, rx.Send):
                said.append(type(output).__name__)
        if "Done" in said:
            assert placed == num_pages
    assert said.count("Done") + said.count("GaveOut") <= 1
    assert said.count("PagesFree") <= 1
    assert not {"Done", "PagesFree"} <= set(said)
    if machine.state in (ReceiverState.CLOSED, ReceiverState.FAILED):
        assert "PagesFree" in said, "its pages never come back"
    return f"{one_sided} {machine.state.name} {said}"


# P's machine of a transfer ---------------------------------------------------------------------------------


def _for_sender(choices: Choices) -> tx.Input:
    match choices.below(12):
        case 0 | 1:
            return tx.Start()
        case 2 | 3 | 4:
            first = choices.below(5)
            pages = tuple(range(first, first + choices.below(5)))
            return tx.ChunkComputed(first, pages, is_last=bool(choices.below(2)))
        case 5 | 6:
            return tx.Posted(1 + choices.below(3))
        case 7:
            choice = replace(_CHOICE, finish=choices.one_of((None, FinishReason.STOP)))
            return tx.FirstToken((choice,), PrefillStamps())
        case 8:
            return tx.Reject(400, "no") if choices.below(2) else tx.Fail(503, "no")
        case 9:
            return Abort(1)
        case 10:
            return tx.Lost()
        case _:
            return tx.Quiet()


def _sender(data: bytes) -> str:
    choices = Choices(data)
    num_pages = 1 + choices.below(4)
    machine = tx.Sender(1, num_pages)
    said: list[str] = []
    posted = 0
    for _ in range(MAX_INPUTS):
        if not choices.left:
            break
        ended, before = machine.ended, machine.state
        input_ = _for_sender(choices)
        try:
            outputs = machine.handle(input_)
        except LocalProtocolError:
            # D may send Abort, and its link may break, whenever the transfer is open.
            assert ended or not isinstance(input_, Abort | tx.Lost | tx.Fail) or before is SenderState.QUEUED
            break  # our own bug ends the process
        assert not ended, "it is over"
        posted += input_.num_pages if isinstance(input_, tx.Posted) else 0
        for output in outputs:
            assert isinstance(output, get_args(tx.Output)), output
            said.append(type(output.message if isinstance(output, tx.Send) else output).__name__)
    assert said.count("Ended") == machine.ended
    assert posted == num_pages or "Commit" not in said
    words = [word for word in said if word in ("Commit", "Rejected", "Failed", "Quiesced")]
    assert len(words) <= 1, words
    assert not words or said[-2:] == [words[0], "Ended"], said
    return f"{machine.state.name} {words}"


# A link ----------------------------------------------------------------------------------------------------


def _message(choices: Choices, *, initiates: bool) -> Any:
    ours, theirs = (DECODE, PREFILL) if initiates else (PREFILL, DECODE)
    match choices.below(8):
        case 0 | 1:
            return theirs if not initiates else HelloAck(theirs, accepted=True, plane="frames")
        case 2:
            other = choices.one_of((replace(theirs, model="model-b"), ours, replace(theirs, planes=("shm",))))
            return other if choices.below(2) else HelloAck(other, accepted=True, plane="shm")
        case 3:
            return HelloAck(
                theirs, accepted=bool(choices.below(2)), reason="no", plane=choices.one_of(("", "x"))
            )
        case 4:
            return Status(last_seq_seen=choices.byte(), open_ids=())
        case _:
            return choices.one_of(INSTANCES)


def _for_link(choices: Choices, *, initiates: bool) -> link.Input:
    match choices.below(8):
        case 0 | 1:
            return link.Tick()
        case 2 if choices.below(4) == 0:
            return link.PeerGone("its process ended")
        case _:
            epoch, seq = 1 + (choices.below(8) == 0), choices.byte()
            return link.Received(Envelope(epoch, seq, _message(choices, initiates=initiates)))


def _link(data: bytes) -> str:
    choices, now = Choices(data), 0.0
    initiates = bool(choices.below(2))
    machine = link.Link(DECODE if initiates else PREFILL, 9, initiates=initiates, now=now)
    passed: list[int] = []  # numbers of what was delivered
    sent = 0
    events: list[str] = []
    for _ in range(MAX_INPUTS):
        if not choices.left:
            break
        input_, before = _for_link(choices, initiates=initiates), machine.state
        now += choices.below(4)
        for output in machine.handle(input_, now):  # nothing that a peer does may raise
            assert isinstance(output, get_args(link.Output)), output
            if isinstance(output, link.Transmit):
                sent += 1
                assert output.envelope.seq == sent
            elif isinstance(output, link.Deliver):
                assert before is link.LinkState.UP
                assert isinstance(input_, link.Received)
                passed.append(input_.envelope.seq)
            elif isinstance(output, link.LinkUp | link.LinkDown | link.LinkRefused):
                events.append(type(output).__name__)
            elif isinstance(output, link.StatusDue):
                sent += 1
                status = machine.send(Status(last_seq_seen=0, open_ids=()))[0].envelope
                assert (status.seq, status.message.last_seq_seen >= max(passed, default=0)) == (sent, True)
        if before is link.LinkState.DOWN:
            assert machine.state is before
        due = machine.deadline()
        assert (due is None) == (
            machine.state is link.LinkState.DOWN or (not initiates and machine.state is not link.LinkState.UP)
        )
    assert passed == sorted(set(passed))
    assert events.count("LinkUp") <= 1
    assert events.count("LinkDown") <= 1
    return f"{initiates} {machine.state.name} {sorted(set(events))} {bool(passed)}"


RUNS: dict[str, Callable[[bytes], str]] = {"receiver": _receiver, "sender": _sender, "link": _link}


def seeds() -> list[bytes]:
    """Some runs of many inputs."""
    draw = random.Random(7)
    return [b"", *(draw.randbytes(size) for size in (10, 40, 120, 240))]


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Change, add or leave out some inputs."""
    return draw.randbytes(draw.randint(1, 200)) if draw.random() < 0.1 else changed_bytes(data, draw)
