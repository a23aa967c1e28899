"""Nodes in the process, without a model: for tests of the HTTP side and for measuring it.

A request's tokens come from a script, by default its own prompt over and over; EOS, stop tokens, min_tokens
and max_tokens end it as on a real node. It can be told to refuse, fail or hold.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import NoReturn

from common.codec import IntArray
from common.errors import RequestRejected
from common.messages import PageLedger, Role
from common.request import FinishReason, SamplingParams, TokenLogprobs
from gateway.errors import deadline_exceeded
from gateway.nodes import NodeSnapshot, NodeStamps, Take, TokenEvent, pull
from gateway.submission import each_choice


def echo(prompt_ids: IntArray) -> Sequence[int]:
    """Answer a prompt with itself."""
    return prompt_ids


def likeliest(token_id: int, num: int) -> TokenLogprobs:
    """Say that a token was the likeliest, and those after it in the vocabulary came next."""
    top_ids = tuple(range(token_id, token_id + num))
    return TokenLogprobs(-0.25, top_ids, tuple(-0.25 - i for i in range(num)))


@dataclass(frozen=True, slots=True)
class Script:
    """How requests go. `tokens` gives the answer, which is repeated until something ends the request.

    `score` gives a token's log probabilities, and those of as many likeliest ones as the request wants.
    `hold_after`, `fail_after`: after so many tokens the request waits for its deadline, or fails with
    `failure`.
    """

    tokens: Callable[[IntArray], Sequence[int]] = echo
    score: Callable[[int, int], TokenLogprobs] = likeliest
    tokens_per_event: int = 1
    eos_token_ids: tuple[int, ...] = ()
    hold_after: int | None = None
    fail_after: int | None = None
    failure: Exception = field(
        default_factory=lambda: RequestRejected("the decode node died", status=503, retry_after_s=1)
    )
    refusal: RequestRejected | None = None


class FakeStream:
    """One request; see `RequestStream`."""

    def __init__(
        self, nodes: FakeNodes, prompt_ids: IntArray, sampling: SamplingParams, timeout_s: float | None
    ) -> None:
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.timeout_s = timeout_s
        self.ended = False  # by its finish, its failure or an abort
        self.aborted = False  # before it ended by itself
        now = time.monotonic()
        self.stamps = NodeStamps("decode-1", "prefill-1", queued_s=now, granted_s=now)
        self._nodes = nodes
        self._script = nodes.script
        self._tokens: Iterator[int] = cycle(self._script.tokens(prompt_ids))
        self._num_tokens = 0
        self._pulling: asyncio.Task[None] | None = None

    async def next(self) -> TokenEvent:
        """Return the script's next tokens."""
        await asyncio.sleep(0)  # as if they had come from elsewhere: others run in between
        token_ids: list[int] = []
        finish: FinishReason | None = None
        while finish is None and len(token_ids) < self._script.tokens_per_event:
            if self._num_tokens == self._script.fail_after:
                self._end()
                raise self._script.failure
            if self._num_tokens == self._script.hold_after:
                if token_ids:
                    break
                await self._hold()
            token_ids.append(next(self._tokens))
            self._num_tokens += 1
            finish = self.sampling.finish_reason(token_ids[-1], self._num_tokens, self._script.eos_token_ids)
        if finish is not None:
            self._end()
        num = self.sampling.num_logprobs
        scores = () if num is None else tuple(self._script.score(token_id, num) for token_id in token_ids)
        is_first = self._num_tokens == len(token_ids)
        self._stamp(is_first=is_first)
        return TokenEvent(tuple(token_ids), finish, scores, self._prompt_logprobs() if is_first else None)

    def _stamp(self, *, is_first: bool) -> None:
        """Say that the prompt took two chunks and the hand-over as long, each a fifth of what passed."""
        now, stamps = time.monotonic(), self.stamps
        if is_first and stamps.granted_s is not None:
            fifth_s = (now - stamps.granted_s) / 5
            start_s, *chunks_s, committed_s = (stamps.granted_s + fifth_s * i for i in range(1, 5))
            self.stamps = stamps = replace(
                stamps,
                prefill_start_s=start_s,
                chunks_s=tuple(chunks_s),
                committed_s=committed_s,
                arrived_s=now,
            )
        if self._num_tokens > 1 and stamps.second_token_s is None:
            self.stamps = replace(stamps, prebuilt_s=stamps.arrived_s, second_token_s=now)

    def _prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        num = self.sampling.num_prompt_logprobs
        return None if num is None else tuple(self._script.score(i, num) for i in self.prompt_ids[1:])

    def follow(self, take: Take) -> None:
        """Hand over the script's tokens."""
        self._pulling = asyncio.create_task(pull(self, take))

    def abort(self) -> None:
        """Give the request up."""
        if self._pulling is not None:
            self._pulling.cancel()
        if not self.ended:
            self.aborted = True
            self._end()

    async def _hold(self) -> NoReturn:
        """Wait for ever, or for the whole timeout: the time before counts as nothing."""
        try:
            await asyncio.wait_for(asyncio.Event().wait(), self.timeout_s)
        except TimeoutError:
            self._end()
            raise deadline_exceeded("the request did not end in time") from None
        raise AssertionError("nobody sets that event")

    def _end(self) -> None:
        with self._nodes.changed:
            self.ended = True
            self._nodes.changed.notify_all()


