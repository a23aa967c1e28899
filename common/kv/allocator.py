"""Which page belongs to whom. Plain integers; page 0 is padding and never given out.

A page's state is not stored. It follows from who refers to it: a lease (its use), the fence, or nobody.
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

    def release(self, lease: Lease, *, fence: int = 0) -> None:
        """Give pages back; they rest until step `fence`, which may still touch them, was processed.

        Raises:
            InvariantError: the lease was released before.
        """
        if lease.released:
            raise InvariantError("a lease was released twice")
        lease.released = True
        self._leases.remove(lease)
        self._list.give_back(lease.pages, fence)

    def pass_fence(self, fence: int) -> None:
        """Step `fence` was processed."""
        self._list.pass_fence(fence)

    def ledger(self) -> PageLedger:
        """Count the pages by state."""
        uses: Counter[PageUse] = Counter()
        for lease in self._leases:
            uses[lease.use] += len(lease.pages)
        return PageLedger(
            total=self.num_pages,
            free=self._list.num_free,
            active=uses[PageUse.ACTIVE],
            incoming=uses[PageUse.INCOMING],
            outgoing=uses[PageUse.OUTGOING],
            quarantined=self._list.num_resting + uses[PageUse.QUARANTINED],
        )

    def check_invariants(self) -> None:
        """Check that the states add up and that no page has two holders.

        Raises:
            InvariantError: they don't.
        """
        held = [page for lease in self._leases for page in lease.pages]
        if len(held) != len(set(held)):
            raise InvariantError("a page is in two leases")
        counted = len(held) + self._list.num_free + self._list.num_resting
        if counted != self.num_pages:
            raise InvariantError(f"{counted} pages counted, the pool has {self.num_pages}")
