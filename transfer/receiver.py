"""D's machine of one transfer. Pure: no clock, no socket, no tensor.

It decides whether a chunk is the next one, when the hand-over is complete, whom to tell, and when D's pages
are D's again. Where D places the bytes itself (plane `frames`) they are as soon as it gives up. On one-sided
planes P may still be writing: they rest until P says `Quiesced`, `Rejected` or `Failed`, or until its process
is known to be gone. No timeout ends that: a stopped process goes on writing when it wakes.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import RemoteProtocolError
from common.messages import Abort, Chunk, Commit, Failed, Quiesced, Rejected
from common.request import SamplingParams
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
    """The link is down, or P's Status does not know the transfer.

    `quiet`: P writes no more, because its process is gone or because it does not know the transfer.
    """

    reason: str
    quiet: bool


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
class Scored:
    """What a Commit must say of the prompt: of so many tokens, with so many likeliest ones each."""

    num_tokens: int = 0
    num_top: int = 0

    @classmethod
    def of(cls, sampling: SamplingParams, prompt_len: int) -> Scored:
        """All tokens but the first, where the request asks for it."""
        num_top = sampling.num_prompt_logprobs
        return cls() if num_top is None else cls(prompt_len - 1, num_top)


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
class PagesFree:
    """Nobody but D writes the pages of a transfer that was not completed. Said once."""


Message = Chunk | Commit | Rejected | Failed | Quiesced
Input = Message | GiveUp | Broken | Lost | Tick
Output = Send | Place | Done | GaveOut | PagesFree


class Receiver:
    """One transfer of `num_pages` pages; `one_sided` where P writes into them by itself."""

    def __init__(
        self,
        transfer_id: int,
        num_pages: int,
        *,
        one_sided: bool,
        num_choices: int = 1,
        scored: Scored = Scored(),
    ) -> None:
        self._num_choices = num_choices
        self._scored = scored
        self._one_sided = one_sided
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
                return self._quiet()
            case GiveUp():
                return self._give_up(ReceiverEvent.ABORT, now)
            case Broken(reason):
                return self._broken(reason, now)
            case Lost():
                return self._lost(input_, now)
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
            self.pages_in != self.num_pages or commit.num_pages != self.num_pages
        ):
            return self._broken(f"committed with {self.pages_in} of {self.num_pages} pages", now)
        if self.state is not ReceiverState.ABORTING and len(commit.choices) != self._num_choices:
            return self._broken(f"committed {len(commit.choices)} of {self._num_choices} choices", now)
        if self.state is not ReceiverState.ABORTING and not commit.logprob_arrays().fits(
            self._scored.num_tokens, self._scored.num_top
        ):
            return self._broken("committed with log probabilities that do not fit the prompt", now)
        if self._step(ReceiverEvent.COMMIT) is ReceiverState.ABORTING:
            return ()
        return (Done(commit),)

    def _refused(self, gave_out: GaveOut) -> tuple[Output, ...]:
        if self._step(ReceiverEvent.REFUSED) is ReceiverState.ABORTING:
            return self._quiet()
        return (gave_out, PagesFree())

    def _broken(self, reason: str, now: float) -> tuple[Output, ...]:
        was_aborting = self.state is ReceiverState.ABORTING
        outputs = self._give_up(ReceiverEvent.BROKEN, now)
        # Before PagesFree: until then our owner takes the pages to be the transfer's.
        return outputs if was_aborting else (GaveOut(503, reason, retryable=True), *outputs)

    def _lost(self, lost: Lost, now: float) -> tuple[Output, ...]:
        if self._one_sided and not lost.quiet:
            # P lives, out of reach: it is asked again and again whether it is quiet.
            return self._broken(lost.reason, now)
        if self._step(ReceiverEvent.LOST) is ReceiverState.ABORTING:
            return self._quiet()
        return (GaveOut(503, lost.reason, retryable=True), PagesFree())

    def _quiet(self) -> tuple[Output, ...]:
        """P is quiet about a transfer that we gave up: news only where we waited for it."""
        return (PagesFree(),) if self._one_sided else ()

    def _give_up(self, event: ReceiverEvent, now: float) -> tuple[Output, ...]:
        if self._step(event) is ReceiverState.ABORTING:
            return ()
        self._abort_due_s = now + ABORT_RETRY_S
        abort = Send(Abort(self.transfer_id))
        return (abort,) if self._one_sided else (abort, PagesFree())

    def _tick(self, now: float) -> tuple[Output, ...]:
        due = self.deadline()
        if due is None or now < due:
            return ()
        self._step(ReceiverEvent.RETRY)
        self._abort_due_s = now + ABORT_RETRY_S
        return (Send(Abort(self.transfer_id)),)
