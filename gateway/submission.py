"""A prompt that was submitted, with its choices: requests of their own, all at one decode node.

Their ids follow each other. It must not know links; client.py moves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace

from common.codec import IntArray
from common.messages import Submit
from common.request import SamplingParams
from gateway.nodes import NodeStamps
from gateway.router import Node
from gateway.stream import Stream


class Submission:
    """A request for each choice; `deadline_s` is on the event loop's clock, None: there is none."""

    def __init__(
        self,
        first_id: int,
        prompt_ids: IntArray,
        sampling: SamplingParams,
        deadline_s: float | None,
        abort: Callable[[Stream], None],
    ) -> None:
        self.streams = tuple(
            Stream(self, first_id + i, prompt_ids, one, abort) for i, one in enumerate(each_choice(sampling))
        )
        self.tried: set[int] = set()  # epochs of all who had it
        self.is_broken = False  # a node ended it with 500
        self._prompt_ids = prompt_ids
        self._sampling = sampling
        self._deadline_s = deadline_s

    def given_to(self, node: Node, streams: Collection[Stream], now: float) -> Submit:
        """Note who has these of its requests from now on; return what it is to be told."""
        for stream in streams:
            stream.node, stream.given_s, stream.stamps = node, now, NodeStamps(node.peer.node_id)
        self.tried.add(node.peer.epoch)
        timeout_ms = None
        if self._deadline_s is not None:
            timeout_ms = max(1, math.ceil((self._deadline_s - now) * 1000))
        return Submit(self.streams[0].request_id, self._sampling, self._prompt_ids, timeout_ms)


def each_choice(sampling: SamplingParams) -> list[SamplingParams]:
    """What is asked of each choice; the first brings the prompt's log probabilities."""
    if sampling.num_choices == 1:
        return [sampling]
    first = replace(sampling, num_choices=1)
    more = replace(first, num_prompt_logprobs=None)
    return [first, *(replace(more, choice=first.choice + i) for i in range(1, sampling.num_choices))]
