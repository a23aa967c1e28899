"""A request on a decode node, and what its scheduler says: plain records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from common.engine.batch import ScheduleBatch
from common.engine.chunking import ChunkPlan
from common.kv.allocator import Lease
from common.messages import Begun, Granted
from common.request import FinishReason, LogprobArrays, Request, SampledToken


@dataclass(frozen=True, slots=True)
class RequestKey:
    """A request of any gateway: the gateway's epoch, and the id that it gave."""

    epoch: int
    request_id: int


class Phase(Enum):
    """Where a request is."""

    COMPILING = auto()  # its grammar
    QUEUED = auto()  # also what was retracted
    TRANSFERRING = auto()
    PREFILLING = auto()
    ARRIVED = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(eq=False, slots=True)
class Entry:
    """A request on this node, with what it holds and when it passed which stage for the first time."""

    key: RequestKey
    request: Request
    submitted_s: float
    age: int = 0  # place in the order of arrival
    phase: Phase = Phase.QUEUED
    lease: Lease | None = None
    transfer_id: int | None = None
    attempts: int = 0
    granted: Granted | None = None  # of an earlier attempt, while it waits for another
    prebuilt_s: float | None = None
    second_token_s: float | None = None
    rows: tuple[int, ...] = ()  # its own, and one for each choice more that it stands for
    keys: list[RequestKey] = field(init=False)  # choices that are wanted; one, once the first tokens are in

    def __post_init__(self) -> None:
        """Stand for all choices."""
        self.keys = list(self.all_keys())

    def all_keys(self) -> Iterator[RequestKey]:
        """Name each choice, wanted or not: the ids from the request's on."""
        epoch, first = self.key.epoch, self.key.request_id
        return (RequestKey(epoch, first + i) for i in range(self.request.sampling.num_choices))

    @property
    def num_samples(self) -> int:
        """First tokens that the end of its prompt brings."""
        return 0 if self.request.outputs else self.request.sampling.num_choices

    @property
    def was_retracted(self) -> bool:
        """It has been running: this node computes it again, and no prefill node is asked."""
        return self.request.resumed_ids is not None

    @property
    def rank(self) -> tuple[bool, int]:
        """Among those that wait again: who needs a prefill node comes last, then the older one first."""
        return (not self.was_retracted, self.age)


# What the scheduler tells its node -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenOut:
    """A token for the gateway, the `index`-th of its request."""

    key: RequestKey
    index: int
    sampled: SampledToken
    finish: FinishReason | None
    entry: Entry
    prompt_logprobs: LogprobArrays | None = None  # with the first token, where they were asked for


@dataclass(frozen=True, slots=True)
class RefusedOut:
    """A request that is not taken."""

    key: RequestKey
    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class FailedOut:
    """A request that ended with an error."""

    key: RequestKey
    status: int
    reason: str
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class StampsOut:
    """What became of a prompt, for those who watch; before the tokens that it brings."""

    key: RequestKey
    news: Granted | Begun


Out = TokenOut | RefusedOut | FailedOut | StampsOut


@dataclass(frozen=True, slots=True)
class Grant:
    """A request got pages and a row; `node_id` computes its prompt, or this node when it is None."""

    entry: Entry
    node_id: str | None


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step to launch; `entries` are those that a token is sampled for, in the batch's order."""

    step_id: int
    batch: ScheduleBatch
    entries: tuple[Entry, ...]
    plans: tuple[ChunkPlan, ...]  # of prompts
    planned_s: float


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """A PREBUILT batch: no forward, its first tokens are to be seeded."""

    batch: ScheduleBatch
    entries: tuple[Entry, ...]
