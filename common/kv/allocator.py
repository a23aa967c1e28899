"""Which page belongs to whom. Plain integers; page 0 is padding and never given out.

A page's state is not stored. It follows from who refers to it: a lease (its use), the fence, or nobody.
Several leases may hold a page: it is given back with the last of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from common.errors import InvariantError
from common.kv.fence import FencedFreeList
from common.messages import PageLedger


class PageUse(Enum):
    """What a lease is for: the states of the ledger that have an owner."""

    ACTIVE = "active"  # a running request's
    INCOMING = "incoming"  # a transfer writes them
    OUTGOING = "outgoing"  # a transfer reads them
    QUARANTINED = "quarantined"  # given up, but a remote writer may still touch them


@dataclass(eq=False, slots=True)
class Lease:
    """Pages that somebody holds. Whoever has the lease releases it, once."""

    pages: tuple[int, ...]
    use: PageUse
    released: bool = False


class PageAllocator:
    """Hands out `num_pages` pages, ids 1 to num_pages."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._list = FencedFreeList(range(1, num_pages + 1))
        self._leases: set[Lease] = set()
        self._sharers: dict[int, list[Lease]] = {}  # of pages with several leases, in the order of sharing

    @property
    def num_free(self) -> int:
        """Pages that can be given out now."""
        return self._list.num_free

    def allocate(self, count: int, use: PageUse) -> Lease | None:
        """Lease `count` pages, or None when there are fewer free."""
        pages = self._list.take(count)
        if pages is None:
            return None
        lease = Lease(pages, use)
        self._leases.add(lease)
        return lease

    def grow(self, lease: Lease) -> int | None:
        """Add a page to a lease; returns it, or None when there is none free."""
        page = self._list.take(1)
        if page is None:
            return None
        lease.pages += page
        return page[0]

    def share(self, lease: Lease) -> Lease:
        """Lease the same pages again, for the same use."""
        shared = Lease(lease.pages, lease.use)
        self._leases.add(shared)
        for page in lease.pages:
            self._sharers.setdefault(page, [lease]).append(shared)
        return shared

    def shares_last(self, lease: Lease) -> bool:
        """Say whether somebody had the last page of a lease before it: that one alone may write it."""
        sharers = self._sharers.get(lease.pages[-1])
        return sharers is not None and sharers[0] is not lease

    def own_last(self, lease: Lease) -> int | None:
        """Put a page of its own in the place of a lease's last; None when there is none free.

        What the old one holds has to be copied by the next step that is launched.
        """
        old = lease.pages[-1]
        page = self.grow(lease)
        if page is not None:
            lease.pages = (*lease.pages[:-2], page)
            self._leave(old, lease)
        return page

    def release(self, lease: Lease, *, fence: int = 0) -> None:
        """Give pages back; they rest until step `fence`, which may still touch them, was processed.

        Raises:
            InvariantError: the lease was released before.
        """
        if lease.released:
            raise InvariantError("a lease was released twice")
        lease.released = True
        self._leases.remove(lease)
        pages = lease.pages
        if self._sharers:
            pages = tuple(page for page in pages if not self._leave(page, lease))
        self._list.give_back(pages, fence)

    def pass_fence(self, fence: int) -> None:
        """Step `fence` was processed."""
        self._list.pass_fence(fence)

    def ledger(self) -> PageLedger:
        """Count the pages by state."""
        uses: Counter[PageUse] = Counter()
        for lease in self._leases:
            uses[lease.use] += sum(self._sharers.get(page, (lease,))[0] is lease for page in lease.pages)
        return PageLedger(
            total=self.num_pages,
            free=self._list.num_free,
            active=uses[PageUse.ACTIVE],
            incoming=uses[PageUse.INCOMING],
            outgoing=uses[PageUse.OUTGOING],
            quarantined=self._list.num_resting + uses[PageUse.QUARANTINED],
        )

    def check_invariants(self) -> None:
        """Check that the states add up, and that a page has several leases only where it was shared.

        Raises:
            InvariantError: they don't.
        """
        held = Counter(page for lease in self._leases for page in lease.pages)
        shared = {page: len(sharers) for page, sharers in self._sharers.items()}
        if {page: count for page, count in held.items() if count > 1} != shared:
            raise InvariantError("a page is in two leases")
        counted = len(held) + self._list.num_free + self._list.num_resting
        if counted != self.num_pages:
            raise InvariantError(f"{counted} pages counted, the pool has {self.num_pages}")

    def _leave(self, page: int, lease: Lease) -> bool:
        """A lease lets go of a page; True when others have it."""
        sharers = self._sharers.get(page)
        if sharers is None:
            return False
        sharers.remove(lease)
        if len(sharers) == 1:
            del self._sharers[page]
        return True
