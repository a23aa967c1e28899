"""A request at a decode node, as the gateway holds it: what was asked, who had it, and what came so far.

It must not know links or which nodes there are; client.py moves it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from common.codec import IntArray
from common.errors import RequestRejected
from common.messages import Begun, Finish, Granted
from common.request import LogprobArrays, SamplingParams, TokenLogprobs
from gateway.nodes import NodeStamps, Take, TokenEvent, pull
from gateway.router import Node

if TYPE_CHECKING:
    from gateway.submission import Submission


SLICE_TOKENS = 256


class Stream:
    """See `RequestStream`; one choice of a submission."""

    def __init__(
        self,
        submission: Submission,
        request_id: int,
        prompt_ids: IntArray,
        sampling: SamplingParams,
        abort: Callable[[Stream], None],
    ) -> None:
        self.submission = submission
        self.request_id = request_id
        self.node: Node  # who has it
        self.given_s: float  # when it was given to that node
        self.stamps: NodeStamps  # of that node
        self.received = 0
        self.scores: LogprobArrays | None = None  # of the prompt; they come before its first token
        self.open = True
        self.timer: asyncio.TimerHandle | None = None
        self._prompt_ids = prompt_ids
        self._sampling = sampling
        self._abort = abort
        self._events: asyncio.Queue[TokenEvent | RequestRejected] = asyncio.Queue()
        self._take: Take | None = None  # who follows
        self._pulling: asyncio.Task[None] | None = None

    async def next(self) -> TokenEvent:
        """Wait for more tokens; raises RequestRejected when the request failed."""
        event = await self._events.get()
        if isinstance(event, RequestRejected):
            raise event
        if (scores := self.scores) is None:
            return event
        self.scores = None
        prompt_logprobs: list[TokenLogprobs] = []
        for start in range(0, len(scores.logprobs), SLICE_TOKENS):
            prompt_logprobs += scores.rows(start, start + SLICE_TOKENS)
            await asyncio.sleep(0)  # other streams get on between two slices
        return event._replace(prompt_logprobs=tuple(prompt_logprobs))

    def lacks_scores(self) -> bool:
        """Say whether the prompt's log probabilities were asked for and did not come, or are another's."""
        num_top = self._sampling.num_prompt_logprobs
        if num_top is None:
            return False
        return self.scores is None or not self.scores.fits(len(self._prompt_ids) - 1, num_top)

    def follow(self, take: Take) -> None:
        """Hand everything over as it comes."""
        if self._sampling.num_prompt_logprobs is not None:
            self._pulling = asyncio.create_task(pull(self, take))
            return
        self._take = take
        while not self._events.empty():
            take(self._events.get_nowait())

    def abort(self) -> None:
        """Give the request up."""
        self._take = None
        if self._pulling is not None:
            self._pulling.cancel()
        if self.open:
            self._abort(self)

    def stop_timer(self) -> None:
        """Watch the deadline no more."""
        if self.timer is not None:
            self.timer.cancel()

    def note_taken(self) -> None:
        """Its node has it. Since when it says later: until then, since it was sent."""
        if self.stamps.queued_s is None:
            self.stamps = replace(self.stamps, queued_s=self.given_s)

    def note_granted(self, granted: Granted) -> None:
        """It has pages at its node, perhaps once more."""
        offset_s = self.node.peer.offset_s
        self.stamps = NodeStamps(
            self.stamps.decode_node,
            granted.prefill_node,
            queued_s=granted.queued_s + offset_s,
            granted_s=granted.granted_s + offset_s,
        )

    def note_begun(self, begun: Begun) -> None:
        """Its first token is here; what was said when it got its pages may have been lost."""
        self.note_granted(begun.granted)
        offset_s = self.node.peer.offset_s
        prefill = begun.prefill.shifted(offset_s)
        self.stamps = replace(
            self.stamps,
            prefill_start_s=prefill.start_s,
            chunks_s=prefill.chunks_s,
            committed_s=prefill.committed_s,
            arrived_s=begun.arrived_s + offset_s,
        )

    def note_finished(self, finish: Finish) -> None:
        """Its last token is here."""
        offset_s = self.node.peer.offset_s
        prebuilt_s, second_s = finish.prebuilt_s, finish.second_token_s
        self.stamps = replace(
            self.stamps,
            prebuilt_s=None if prebuilt_s is None else prebuilt_s + offset_s,
            second_token_s=None if second_s is None else second_s + offset_s,
        )

    def put(self, event: TokenEvent | RequestRejected) -> None:
        """Hand over what came."""
        if self._take is not None:
            self._take(event)
        else:
            self._events.put_nowait(event)
