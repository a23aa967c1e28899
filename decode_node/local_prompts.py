"""Prompts that a decode node computes by itself, and retracted requests, in chunks beside decoding. Pure.

Learns from steps' times, by mixing.py, how large a chunk may be. Knows no page pool and no queue; a request
is here from its grant until its last chunk was planned, or until it ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from common.engine.batch import ForwardMode
from common.engine.chunking import ChunkPlan, advance, plan_chunks
from decode_node.entry import DecodeStep, Entry, RequestKey
from decode_node.mixing import MixingBudget


class LocalPrompts:
    """Requests whose prompts are computed here, in order.

    Args:
        page_size: tokens of a page.
        prefill_budget: tokens of a step in which nobody decodes.
    """

    def __init__(self, page_size: int, prefill_budget: int) -> None:
        self._page_size = page_size
        self._prefill_budget = prefill_budget
        self._mixing = MixingBudget(page_size, prefill_budget)
        self._entries: OrderedDict[RequestKey, Entry] = OrderedDict()
        self._planned_last: ForwardMode | None = None
        self._processed_s = 0.0

    def __len__(self) -> int:
        """Requests whose prompts are not all planned."""
        return len(self._entries)

    @property
    def num_resuming(self) -> int:
        """Those of them that were running before: they come before what arrives."""
        return sum(entry.was_retracted for entry in self._entries.values())

    def append(self, entry: Entry) -> None:
        """Take a request that has its pages."""
        self._entries[entry.key] = entry

    def discard(self, key: RequestKey) -> None:
        """Forget a request that ended, if it is here."""
        self._entries.pop(key, None)

    def plan(self, *, room: int, num_decode: int) -> tuple[ChunkPlan, ...]:
        """Cut at most `room` requests' prompts for a step in which `num_decode` others decode."""
        entries = list(self._entries.values())[: max(0, room)]
        if not entries:
            return ()
        budget = self._mixing.next_chunk() if num_decode else self._prefill_budget
        return plan_chunks((entry.request for entry in entries), budget, self._page_size, max_samples=room)

    def launch(self, plans: Sequence[ChunkPlan], mode: ForwardMode, now: float) -> list[Entry]:
        """Count what was planned for a step of that mode, or that nothing was.

        Returns the requests whose prompt ends: they decode from now on. Their tokens are in the relay for the
        next step, whether or not the host has seen them by then; those of retracted ones were there before.
        """
        self._planned_last = mode
        advance(plans, now)
        prefilled = []
        for entry, plan in zip(list(self._entries.values()), plans, strict=False):
            if plan.is_last:
                prefilled.append(self._entries.pop(entry.key))
        return prefilled

    def learn(self, step: DecodeStep, now: float) -> None:
        """Tell the mixing what a step took: since the last result, or since its launch if that was later."""
        took_s = now - max(step.planned_s, self._processed_s)
        self._processed_s = now
        if self._planned_last is not step.batch.mode:
            # Overlapped where a launch waits for the forward, as on a CPU, that was the next step's time.
            return
        match step.batch.mode:
            case ForwardMode.DECODE:
                self._mixing.observe_decode(took_s)
            case ForwardMode.MIXED:
                self._mixing.observe_mixed(took_s, step.batch.extend_num_tokens - step.batch.num_decode)
