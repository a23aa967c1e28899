"""One link, step by step: greeting, refusal, order, epochs, Status, and the table itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.codec import Envelope
from common.errors import LocalProtocolError
from common.link import (
    HELLO_RETRY_S,
    REFUSED_RETRY_S,
    STATUS_EVERY_S,
    TRANSITIONS,
    Deliver,
    Discard,
    Link,
    LinkDown,
    LinkEvent,
    LinkRefused,
    LinkState,
    LinkUp,
    Output,
    PeerGone,
    Received,
    StatusDue,
    Tick,
    Transmit,
    mismatch,
)
from common.messages import Abort, Hello, HelloAck, Role, Status
from tests.wire.hellos import DECODE, LAYOUT, PREFILL, hello

OURS, THEIRS = 11, 22
S, E = LinkState, LinkEvent


def initiator(local: Hello = DECODE) -> Link:
    return Link(local, OURS, initiates=True, now=0.0)


def acceptor(local: Hello = PREFILL) -> Link:
    return Link(local, THEIRS, initiates=False, now=0.0)


def ack(*, accepted: bool = True, seq: int = 1, epoch: int = THEIRS) -> Received:
    reason = "" if accepted else "you do not fit"
    return Received(Envelope(epoch, seq, HelloAck(PREFILL, accepted, reason, "frames" if accepted else "")))


def greet(epoch: int = OURS, seq: int = 1, local: Hello = DECODE) -> Received:
    return Received(Envelope(epoch, seq, local))


def message(id_: int, *, seq: int, epoch: int = THEIRS) -> Received:
    return Received(Envelope(epoch, seq, Abort(id_)))


def up() -> Link:
    """An initiator whose peer has epoch THEIRS and has numbered one message."""
    link = initiator()
    assert isinstance(link.handle(ack(), 0.0)[0], LinkUp)
    return link


def delivered(outputs: tuple[Output, ...]) -> list[Any]:
    return [output.message for output in outputs if isinstance(output, Deliver)]


# Greeting -------------------------------------------------------------------------------------------------


def test_two_links_greet_and_are_up() -> None:
    d, p = initiator(), acceptor()
    (greeting,) = d.handle(Tick(), 0.0)
    assert greeting == Transmit(Envelope(OURS, 1, DECODE))
    answer, p_up = p.handle(Received(Envelope(OURS, 1, DECODE)), 0.0)
    assert p_up == LinkUp(DECODE, OURS, "frames")
    assert answer == Transmit(Envelope(THEIRS, 1, HelloAck(PREFILL, accepted=True, plane="frames")))
    assert isinstance(answer, Transmit)
    assert d.handle(Received(answer.envelope), 0.0) == (LinkUp(PREFILL, THEIRS, "frames"),)
    assert (d.state, p.state) == (S.UP, S.UP)


def test_a_plane_that_was_not_offered_is_refused() -> None:
    link = initiator()
    (refused,) = link.handle(Received(Envelope(THEIRS, 1, HelloAck(PREFILL, True, plane="pigeons"))), 0.0)
    assert refused == LinkRefused("prefill-0 chose the plane pigeons, which was not offered")
    assert link.state is S.REFUSED


def test_the_acceptor_refuses_where_no_plane_works() -> None:
    link = Link(PREFILL, THEIRS, initiates=False, now=0.0, choose=lambda ours, theirs: "")
    answer, refused = link.handle(greet(), 0.0)
    assert refused == LinkRefused("no data plane works between prefill-0 and decode-0")
    assert isinstance(answer, Transmit)
    assert not answer.envelope.message.accepted


def test_the_initiator_greets_until_it_is_answered() -> None:
    link = initiator()
    assert link.deadline() == 0.0
    assert len(link.handle(Tick(), 0.0)) == 1
    assert link.deadline() == HELLO_RETRY_S
    assert link.handle(Tick(), HELLO_RETRY_S / 2) == ()
    assert len(link.handle(Tick(), HELLO_RETRY_S)) == 1


def test_the_acceptor_waits_to_be_greeted() -> None:
    link = acceptor()
    assert link.deadline() is None
    assert link.handle(Tick(), 100.0) == ()


def test_a_repeated_hello_is_answered_and_brings_up_nothing() -> None:
    link = acceptor()
    link.handle(greet(seq=1), 0.0)
    (answer,) = link.handle(greet(seq=2), 0.0)
    assert isinstance(answer, Transmit)
    assert answer.envelope.message.accepted


def test_greetings_that_were_repeated_count_as_seen_and_not_as_lost() -> None:
    p = acceptor()
    for seq in (1, 2, 3):
        p.handle(greet(seq=seq), 0.0)
    assert p.handle(message(5, seq=4, epoch=OURS), 0.0) == (Deliver(Abort(5)),)
    d = up()
    d.handle(ack(seq=2), 0.0)
    assert d.handle(message(5, seq=3), 0.0) == (Deliver(Abort(5)),)


def test_a_greeting_that_goes_the_wrong_way_is_dropped() -> None:
    assert acceptor().handle(ack(), 0.0) == (Discard("greetings_misplaced"),)
    assert initiator().handle(greet(), 0.0) == (Discard("greetings_misplaced"),)


@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        (DECODE, replace(PREFILL, model="model-b"), ("model-a", "model-b")),
        (DECODE, replace(PREFILL, layout=replace(LAYOUT, page_size=16)), ("page_size", "4 at", "16 at")),
        (
            DECODE,
            replace(PREFILL, layout=replace(LAYOUT, dtype="bfloat16")),
            ("dtype", "float32 at", "bfloat16 at"),
        ),
        (DECODE, replace(PREFILL, layout=replace(LAYOUT, layers=3)), ("layers", "2 at", "3 at")),
        (DECODE, replace(PREFILL, layout=replace(LAYOUT, kv_heads=2)), ("kv_heads", "1 at", "2 at")),
        (DECODE, replace(PREFILL, layout=replace(LAYOUT, head_dim=16)), ("head_dim", "8 at", "16 at")),
        (DECODE, replace(PREFILL, planes=("pigeons",)), ("frames", "pigeons")),
        (DECODE, replace(PREFILL, verify_pages=True), ("--verify-pages at prefill-0",)),
        (DECODE, replace(PREFILL, role=Role.DECODE), ("a decode node at",)),
    ],
)
def test_a_mismatch_is_refused_on_both_sides_with_both_values_named(
    ours: Hello, theirs: Hello, names: tuple[str, ...]
) -> None:
    d, p = initiator(ours), acceptor(theirs)
    (greeting,) = d.handle(Tick(), 0.0)
    assert isinstance(greeting, Transmit)
    answer, p_refused = p.handle(Received(greeting.envelope), 0.0)
    assert isinstance(answer, Transmit)
    (d_refused,) = d.handle(Received(answer.envelope), 0.0)
    assert (d.state, p.state) == (S.REFUSED, S.REFUSED)
    for refused in (p_refused, d_refused):
        assert isinstance(refused, LinkRefused)
        for name in (*names, ours.node_id, theirs.node_id):
            assert name in refused.reason


def test_a_gateway_has_no_layout_and_fits_every_node_of_its_model() -> None:
    gateway = replace(hello(Role.GATEWAY), layout=None, planes=())
    assert mismatch(gateway, PREFILL) is None
    assert mismatch(PREFILL, gateway) is None


def test_who_was_refused_asks_again_and_may_be_taken() -> None:
    link = initiator()
    link.handle(Tick(), 0.0)
    link.handle(ack(accepted=False), 0.0)
    assert link.deadline() == REFUSED_RETRY_S
    assert link.handle(Tick(), REFUSED_RETRY_S - 0.1) == ()
    (again,) = link.handle(Tick(), REFUSED_RETRY_S)
    assert isinstance(again, Transmit)
    assert isinstance(again.envelope.message, Hello)
    assert isinstance(link.handle(ack(seq=2), REFUSED_RETRY_S)[0], LinkUp)


def test_a_refusal_while_the_link_is_up_says_that_the_acceptor_dropped_it() -> None:
    link = up()
    assert link.handle(ack(accepted=False, seq=0), 5.0) == (LinkDown("you do not fit"),)
    assert link.state is S.DOWN


# Order and epochs -----------------------------------------------------------------------------------------


def test_messages_are_delivered_in_order_and_once() -> None:
    link = up()
    outputs = [link.handle(message(seq, seq=seq), 0.0) for seq in (2, 2, 5, 3, 4, 5, 6)]
    assert [m.id for output in outputs for m in delivered(output)] == [2, 5, 6]
    assert outputs[1] == (Discard("messages_duplicate"),)
    assert outputs[2] == (Discard("messages_lost"), Deliver(Abort(5)))  # once for the gap


def test_messages_of_another_epoch_are_dropped() -> None:
    link = up()
    assert link.handle(message(9, seq=2, epoch=THEIRS + 1), 0.0) == (Discard("messages_of_another_epoch"),)


def test_messages_before_the_greeting_are_dropped() -> None:
    for link in (initiator(), acceptor()):
        assert link.handle(message(9, seq=2), 0.0) == (Discard("messages_before_greeting"),)


def test_a_greeting_of_another_epoch_takes_the_link_down() -> None:
    p = acceptor()
    p.handle(greet(), 0.0)
    assert p.handle(greet(epoch=OURS + 1), 0.0) == (LinkDown("decode-0 started again"),)
    d = up()
    assert d.handle(ack(epoch=THEIRS + 1), 0.0) == (LinkDown("prefill-0 started again"),)


def test_a_link_goes_down_once_and_stays_down() -> None:
    link = up()
    assert link.handle(PeerGone("its process ended"), 0.0) == (LinkDown("its process ended"),)
    assert link.handle(PeerGone("again"), 0.0) == ()
    assert link.handle(ack(seq=2), 0.0) == (Discard("greetings_misplaced"),)
    assert link.handle(message(9, seq=3), 0.0) == (Discard("messages_before_greeting"),)
    assert link.deadline() is None
    assert link.handle(Tick(), 100.0) == ()


@pytest.mark.parametrize("state", [S.GREETING, S.REFUSED, S.DOWN])
def test_nothing_is_sent_unless_the_link_is_up(state: LinkState) -> None:
    link = initiator()
    if state is S.REFUSED:
        link.handle(ack(accepted=False), 0.0)
    elif state is S.DOWN:
        link.handle(PeerGone("gone"), 0.0)
    assert link.state is state
    with pytest.raises(LocalProtocolError, match=state.name):
        link.send(Abort(1))


# Status ---------------------------------------------------------------------------------------------------


def test_status_is_due_at_once_and_then_every_second() -> None:
    link = up()
    due = [now for now in (0.0, 0.4, 0.9, 1.0, 1.5, 2.0, 2.0) if link.handle(Tick(), now) == (StatusDue(),)]
    assert due == [0.0, 1.0, 2.0]
    assert link.deadline() == 2.0 + STATUS_EVERY_S


def test_status_carries_the_last_number_seen() -> None:
    link = up()
    link.handle(message(9, seq=7), 0.0)
    transmit, seq = link.send(Status(last_seq_seen=0, open_ids=(4,), queued=2))
    assert transmit.envelope == Envelope(OURS, seq, Status(last_seq_seen=7, open_ids=(4,), queued=2))


def test_the_peer_has_heard_what_its_status_says_it_read() -> None:
    link = up()
    assert link.is_heard  # nothing was said
    _, news = link.send(Abort(1))
    link.send(Status(0, ()))  # said each second, so nobody waits until that was heard
    assert not link.is_heard
    for seen, heard in ((news - 1, False), (news, True)):
        link.handle(Received(Envelope(THEIRS, 2 + seen, Status(seen, ()))), 1.0)
        assert link.is_heard is heard
    link.send(Abort(2))
    assert not link.is_heard


def test_numbers_rise_by_one_whatever_is_sent() -> None:
    link = initiator()
    link.handle(Tick(), 0.0)  # Hello has number 1
    link.handle(ack(), 0.0)
    sent = [link.send(Abort(1)), link.send(Status(0, ())), link.send(Abort(2))]
    assert [(transmit.envelope.seq, seq) for transmit, seq in sent] == [(2, 2), (3, 3), (4, 4)]


# The table ------------------------------------------------------------------------------------------------

# Only an initiator's own clock retries, and it does not look at links that are up or down; the acceptor
# disowns by a HelloAck, which a link that was not up takes for an ordinary refusal.
IMPOSSIBLE = {
    (S.UP, E.RETRY),
    (S.DOWN, E.RETRY),
    (S.GREETING, E.DISOWNED),
    (S.REFUSED, E.DISOWNED),
    (S.DOWN, E.DISOWNED),
}


def test_the_table_holds_every_pair_that_can_occur() -> None:
    assert {(s, e) for s in LinkState for e in LinkEvent} - TRANSITIONS.keys() == IMPOSSIBLE


def test_down_is_the_only_end_and_can_be_reached_from_everywhere() -> None:
    assert {after for (before, _), after in TRANSITIONS.items() if before is S.DOWN} == {S.DOWN}
    for state in LinkState:
        assert TRANSITIONS[state, E.GONE] is S.DOWN
