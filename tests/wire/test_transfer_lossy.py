"""Transfers over a link that loses, with aborts, failures, broken links and deaths of P at any moment.

Both machines always end, D serves only whole and right hand-overs, each frees its pages once. Where P writes
into D's pages by itself, none is written after D had it back. Nobody is told what the wire did: each end
learns of a broken link in its own time, and of P's death D learns later still.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.messages import Status
from tests.wire.transfer_model import DecodeEnd, PrefillEnd, nowhere
from tests.wire.wire import LinkedWire
from transfer import sender as tx
from transfer.states import ReceiverState, SenderState

MAX_PAGES = 4
PLACES = st.integers(0, 1000)
S = SenderState
ALIVE = (S.QUEUED, S.COMPUTING, S.SENDING)


class TransfersOverALossyLink(RuleBasedStateMachine):
    """Several transfers at once. `old_to_p` is what was under way to P over the connection before."""

    one_sided = False

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.d = DecodeEnd(one_sided=self.one_sided)
        self.process = 0
        self.unknown_deaths: list[int] = []
        self.troubled = False  # something was lost, broken, given up or refused
        self.p_starts()
        self.d_connects()

    def p_starts(self) -> None:
        self.process += 1
        self.p = PrefillEnd(self.d if self.one_sided else None)
        self.d_is_up = self.p_is_up = False
        self.to_p, self.old_to_p = LinkedWire[Any](), LinkedWire[Any]()  # nothing was said to this one

    def d_connects(self) -> None:
        self.p.link_down()  # the older link, if that is still up
        self.old_to_p = self.to_p
        self.to_p, self.to_d = LinkedWire[Any](), LinkedWire[Any]()
        self.d_is_up = self.p_is_up = True
        self.d.link_up(self.process)

    def pick(self, at: int, *states: SenderState) -> Any:
        candidates = self.p.in_state(*states)
        return candidates[at % len(candidates)] if candidates else None

    # D ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.d.open) < 4 and self.d_is_up)
    @rule(num_pages=st.integers(1, MAX_PAGES))
    def grant(self, num_pages: int) -> None:
        self.d.grant(num_pages, self.process, self.to_p.send)

    @precondition(lambda self: self.d.open)
    @rule(at=PLACES)
    def give_up(self, at: int) -> None:
        self.troubled = True
        ids = list(self.d.open)
        self.d.give_up(ids[at % len(ids)], self.now, self.to_p.send)

    @rule(seconds=st.sampled_from((0.3, 1.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.d.tick(self.now, self.to_p.send)

    @rule()
    def statuses(self) -> None:
        if self.d_is_up:
            self.to_p.send(replace(self.d.status(), last_seq_seen=self.to_d.last_seq_seen))
        if self.p_is_up:
            self.to_d.send(replace(self.p.status(), last_seq_seen=self.to_p.last_seq_seen))

    # P ----------------------------------------------------------------------------------------------------

    @rule(at=PLACES, num_pages=st.integers(0, MAX_PAGES))
    def compute(self, at: int, num_pages: int) -> None:
        if (queued := self.pick(at, S.QUEUED)) is not None:
            self.p.feed(queued, tx.Start())
        if (computing := self.pick(at, S.COMPUTING)) is not None:
            self.p.compute(computing, num_pages)

    @rule(at=PLACES)
    def sample(self, at: int) -> None:
        outgoing = self.pick(at, S.SENDING)
        if outgoing is not None and not outgoing.has_token:
            self.p.sample(outgoing)

    @precondition(lambda self: self.p.queue)
    @rule()
    def a_page_leaves(self) -> None:
        self.p.move()

    @rule(at=PLACES)
    def the_plane_is_quiet(self, at: int) -> None:
        if (outgoing := self.pick(at, S.QUIESCING)) is not None:
            self.p.quiet(outgoing)

    @rule(at=PLACES)
    def p_works(self, at: int) -> None:
        """One prompt as a whole, so that many runs come far."""
        outgoing = self.pick(at, *ALIVE)
        if outgoing is None:
            return
        if outgoing.machine.state is S.QUEUED:
            self.p.feed(outgoing, tx.Start())
        if outgoing.machine.state is S.COMPUTING:
            self.p.compute(outgoing, MAX_PAGES)
        if not outgoing.has_token:
            self.p.sample(outgoing)
        while self.p.queue:
            self.p.move()

    @rule(at=PLACES, reject=st.booleans())
    def p_gives_up(self, at: int, reject: bool) -> None:
        states = (S.QUEUED,) if reject else (*ALIVE, S.QUIESCING)
        if (outgoing := self.pick(at, *states)) is not None:
            self.troubled = True
            self.p.feed(outgoing, tx.Reject(400, "no") if reject else tx.Fail(503, "no"))

    # The wire ---------------------------------------------------------------------------------------------

    @rule(at=PLACES, keep=st.booleans(), to_d=st.booleans())
    def arrive(self, at: int, keep: bool, to_d: bool) -> None:
        link = self.to_d if to_d else self.to_p
        if not link.wire.flying:
            return
        self.troubled = self.troubled or at % len(link.wire.flying) != 0  # what was overtaken is lost
        message = link.arrive(at, keep=keep)
        if message is None or not (self.d_is_up if to_d else self.p_is_up):
            return
        if to_d:
            self.d.message(message, self.now, self.to_p.send)
        else:
            self.p.message(message, self.to_d.send)

    @rule(to_d=st.booleans(), lost=st.none() | st.integers(0, 6))
    def all_arrive(self, to_d: bool, lost: int | None) -> None:
        """In order, but for one perhaps."""
        link = self.to_d if to_d else self.to_p
        for number in range(len(link.wire.flying)):
            if number == lost:
                self.lose(0, to_d)
            else:
                self.next_arrives(to_d)

    @rule(to_d=st.booleans())
    def next_arrives(self, to_d: bool) -> None:
        self.arrive(0, keep=False, to_d=to_d)

    @rule(at=PLACES, to_d=st.booleans())
    def lose(self, at: int, to_d: bool) -> None:
        link = self.to_d if to_d else self.to_p
        if link.wire.flying:
            self.troubled = True
            link.wire.lose(at)

    @precondition(lambda self: self.d_is_up)
    @rule()
    def d_sees_that_the_link_broke(self) -> None:
        self.troubled = True
        self.d_is_up = False
        self.d.link_down(self.now)

    @precondition(lambda self: self.p_is_up)
    @rule()
    def p_sees_that_the_link_broke(self) -> None:
        self.troubled = True
        self.p_is_up = False
        self.p.link_down()

    @precondition(lambda self: not self.d_is_up)
    @rule()
    def d_connects_again(self) -> None:
        self.d_connects()

    @rule()
    def p_reads_an_old_connection(self) -> None:
        """An old greeting takes the link's place; what came behind it is read, and answered nowhere."""
        if self.old_to_p.wire.flying:
            self.troubled = True
            self.p_is_up = False
            self.p.link_down()
            while self.old_to_p.wire.flying:
                if (message := self.old_to_p.arrive(0)) is not None:
                    self.p.message(message, nowhere)

    @rule()
    def p_dies(self) -> None:
        """Another P takes its place."""
        self.troubled = True
        self.unknown_deaths.append(self.process)
        self.d_sees_that_the_link_broke()
        self.p_starts()

    @precondition(lambda self: self.unknown_deaths)
    @rule()
    def d_learns_of_a_death(self) -> None:
        self.d.process_died(self.unknown_deaths.pop(0), self.now)

    # What must hold ---------------------------------------------------------------------------------------

    @invariant()
    def a_transfer_has_one_outcome(self) -> None:
        for incoming in self.d.all.values():
            assert len(incoming.outcomes) <= 1
            if incoming.machine.ended:
                assert len(incoming.outcomes) == 1
                assert (incoming.machine.state is ReceiverState.DONE) == (incoming.outcomes == ["done"])
                assert incoming.released == (incoming.outcomes != ["done"])

    @invariant()
    def what_ended_is_released(self) -> None:
        for outgoing in self.p.all:
            assert outgoing.released == outgoing.machine.ended

    def teardown(self) -> None:
        """The wire heals, P works, time passes: everything ends, and without trouble it ends well."""
        while self.unknown_deaths:
            self.d_learns_of_a_death()
        if not (self.d_is_up and self.p_is_up):
            self.d_sees_that_the_link_broke()
            self.d_connects()
        for _ in range(8):
            self.a_good_second()
        assert not self.d.open
        assert not self.p.open
        assert not self.p.in_state(*ALIVE, S.QUIESCING)
        self.a_transfer_has_one_outcome()
        if not self.troubled:
            assert all(incoming.outcomes == ["done"] for incoming in self.d.all.values())

    def a_good_second(self) -> None:
        self.time_passes(1.0)
        self.statuses()
        busy = True
        while busy:
            busy = bool(self.to_d.wire.flying or self.to_p.wire.flying or self.p.queue)
            for to_d in (True, False):
                self.next_arrives(to_d)
            self.compute(0, 1)
            self.sample(0)
            self.the_plane_is_quiet(0)
            if self.p.queue:
                self.p.move()
            busy = busy or bool(self.p.in_state(*ALIVE, S.QUIESCING))


