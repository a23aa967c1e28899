"""Credits bound what is under way, and nothing that is lost can stop the flow for good."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import LocalProtocolError, RemoteProtocolError
from transfer.credits import ReceiveWindow, SendWindow

WINDOW = 100
LARGEST_CHUNK = 50  # a window holds two


def test_nothing_is_sent_without_credit() -> None:
    window = SendWindow()
    assert not window.can_send(1)
    with pytest.raises(LocalProtocolError, match="beyond the credit"):
        window.sent(1)


def test_limits_are_totals_and_old_ones_change_nothing() -> None:
    window = SendWindow()
    for limit in (100, 40, 100):
        window.on_limit(limit)
    window.sent(60)
    assert (window.can_send(40), window.can_send(41), window.total) == (True, False, 60)


def test_a_new_limit_is_announced_when_half_a_window_was_consumed() -> None:
    window = ReceiveWindow(100)
    assert window.limit == 100
    assert [window.on_total(total) for total in (10, 49, 50, 60, 99, 100)] == [
        None,
        None,
        150,
        None,
        None,
        200,
    ]


def test_what_was_lost_counts_as_consumed() -> None:
    window = ReceiveWindow(100)
    window.on_total(20)  # a chunk
    assert window.on_total(100) == 200  # the next that arrives: those between were lost


def test_a_sender_beyond_its_credit_is_found_out() -> None:
    window = ReceiveWindow(100)
    with pytest.raises(RemoteProtocolError, match="1 bytes beyond the credit"):
        window.on_total(101)
    assert window.limit == 100


@dataclass(frozen=True)
class Sent:
    """A chunk, or a Status (0 bytes), with the sender's total."""

    num_bytes: int
    total: int


class BytesOverALossyLink(RuleBasedStateMachine):
    """One sender, one receiver; both directions keep order and lose."""

    def __init__(self) -> None:
        super().__init__()
        self.sender = SendWindow()
        self.receiver = ReceiveWindow(WINDOW)
        self.chunks: list[Sent] = []
        self.credits: list[int] = [self.receiver.limit]
        self.under_way = 0  # bytes sent, and not yet known to the receiver as arrived or lost
        self.total = 0

    @rule(num_bytes=st.integers(1, LARGEST_CHUNK))
    def send(self, num_bytes: int) -> None:
        if self.sender.can_send(num_bytes):
            self.sender.sent(num_bytes)
            self.total += num_bytes
            self.chunks.append(Sent(num_bytes, self.sender.total))

    @rule()
    def sender_status(self) -> None:
        self.chunks.append(Sent(0, self.sender.total))

    @rule()
    def receiver_status(self) -> None:
        self.credits.append(self.receiver.limit)

    @precondition(lambda self: self.chunks)
    @rule(lost=st.booleans())
    def arrive(self, lost: bool) -> None:
        sent = self.chunks.pop(0)
        if not lost and (limit := self.receiver.on_total(sent.total)) is not None:
            self.credits.append(limit)

    @precondition(lambda self: self.credits)
    @rule(lost=st.booleans())
    def credit_arrives(self, lost: bool) -> None:
        limit = self.credits.pop(0)
        if not lost:
            self.sender.on_limit(limit)

    @invariant()
    def never_more_than_a_window_under_way(self) -> None:
        assert sum(sent.num_bytes for sent in self.chunks) <= WINDOW
        assert self.sender.total == self.total <= self.receiver.limit

    def teardown(self) -> None:
        """A Status each way, not lost, and the largest chunk can go again."""
        self.sender_status()
        while self.chunks:
            self.arrive(lost=False)
        self.receiver_status()
        while self.credits:
            self.credit_arrives(lost=False)
        assert self.sender.can_send(LARGEST_CHUNK)


BytesOverALossyLink.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestBytesOverALossyLink = BytesOverALossyLink.TestCase
