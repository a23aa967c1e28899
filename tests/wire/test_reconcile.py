"""What a link lost is found by two Statuses, and what is alive is never taken for lost."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from common.reconcile import Reconciler


def test_an_id_absent_from_two_statuses_in_a_row_is_lost() -> None:
    reconciler = Reconciler()
    reconciler.opened(7, 3)
    assert reconciler.on_status(3, ()) == ()
    assert reconciler.on_status(3, ()) == (7,)


def test_it_is_reported_until_it_is_closed() -> None:
    reconciler = Reconciler()
    reconciler.opened(7)
    reconciler.on_status(0, ())
    assert [reconciler.on_status(0, ()) for _ in range(2)] == [(7,), (7,)]
    reconciler.closed(7)
    reconciler.closed(7)
    assert reconciler.on_status(0, ()) == ()


def test_a_status_older_than_the_opening_message_says_nothing() -> None:
    reconciler = Reconciler()
    reconciler.opened(7, 4)
    assert [reconciler.on_status(3, ()) for _ in range(5)] == [()] * 5


def test_a_status_that_lists_the_id_starts_the_count_again() -> None:
    reconciler = Reconciler()
    reconciler.opened(7, 3)
    answers = [reconciler.on_status(3, ids) for ids in ((), (7,), (), (7, 8), (), ())]
    assert answers == [(), (), (), (), (), (7,)]


def test_open_ids_are_what_was_opened_and_not_closed() -> None:
    reconciler = Reconciler()
    for id_ in (3, 1, 2):
        reconciler.opened(id_)
    reconciler.closed(1)
    assert sorted(reconciler.open_ids()) == [2, 3]


@dataclass(frozen=True)
class PeersStatus:
    last_seq_seen: int
    open_ids: tuple[int, ...]


class OpeningAndClosingOverALossyLink(RuleBasedStateMachine):
    """We open ids by message; the peer closes them, and says so. Both kinds of message may be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = Reconciler()
        self.seq = 0
        self.to_peer: list[tuple[int, int]] = []  # (seq, id), in order
        self.to_us: list[int | PeersStatus] = []  # the news that an id was closed, or a Status
        self.peer_seen = 0
        self.peer_read: set[int] = set()  # messages that the peer has read and not yet looked at
        self.peer_open: set[int] = set()
        self.peer_closed: set[int] = set()
        self.open: set[int] = set()  # at our side, by the model

    @rule()
    def open_one(self) -> None:
        self.seq += 1
        self.to_peer.append((self.seq, self.seq))
        self.ours.opened(self.seq, self.seq)
        self.open.add(self.seq)

    @precondition(lambda self: self.to_peer)
    @rule(lost=st.booleans())
    def peer_reads(self, lost: bool) -> None:
        seq, id_ = self.to_peer.pop(0)
        if not lost:
            self.peer_seen = seq
            self.peer_read.add(id_)

    @rule()
    def peer_says_what_is_open(self) -> None:
        """As an endpoint does: what was read in this turn is seen by the link, but not yet open."""
        self.to_us.append(PeersStatus(self.peer_seen, tuple(self.peer_open)))
        self.peer_open |= self.peer_read
        self.peer_read.clear()

    @precondition(lambda self: self.peer_open)
    @rule(data=st.data())
    def peer_closes_one(self, data: st.DataObject) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.peer_open)))
        self.peer_open.remove(id_)
        self.peer_closed.add(id_)
        self.to_us.append(id_)

    @precondition(lambda self: self.to_us)
    @rule(lost=st.booleans())
    def we_read(self, lost: bool) -> None:
        news = self.to_us.pop(0)
        if lost:
            return
        if isinstance(news, int):
            self.close(news)
            return
        for id_ in self.ours.on_status(news.last_seq_seen, news.open_ids):
            assert id_ not in self.peer_open | self.peer_read, "it is alive over there"
            assert id_ not in {id_ for _, id_ in self.to_peer}, "it may yet arrive"
            self.close(id_)

    def close(self, id_: int) -> None:
        self.ours.closed(id_)
        self.open.discard(id_)

    def teardown(self) -> None:
        """No more loss: after two Statuses our side has open what the peer has, and nothing else."""
        while self.to_peer:
            self.peer_reads(lost=False)
        # One message behind the last that may have been lost: a number must be passed to be missed.
        self.open_one()
        self.peer_reads(lost=False)
        for _ in range(3):  # the first of them may still leave out what was just read
            self.peer_says_what_is_open()
            while self.to_us:
                self.we_read(lost=False)
        assert set(self.ours.open_ids()) == self.open == self.peer_open


OpeningAndClosingOverALossyLink.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestOpeningAndClosingOverALossyLink = OpeningAndClosingOverALossyLink.TestCase
