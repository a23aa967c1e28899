"""The states of a transfer, one hand-over of KV pages and first token, and how they follow each other.

    D (receiver)  GRANTED ─► RECEIVING ─► DONE             any ─failed/lost─► FAILED
                     └────────┴─abort─► ABORTING ─quiesced─► CLOSED

    P (sender)    QUEUED ─► COMPUTING ─► SENDING ─► COMMITTED
                     │          └────────────┴─abort─► QUIESCING ─quiet─► CLOSED
                     └─abort─► CLOSED

Everything that affects transitions is in the two tables; a missing key is the protocol error. Ends are
DONE, FAILED, CLOSED and COMMITTED: the endpoint then forgets the transfer, and what still comes for it is
counted and dropped.
"""

from __future__ import annotations

from enum import Enum, auto


class ReceiverState(Enum):
    """D's side."""

    GRANTED = auto()  # pages given, Prefill sent
    RECEIVING = auto()  # some pages are in
    DONE = auto()  # all pages and the first token are in
    ABORTING = auto()  # given up; P has not yet said that it is quiet
    CLOSED = auto()  # given up, and P is quiet
    FAILED = auto()  # P gave up, or is gone


class ReceiverEvent(Enum):
    """What happens to D's side."""

    CHUNK = auto()  # the next pages, in order
    COMMIT = auto()  # the first token, with all pages in
    BROKEN = auto()  # pages are missing, out of order, or wrong
    ABORT = auto()  # our owner gives up
    REFUSED = auto()  # P's Rejected or Failed: it writes no more
    QUIESCED = auto()  # P's answer to Abort
    LOST = auto()  # the link went down, or P's Status does not know the transfer
    RETRY = auto()  # Abort was not answered in time


class SenderState(Enum):
    """P's side."""

    QUEUED = auto()  # waits for pages
    COMPUTING = auto()  # chunks are computed, and sent behind
    SENDING = auto()  # all computed; pages or first token are still to go
    COMMITTED = auto()  # all sent
    QUIESCING = auto()  # given up; our own reads are still running
    CLOSED = auto()  # given up, quiet


class SenderEvent(Enum):
    """What happens to P's side."""

    START = auto()  # pages were found, the first chunk is planned
    CHUNK = auto()  # a chunk, not the last, is to be sent
    LAST_CHUNK = auto()  # the last one is
    POSTED = auto()  # pages have left
    COMPLETE = auto()  # the last thing that was missing (pages or first token) is there
    ABORT = auto()  # D gives up
    LOST = auto()  # D is gone, or its Status does not know the transfer
    FIRST_TOKEN = auto()  # the first token was sampled
    REJECT = auto()  # we cannot take it at all
    FAIL = auto()  # we cannot go on
    QUIET = auto()  # nothing reads our pages any more


R, RE = ReceiverState, ReceiverEvent
RECEIVER_TABLE: dict[tuple[ReceiverState, ReceiverEvent], ReceiverState] = {
    (R.GRANTED, RE.CHUNK): R.RECEIVING,
    (R.GRANTED, RE.BROKEN): R.ABORTING,
    (R.GRANTED, RE.ABORT): R.ABORTING,
    (R.GRANTED, RE.REFUSED): R.FAILED,
    (R.GRANTED, RE.LOST): R.FAILED,
    (R.RECEIVING, RE.CHUNK): R.RECEIVING,
    (R.RECEIVING, RE.COMMIT): R.DONE,
    (R.RECEIVING, RE.BROKEN): R.ABORTING,
    (R.RECEIVING, RE.ABORT): R.ABORTING,
    (R.RECEIVING, RE.REFUSED): R.FAILED,
    (R.RECEIVING, RE.LOST): R.FAILED,
    (R.ABORTING, RE.CHUNK): R.ABORTING,
    (R.ABORTING, RE.COMMIT): R.ABORTING,  # P forgets it with Commit; its Quiesced still answers our Abort
    (R.ABORTING, RE.BROKEN): R.ABORTING,
    (R.ABORTING, RE.ABORT): R.ABORTING,
    (R.ABORTING, RE.RETRY): R.ABORTING,
    (R.ABORTING, RE.REFUSED): R.CLOSED,
    (R.ABORTING, RE.QUIESCED): R.CLOSED,
    (R.ABORTING, RE.LOST): R.CLOSED,
}

P, PE = SenderState, SenderEvent
SENDER_TABLE: dict[tuple[SenderState, SenderEvent], SenderState] = {
    (P.QUEUED, PE.START): P.COMPUTING,
    (P.QUEUED, PE.ABORT): P.CLOSED,
    (P.QUEUED, PE.LOST): P.CLOSED,
    (P.QUEUED, PE.REJECT): P.CLOSED,
    (P.QUEUED, PE.FAIL): P.CLOSED,
    (P.COMPUTING, PE.CHUNK): P.COMPUTING,
    (P.COMPUTING, PE.LAST_CHUNK): P.SENDING,
    (P.COMPUTING, PE.POSTED): P.COMPUTING,
    (P.COMPUTING, PE.ABORT): P.QUIESCING,
    (P.COMPUTING, PE.LOST): P.QUIESCING,
    (P.COMPUTING, PE.FAIL): P.QUIESCING,
    (P.SENDING, PE.POSTED): P.SENDING,
    (P.SENDING, PE.FIRST_TOKEN): P.SENDING,
    (P.SENDING, PE.COMPLETE): P.COMMITTED,
    (P.SENDING, PE.ABORT): P.QUIESCING,
    (P.SENDING, PE.LOST): P.QUIESCING,
    (P.SENDING, PE.FAIL): P.QUIESCING,
    (P.QUIESCING, PE.POSTED): P.QUIESCING,
    (P.QUIESCING, PE.FIRST_TOKEN): P.QUIESCING,
    (P.QUIESCING, PE.ABORT): P.QUIESCING,
    (P.QUIESCING, PE.LOST): P.QUIESCING,
    (P.QUIESCING, PE.FAIL): P.QUIESCING,
    (P.QUIESCING, PE.QUIET): P.CLOSED,
}

RECEIVER_ENDS = frozenset({R.DONE, R.CLOSED, R.FAILED})
SENDER_ENDS = frozenset({P.COMMITTED, P.CLOSED})
