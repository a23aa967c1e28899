"""A page allocator that says that no page is free though there are some: where faults are asked for."""

from __future__ import annotations

from common import faults
from common.kv.allocator import Lease, PageAllocator


class FaultyAllocator(PageAllocator):
    """See above.

    Args:
        allocations: obey `refuse:allocation`, asked before a prompt gets its pages. A prefill node asks again
            by itself; a decode node only when something came free.
    """

    def __init__(self, num_pages: int, active: faults.Faults, *, allocations: bool) -> None:
        super().__init__(num_pages)
        self._faults = active
        self._allocations = allocations

    @property
    def num_free(self) -> int:
        """Pages that can be given out now, or none."""
        free = super().num_free
        return 0 if free and self._allocations and self._refuses("allocation") else free

    def grow(self, lease: Lease) -> int | None:
        """Add a page to a lease, or not."""
        return None if self._refuses("growth") else super().grow(lease)

    def _refuses(self, point: str) -> bool:
        if self._faults.find(point, "refuse") is None:
            return False
        self._faults.look_again()
        return True


def page_allocator(num_pages: int, *, allocations: bool = False) -> PageAllocator:
    """Make a node's allocator."""
    active = faults.active()
    if active is None:
        return PageAllocator(num_pages)
    return FaultyAllocator(num_pages, active, allocations=allocations)
