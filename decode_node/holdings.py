"""The pages and the rows of a decode node, and who holds them. Pure.

A request gets pages and a row together, and more pages as it decodes; all come back once, behind the fence of
the step that may still touch them. The choices of a prompt share its pages, each copies the last one when it
writes. Pages that a prefill node may still be writing are quarantined until it is
known that nobody does. Knows no phase and no queue.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import InvariantError
from common.kv.allocator import Lease, PageUse
from common.kv.faulty_allocator import page_allocator
from common.kv.fence import FencedFreeList, StepFence
from common.messages import PageLedger
from decode_node.entry import Entry


class Holdings:
    """Pages, rows, and the fence behind which both rest.

    Args:
        num_pages: pages to hand out.
        num_rows: rows to hand out, from 1 on.
    """

    def __init__(self, num_pages: int, num_rows: int) -> None:
        self._num_rows = num_rows
        self._pages = page_allocator(num_pages)
        self._rows = FencedFreeList(range(1, num_rows + 1))
        self._fence = StepFence()
        self._quarantined: dict[int, Lease] = {}
        self.num_changes = 0  # grows with whatever may have made room

    @property
    def num_free_rows(self) -> int:
        """Rows that nobody holds and no step touches."""
        return self._rows.num_free

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds and no step touches."""
        return self._pages.num_free

    @property
    def has_step_in_flight(self) -> bool:
        """A step was launched that is not processed: pages may come free when it is."""
        return self._fence.current != 0

    def lease(self, entry: Entry, num_pages: int, use: PageUse) -> None:
        """Give a request pages, and a row for each of its choices.

        Raises:
            InvariantError: they are not free.
        """
        entry.lease = self._pages.allocate(num_pages, use)
        rows = self._rows.take(len(entry.keys))
        if entry.lease is None or rows is None:
            raise InvariantError("pages or rows were free a moment ago")
        entry.request.page_ids, entry.request.row, entry.rows = entry.lease.pages, rows[0], rows

    def share(self, entry: Entry, choice: Entry) -> None:
        """Give a choice the pages of its prompt, and one of the prompt's rows."""
        assert entry.lease is not None
        choice.lease = self._pages.share(entry.lease)
        choice.rows, entry.rows = entry.rows[:1], entry.rows[1:]
        choice.request.page_ids, choice.request.row = choice.lease.pages, choice.rows[0]

    def grow(self, entry: Entry) -> int | None:
        """Give a request one page more; returns it, or None when there is none free."""
        assert entry.lease is not None
        page = self._pages.grow(entry.lease)
        if page is not None:
            entry.request.page_ids = entry.lease.pages
        return page

    def own_last(self, entry: Entry) -> int | None:
        """Give a request a page of its own for its last; returns it, or None when there is none free."""
        assert entry.lease is not None
        page = self._pages.own_last(entry.lease)
        entry.request.page_ids = entry.lease.pages
        return page

    def must_copy(self, entry: Entry) -> bool:
        """Say whether a request may not write its last page: a choice before it does."""
        assert entry.lease is not None
        return self._pages.shares_last(entry.lease)

    def release(self, entry: Entry) -> None:
        """Take back what a request holds, if it holds anything."""
        if entry.lease is not None:
            self.num_changes += 1
            self._pages.release(entry.lease, fence=self._fence.current)
            self._give_back_rows(entry)

    def quarantine(self, entry: Entry, transfer_id: int) -> None:
        """Part a request from a transfer that did not end well: its pages rest until they are released."""
        assert entry.lease is not None
        self.num_changes += 1
        entry.transfer_id = None
        entry.lease.use = PageUse.QUARANTINED
        self._quarantined[transfer_id] = entry.lease
        self._give_back_rows(entry)

    def release_quarantined(self, transfer_id: int) -> None:
        """Nobody writes the pages of that transfer any more; nothing where none are quarantined."""
        lease = self._quarantined.pop(transfer_id, None)
        if lease is not None:
            self.num_changes += 1
            self._pages.release(lease)

    def launch(self) -> int:
        """Number the next step: what is given up from now on rests until it was processed."""
        return self._fence.launch()

    def process(self, step_id: int) -> None:
        """The result of a step is processed from now on.

        Raises:
            InvariantError: it is not the next one.
        """
        self._fence.process(step_id)

    def pass_fence(self, step_id: int) -> None:
        """Step `step_id` was processed: what rests behind it is free."""
        before = self._pages.num_free, self._rows.num_free
        self._pages.pass_fence(step_id)
        self._rows.pass_fence(step_id)
        self.num_changes += before != (self._pages.num_free, self._rows.num_free)

    def ledger(self) -> PageLedger:
        """Pages by state."""
        return self._pages.ledger()

    def check_invariants(self, entries: Iterable[Entry]) -> None:
        """Check pages and rows against the requests that there are.

        Raises:
            InvariantError: they contradict each other.
        """
        self._pages.check_invariants()
        rows = sum(len(entry.rows) for entry in entries)
        if rows + self._rows.num_free + self._rows.num_resting != self._num_rows:
            raise InvariantError("rows do not add up")

    def _give_back_rows(self, entry: Entry) -> None:
        self._rows.give_back(entry.rows, self._fence.current)
        entry.lease, entry.rows = None, ()
        entry.request.page_ids, entry.request.row, entry.request.shares_last_page = (), 0, False
