"""D's machine of one transfer. Pure: no clock, no socket, no tensor.

It decides whether a chunk is the next one, when the hand-over is complete, and whom to tell. Where bytes
go is the plane's business, which pages they are is D's: on the plane `frames` D places the bytes itself,
so its pages are its own again as soon as it gives up, and need not wait for `Quiesced`.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import RemoteProtocolError
from common.messages import Abort, Chunk, Commit, Failed, Quiesced, Rejected
from transfer.states import RECEIVER_ENDS, RECEIVER_TABLE, ReceiverEvent, ReceiverState

ABORT_RETRY_S = 1.0


# Inputs: the messages Chunk, Commit, Rejected, Failed, Quiesced, and ------------------------------------


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Our owner has no more use for the transfer."""


@dataclass(frozen=True, slots=True)
class Broken:
    """What came cannot be right: a checksum, a size, a message out of place."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The link is down, or P's Status does not know the transfer."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


# Outputs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to P."""

    message: Abort


@dataclass(frozen=True, slots=True)
class Place:
    """Put the chunk's bytes into the pages of these logical indices."""

    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Done:
    """Pages and first token are in."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class GaveOut:
    """The transfer will not be completed; the request may try another P unless P refused it for good."""

    status: int
    reason: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Closed:
    """P is quiet: an aborted transfer is over."""


Input = Chunk | Commit | Rejected | Failed | Quiesced | GiveUp | Broken | Lost | Tick
Output = Send | Place | Done | GaveOut | Closed


class Receiver:
    """One transfer of `num_pages` pages."""

    def __init__(self, transfer_id: int, num_pages: int) -> None:
        self.transfer_id = transfer_id
        self.num_pages = num_pages
        self.pages_in = 0
        self.state = ReceiverState.GRANTED
        self._abort_due_s: float | None = None

    @property
    def ended(self) -> bool:
        """Nothing more will happen here."""
        return self.state in RECEIVER_ENDS

    def deadline(self) -> float | None:
        """When `Tick` has something to do, or None."""
        return self._abort_due_s if self.state is ReceiverState.ABORTING else None

    def handle(self, input_: Input, now: float) -> tuple[Output, ...]:
        """Take one input; return what is to be done.

        Raises:
            RemoteProtocolError: the message has no place in this state; feed it back as `Broken`.
        """
        match input_:
            case Chunk():
                return self._chunk(input_, now)
            case Commit():
                return self._commit(input_, now)
            case Rejected(status=status, reason=reason):
                return self._refused(GaveOut(status, reason, retryable=False))
            case Failed(status=status, reason=reason):
                return self._refused(GaveOut(status, reason, retryable=True))
            case Quiesced():
                self._step(ReceiverEvent.QUIESCED)
                return (Closed(),)
            case GiveUp():
                return self._give_up(ReceiverEvent.ABORT, now)
            case Broken(reason):
                return self._broken(reason, now)
            case Lost(reason):
                return self._lost(reason)
            case Tick():
                return self._tick(now)

    # ------------------------------------------------------------------------------------------------------

    def _step(self, event: ReceiverEvent) -> ReceiverState:
        before = self.state
        after = RECEIVER_TABLE.get((before, event))
        if after is None:
            raise RemoteProtocolError(f"{event.name} while {before.name}")
        self.state = after
        return before

    def _chunk(self, chunk: Chunk, now: float) -> tuple[Output, ...]:
        if self.state is not ReceiverState.ABORTING:
            if chunk.first_page != self.pages_in:
                return self._broken(f"pages from {chunk.first_page} on, expected {self.pages_in}", now)
            if self.pages_in + chunk.num_pages > self.num_pages:
                return self._broken(f"more than {self.num_pages} pages", now)
        if self._step(ReceiverEvent.CHUNK) is ReceiverState.ABORTING:
            return ()
        self.pages_in += chunk.num_pages
        return (Place(chunk),)

    def _commit(self, commit: Commit, now: float) -> tuple[Output, ...]:
        if self.state is not ReceiverState.ABORTING and (
            self.pages_in != self.num_pages or commit.num_pages != self.num_pages or len(commit.choices) != 1
        ):
            return self._broken(f"committed with {self.pages_in} of {self.num_pages} pages", now)
        if self._step(ReceiverEvent.COMMIT) is ReceiverState.ABORTING:
            return ()
        return (Done(commit),)

    def _refused(self, gave_out: GaveOut) -> tuple[Output, ...]:
        if self._step(ReceiverEvent.REFUSED) is ReceiverState.ABORTING:
            return (Closed(),)
        return (gave_out,)

    def _broken(self, reason: str, now: float) -> tuple[Output, ...]:
        was_aborting = self.state is ReceiverState.ABORTING
        aborts = self._give_up(ReceiverEvent.BROKEN, now)
        return aborts if was_aborting else (*aborts, GaveOut(503, reason, retryable=True))

    def _lost(self, reason: str) -> tuple[Output, ...]:
        if self._step(ReceiverEvent.LOST) is ReceiverState.ABORTING:
            return (Closed(),)
        return (GaveOut(503, reason, retryable=True),)

    def _give_up(self, event: ReceiverEvent, now: float) -> tuple[Output, ...]:
        if self._step(event) is ReceiverState.ABORTING:
            return ()
        self._abort_due_s = now + ABORT_RETRY_S
        return (Send(Abort(self.transfer_id)),)

    def _tick(self, now: float) -> tuple[Output, ...]:
        due = self.deadline()
        if due is None or now < due:
            return ()
        self._step(ReceiverEvent.RETRY)
        self._abort_due_s = now + ABORT_RETRY_S
        return (Send(Abort(self.transfer_id)),)