class OneSidedTransfers(TransfersOverALossyLink):
    """P writes into D's pages by itself."""

    one_sided = True


STEPS = settings(max_examples=200, stateful_step_count=60)
TransfersOverALossyLink.TestCase.settings = OneSidedTransfers.TestCase.settings = STEPS
TestTransfersOverALossyLink = TransfersOverALossyLink.TestCase
TestOneSidedTransfers = OneSidedTransfers.TestCase


def test_a_request_that_is_read_after_its_abort_was_answered_writes_nothing() -> None:
    world = OneSidedTransfers()
    world.grant(1)
    world.d_sees_that_the_link_broke()
    world.d_connects()  # the request is still on its way over the old connection
    world.time_passes(1.0)
    world.all_arrive(to_d=False, lost=None)
    world.all_arrive(to_d=True, lost=None)
    assert world.d.all[1].released
    world.p_reads_an_old_connection()
    world.p_works(0)
    world.teardown()


@pytest.mark.parametrize("kind", [TransfersOverALossyLink, OneSidedTransfers])
def test_an_undisturbed_transfer_is_done(kind: type[TransfersOverALossyLink]) -> None:
    """The model itself runs transfers; else the machine above would prove nothing."""
    world = kind()
    for num_pages in (1, 4):
        world.grant(num_pages)
    world.a_good_second()
    assert [incoming.outcomes for incoming in world.d.all.values()] == [["done"], ["done"]]
    assert isinstance(world.d.status(), Status)