class FakeNodes:
    """A pair of nodes; see `Nodes`. Its attributes may be changed between calls, from any thread."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.capacity: int | None = None
        self.is_usable = True
        self.stalled_ids: tuple[str, ...] = ()
        self.missing: tuple[str, ...] = ()
        self.streams: list[FakeStream] = []  # all that were submitted, in order
        self.changed = threading.Condition()  # notified when a request is submitted or ends

    def submit(
        self, prompt_ids: IntArray, sampling: SamplingParams, timeout_s: float | None = None
    ) -> tuple[FakeStream, ...]:
        """Start a request for each choice, or refuse it as the script says."""
        if self.script.refusal is not None:
            raise self.script.refusal
        streams = tuple(FakeStream(self, prompt_ids, one, timeout_s) for one in each_choice(sampling))
        with self.changed:
            self.streams += streams
            self.changed.notify_all()
        return streams

    def capacity_tokens(self) -> int | None:
        """Return the attribute `capacity`."""
        return self.capacity

    def usable(self) -> bool:
        """Return the attribute `is_usable`."""
        return self.is_usable

    def stalled(self) -> tuple[str, ...]:
        """Return the attribute `stalled_ids`."""
        return self.stalled_ids

    async def snapshot(self) -> tuple[tuple[NodeSnapshot, ...], tuple[str, ...]]:
        """Show one page active for each request that has not ended."""
        active = sum(not stream.ended for stream in self.streams)
        pages = PageLedger(total=100, free=100 - active, active=active)
        nodes = (
            NodeSnapshot("prefill-1", Role.PREFILL, 11, PageLedger(total=100, free=100), {"steps": 3}),
            NodeSnapshot("decode-1", Role.DECODE, 12, pages, {"steps": 5, "requests_finished": 2}),
        )
        return tuple(node for node in nodes if node.node_id not in self.missing), self.missing

    def counters(self) -> dict[str, int]:
        """Return a counter of the protocol."""
        return {"messages_rejected": 0}

    def restarts(self) -> dict[str, dict[str, int]]:
        """Return restarts of one role."""
        return {"decode": {"died": 1}}

    def wait_submitted(self, count: int, timeout_s: float) -> bool:
        """Block until so many requests were submitted in all."""
        with self.changed:
            return self.changed.wait_for(lambda: len(self.streams) >= count, timeout_s)

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until every request has ended."""
        with self.changed:
            return self.changed.wait_for(lambda: all(stream.ended for stream in self.streams), timeout_s)
