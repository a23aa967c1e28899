"""The requests whose KV is here: those that decode, and those that arrived and wait for a place. Pure.

A request has pages for its prompt, and gets another one when its next token begins one, or would be written
where another choice of its prompt writes. The oldest are served first. Who gets none sits out the step. Where
nobody can go on, the youngest is to give up its pages.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from common.engine.batch import prepare_for_prebuilt
from decode_node.entry import Entry, Phase, Prebuilt, RequestKey
from decode_node.holdings import Holdings


@dataclass(frozen=True, slots=True)
class Grown:
    """Who can decode, in order, and what was handed out for that."""

    ready: tuple[Entry, ...]
    new_pages: tuple[tuple[int, int, int], ...]  # (row, column of the page table, page)
    copies: tuple[tuple[int, int], ...] = ()  # (page, page that gets what it holds)
    num_blocked: int = 0  # found no page


class RunningBatch:
    """Requests in order of coming, the first `max_running` of which decode.

    Args:
        max_running: that decode at the most.
        page_size: tokens of a page.
    """

    def __init__(self, max_running: int, page_size: int) -> None:
        self._max_running = max_running
        self._page_size = page_size
        self._arrived: OrderedDict[RequestKey, Entry] = OrderedDict()
        self._running: OrderedDict[RequestKey, Entry] = OrderedDict()

    def __len__(self) -> int:
        """Those that decode, and those that wait for a place."""
        return len(self._arrived) + len(self._running)

    @property
    def room(self) -> int:
        """Places for others."""
        return max(0, self._max_running - len(self._running))

    def arrive(self, entry: Entry) -> None:
        """Take a request that was handed over: its pages and its first token are in."""
        entry.phase = Phase.ARRIVED
        self._arrived[entry.key] = entry

    def take_prebuilt(self, num_resuming: int) -> Prebuilt | None:
        """Batch what arrived, as far as it may run; the metadata alone is read.

        `num_resuming`: places that are kept for requests that are computed here. They were first.
        """
        entries = tuple(self._arrived.values())[: max(0, self.room - num_resuming)]
        if not entries:
            return None
        batch = prepare_for_prebuilt([entry.request for entry in entries], self._page_size)
        return Prebuilt(batch, entries)

    def merge(self, prebuilt: Prebuilt, now: float) -> None:
        """The first tokens are seeded: the requests decode with everyone else."""
        for entry, seq_len in zip(prebuilt.entries, prebuilt.batch.seq_lens, strict=True):
            entry.request.computed_len = seq_len
            entry.prebuilt_s = now
            del self._arrived[entry.key]
            self.start(entry)

    def start(self, entry: Entry) -> None:
        """A request decodes from now on."""
        entry.phase = Phase.RUNNING
        self._running[entry.key] = entry

    def discard(self, key: RequestKey) -> None:
        """Forget a request, if it is here."""
        self._arrived.pop(key, None)
        self._running.pop(key, None)

    def grow(self, holdings: Holdings) -> Grown:
        """Find room for the next token of each that decodes."""
        entries = tuple(entry for entry in self._running.values() if entry.request.wants_decode)
        size = self._page_size
        short = [
            e
            for e in entries
            if e.request.computed_len >= len(e.request.page_ids) * size or e.request.shares_last_page
        ]
        if not short:
            return Grown(entries, ())
        new_pages, copies, blocked = [], [], set()
        for entry in sorted(short, key=lambda e: e.age):
            request = entry.request
            shared = request.page_ids[-1] if request.shares_last_page else None
            if shared is not None and not holdings.must_copy(entry):
                request.shares_last_page = False  # the choices before it are gone, or have copies
                continue
            page = holdings.grow(entry) if shared is None else holdings.own_last(entry)
            if page is None:
                blocked.add(entry.key)
                continue
            if shared is not None:
                copies.append((shared, page))
                request.shares_last_page = False
            new_pages.append((request.row, len(request.page_ids) - 1, page))
        ready = tuple(entry for entry in entries if entry.key not in blocked)
        return Grown(ready, tuple(new_pages), tuple(copies), len(blocked))

    def youngest(self) -> Entry | None:
        """Return the request to retract: never the oldest, for whose sake it is."""
        entries = [*self._running.values(), *self._arrived.values()]
        return max(entries, key=lambda e: e.age) if len(entries) > 1 else None
