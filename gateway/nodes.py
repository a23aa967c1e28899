"""The seam between HTTP and the nodes: submit token ids, get token ids back.

`client.py` implements it over the network, `fake.py` in the process. Nothing here knows text or HTTP, and
nothing behind it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from common.codec import IntArray
from common.messages import PageLedger, Role
from common.request import FinishReason, SamplingParams, TokenLogprobs


class TokenEvent(NamedTuple):  # not a frozen dataclass: there is one a token, and those take a microsecond
    """The next tokens of a request, at least one; the last event has a finish.

    The first has the prompt's log probabilities, where the request asked for them: one for every token of the
    prompt but the first.
    """

    token_ids: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, when the request asked for them
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class NodeStamps:
    """When nodes did what for a request, in seconds of this process's time.monotonic(); None: not (yet).

    What another process said of itself, so it may be wrong: a clock between hosts is an estimate, and nobody
    has checked the order. Of a request that was moved, or a transfer that was tried again, it is the last.
    """

    decode_node: str
    prefill_node: str | None = None  # None: the decode node computes it, or it has not been granted yet
    queued_s: float | None = None  # the decode node took it; of one that waits there still: it was sent
    granted_s: float | None = None  # it has pages, and a prefill node
    prefill_start_s: float | None = None  # the first chunk was launched
    chunks_s: tuple[float, ...] = ()  # when each chunk was done; the last one gave the first token
    committed_s: float | None = None  # the prefill node had sent all; None where no hand-over was needed
    arrived_s: float | None = None  # the decode node has the first token, and the pages
    prebuilt_s: float | None = None  # it joined the running batch
    second_token_s: float | None = None


# Takes the next tokens of a request, or what made it fail: the last that comes then. It must not raise.
Take = Callable[[TokenEvent | Exception], None]


class RequestStream(Protocol):
    """A request that was submitted. Whoever submitted it calls `abort` in the end, whatever happened."""

    @property
    def stamps(self) -> NodeStamps:
        """Return what is known by now; may be read at any time, also after the end."""
        ...

    async def next(self) -> TokenEvent:
        """Wait for more tokens; not called again after an event with a finish.

        Raises:
            RequestRejected: the request was refused or failed, with the status to answer.
        """
        ...

    def follow(self, take: Take) -> None:
        """Have everything handed over as it comes, up to a finish, a failure or `abort`; instead of `next`.

        So all tokens of a step go to their clients in one go, without a task that wakes up for each.
        """
        ...

    def abort(self) -> None:
        """Give the request up, wherever it is; idempotent, after its end too. Returns at once."""
        ...


async def pull(stream: RequestStream, take: Take) -> None:
    """Follow a request by `next`, where there is something to wait for between two events."""
    finished = False
    while not finished:
        try:
            event = await stream.next()
        except Exception as failure:
            take(failure)
            return
        take(event)
        finished = event.finish is not None


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """What a node answered when it was asked for its ledger and counters."""

    node_id: str
    role: Role
    epoch: int
    pages: PageLedger
    counters: dict[str, int]
    running: int = 0  # requests, by its last Status
    queued: int = 0
    page_bytes: int = 0  # of a KV page, over all layers


class Nodes(Protocol):
    """All prefill and decode nodes, as the HTTP side sees them."""

    def submit(
        self, prompt_ids: IntArray, sampling: SamplingParams, timeout_s: float | None = None
    ) -> tuple[RequestStream, ...]:
        """Hand a request to a decode node; `prompt_ids` is an array of int32, not empty.

        Returns a stream for each of its `sampling.num_choices`, in order: requests of their own from here on.
        After `timeout_s` they fail with 504, whatever the nodes do; None: never.

        Raises:
            RequestRejected: 503 with Retry-After when no pair of nodes is usable.
        """
        ...

    def capacity_tokens(self) -> int | None:
        """Return the largest prompt + answer that every decode node can hold; None while none is known."""
        ...

    def usable(self) -> bool:
        """Say whether a request could be served now."""
        ...

    def stalled(self) -> tuple[str, ...]:
        """Return the ids of nodes that have work and made no step for 30 s."""
        ...

    async def snapshot(self) -> tuple[tuple[NodeSnapshot, ...], tuple[str, ...]]:
        """Ask every node afresh; the second part names those that did not answer."""
        ...

    def counters(self) -> dict[str, int]:
        """Return the protocol counters of this process, for example `messages_rejected`."""
        ...

    def restarts(self) -> dict[str, dict[str, int]]:
        """Return how often the supervisor started each role again, by why: died, left, stalled or slow."""
        ...
