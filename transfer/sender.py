"""P's machine of one transfer. Pure: no clock, no socket, no tensor.

It knows which pages are to go, which have left and whether the first token is there; it says when to
commit, and when P's pages are free again. Computing is the scheduler's business, bytes are the plane's.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import LocalProtocolError
from common.messages import Abort, Choice, Commit, Failed, Quiesced, Rejected
from common.request import LogprobArrays, PrefillStamps
from transfer.states import SENDER_ENDS, SENDER_TABLE, SenderEvent, SenderState

# Inputs: the message Abort, and ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Pages for the whole prompt were found; the first chunk is planned."""


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """These pages, by logical index, are final (once the chunk's forward is done) and can go."""

    first_page: int
    page_ids: tuple[int, ...]
    is_last: bool


@dataclass(frozen=True, slots=True)
class Posted:
    """So many pages have left, in order."""

    num_pages: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of each choice was sampled."""

    choices: tuple[Choice, ...]
    stamps: PrefillStamps
    prompt_logprobs: LogprobArrays | None = None


@dataclass(frozen=True, slots=True)
class Reject:
    """We cannot take the transfer at all."""

    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """We cannot go on with it."""

    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """D is gone, or its Status does not know the transfer."""


@dataclass(frozen=True, slots=True)
class Quiet:
    """The plane reads nothing of this transfer any more."""


# Outputs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to D."""

    message: Commit | Rejected | Failed | Quiesced


@dataclass(frozen=True, slots=True)
class Post:
    """Give these pages to the plane, behind what it was given before."""

    first_page: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Compute no more of it, and have the plane drop what has not left; then say Quiet."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The transfer is over: P's pages are its own again (a launched step may still hold a fence)."""


Input = Abort | Start | ChunkComputed | Posted | FirstToken | Reject | Fail | Lost | Quiet
Output = Send | Post | Stop | Ended


class Sender:
    """One transfer of `num_pages` pages."""

    def __init__(self, transfer_id: int, num_pages: int) -> None:
        self.transfer_id = transfer_id
        self.num_pages = num_pages
        self.state = SenderState.QUEUED
        self._pages_computed = 0
        self._pages_posted = 0
        self._first_token: FirstToken | None = None
        self._last_word: Quiesced | Failed | None = None  # what D is told once we are quiet

    @property
    def ended(self) -> bool:
        """Nothing more will happen here."""
        return self.state in SENDER_ENDS

    def handle(self, input_: Input) -> tuple[Output, ...]:
        """Take one input; return what is to be done.

        Raises:
            LocalProtocolError: our own node did something that has no place in this state.
        """
        match input_:
            case Start():
                self._step(SenderEvent.START)
                return ()
            case ChunkComputed():
                return self._chunk(input_)
            case Posted(num_pages):
                self._step(SenderEvent.POSTED)
                self._pages_posted += num_pages
                return self._commit_if_complete()
            case FirstToken():
                self._step(SenderEvent.FIRST_TOKEN)
                if self._first_token is not None:
                    raise LocalProtocolError("a second first token")
                self._first_token = input_
                return self._commit_if_complete()
            case Reject(status, reason):
                self._step(SenderEvent.REJECT)
                return (Send(Rejected(self.transfer_id, status, reason)), Ended())
            case Fail(status, reason):
                return self._stop(SenderEvent.FAIL, Failed(self.transfer_id, status, reason))
            case Abort():
                return self._stop(SenderEvent.ABORT, Quiesced(self.transfer_id))
            case Lost():
                return self._stop(SenderEvent.LOST, None)
            case Quiet():
                self._step(SenderEvent.QUIET)
                return self._end()

    # ------------------------------------------------------------------------------------------------------

    def _step(self, event: SenderEvent) -> SenderState:
        before = self.state
        after = SENDER_TABLE.get((before, event))
        if after is None:
            raise LocalProtocolError(f"{event.name} while {before.name}")
        self.state = after
        return before

    def _chunk(self, chunk: ChunkComputed) -> tuple[Output, ...]:
        if chunk.first_page != self._pages_computed:
            raise LocalProtocolError(f"chunk at page {chunk.first_page}, expected {self._pages_computed}")
        self._step(SenderEvent.LAST_CHUNK if chunk.is_last else SenderEvent.CHUNK)
        self._pages_computed += len(chunk.page_ids)
        if chunk.is_last and self._pages_computed != self.num_pages:
            raise LocalProtocolError(f"last chunk ends at page {self._pages_computed} of {self.num_pages}")
        return (Post(chunk.first_page, chunk.page_ids),) if chunk.page_ids else ()

    def _commit_if_complete(self) -> tuple[Output, ...]:
        token = self._first_token
        if self.state is not SenderState.SENDING or self._pages_posted != self.num_pages or token is None:
            return ()
        self._step(SenderEvent.COMPLETE)
        scores = token.prompt_logprobs or LogprobArrays()
        arrays = scores.logprobs, scores.top_ids, scores.top_logprobs
        commit = Commit(self.transfer_id, self.num_pages, token.stamps, token.choices, *arrays)
        return (Send(commit), Ended())

    def _stop(self, event: SenderEvent, last_word: Quiesced | Failed | None) -> tuple[Output, ...]:
        before = self._step(event)
        if before is SenderState.QUIESCING:
            # An Abort is answered even when we had given up for a reason of our own.
            self._last_word = self._last_word or last_word
            return ()
        self._last_word = last_word
        if self.state is SenderState.CLOSED:
            return (Stop(), *self._end())
        return (Stop(),)

    def _end(self) -> tuple[Output, ...]:
        word = self._last_word
        return (Ended(),) if word is None else (Send(word), Ended())
