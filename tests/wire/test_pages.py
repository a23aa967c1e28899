"""No page in two hands, no page lost, no page out again before its fence; against a model of sets."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import InvariantError
from common.kv.allocator import Lease, PageAllocator, PageUse
from common.kv.fence import FencedFreeList, StepFence
from common.messages import PageLedger

NUM_PAGES = 12


def test_pages_are_numbered_from_one_and_all_are_given_out() -> None:
    allocator = PageAllocator(3)
    lease = allocator.allocate(3, PageUse.ACTIVE)
    assert lease is not None
    assert sorted(lease.pages) == [1, 2, 3]  # page 0 is padding
    assert allocator.allocate(1, PageUse.ACTIVE) is None


def test_too_few_pages_are_none_at_all() -> None:
    allocator = PageAllocator(3)
    assert allocator.allocate(4, PageUse.INCOMING) is None
    assert allocator.num_free == 3


def test_a_lease_of_no_pages_is_a_lease() -> None:
    allocator = PageAllocator(1)
    lease = allocator.allocate(0, PageUse.ACTIVE)
    assert lease is not None
    allocator.release(lease)
    assert allocator.ledger() == PageLedger(total=1, free=1)


def test_a_lease_is_released_once() -> None:
    allocator = PageAllocator(3)
    lease = allocator.allocate(2, PageUse.OUTGOING)
    assert lease is not None
    allocator.release(lease, fence=4)
    for fence in (0, 4):
        with pytest.raises(InvariantError, match="released twice"):
            allocator.release(lease, fence=fence)
    allocator.check_invariants()
    assert allocator.ledger() == PageLedger(total=3, free=1, quarantined=2)


def test_fences_do_not_fall() -> None:
    pages = FencedFreeList(range(4))
    taken = pages.take(4)
    assert taken is not None
    pages.give_back(taken[:1], fence=5)
    with pytest.raises(InvariantError, match="fence 4 after 5"):
        pages.give_back(taken[1:2], fence=4)


def test_a_fence_is_the_last_step_in_flight() -> None:
    fence = StepFence()
    assert fence.current == 0
    assert [fence.launch(), fence.launch(), fence.current] == [1, 2, 2]
    fence.process(1)
    assert fence.current == 2
    fence.process(2)
    assert fence.current == 0


def test_steps_are_processed_in_order() -> None:
    fence = StepFence()
    fence.launch()
    fence.launch()
    with pytest.raises(InvariantError, match="step 2 processed after step 0"):
        fence.process(2)


def test_a_shared_page_is_given_back_with_the_last_lease() -> None:
    allocator = PageAllocator(3)
    first = allocator.allocate(2, PageUse.ACTIVE)
    assert first is not None
    second = allocator.share(first)
    assert second.pages == first.pages
    assert allocator.ledger() == PageLedger(total=3, free=1, active=2)
    assert (allocator.shares_last(first), allocator.shares_last(second)) == (False, True)
    allocator.release(first)
    assert not allocator.shares_last(second)
    assert allocator.ledger() == PageLedger(total=3, free=1, active=2)
    allocator.release(second, fence=4)
    assert allocator.ledger() == PageLedger(total=3, free=1, quarantined=2)


def test_a_page_of_its_own_takes_the_place_of_a_shared_one() -> None:
    allocator = PageAllocator(3)
    first = allocator.allocate(2, PageUse.ACTIVE)
    assert first is not None
    second, third = allocator.share(first), allocator.share(first)
    page = allocator.own_last(second)
    assert page is not None
    assert second.pages == (first.pages[0], page)
    assert allocator.own_last(third) is None, "no page is free"
    assert third.pages == first.pages
    allocator.release(first)
    assert not allocator.shares_last(third)
    allocator.check_invariants()


class PagesAndSets(RuleBasedStateMachine):
    """An allocator beside sets that say who holds what, and since when."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.steps = StepFence()
        self.launched = 0
        self.processed = 0
        self.free = set(range(1, NUM_PAGES + 1))
        self.held: dict[int, tuple[Lease, PageUse, set[int]]] = {}
        self.resting: list[tuple[int, set[int]]] = []
        self.next_name = 0

    @rule(count=st.integers(0, NUM_PAGES + 1), use=st.sampled_from(PageUse))
    def allocate(self, count: int, use: PageUse) -> None:
        lease = self.allocator.allocate(count, use)
        assert (lease is None) == (count > len(self.free))
        if lease is not None:
            pages = set(lease.pages)
            assert len(pages) == count
            assert pages <= self.free
            self.free -= pages
            self.held[self.next_name] = (lease, use, pages)
            self.next_name += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, _, pages = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        self.allocator.release(lease, fence=self.steps.current)
        pages = pages - self.in_use()
        if self.launched > self.processed:
            self.resting.append((self.launched, pages))
        else:
            self.free |= pages

    def in_use(self) -> set[int]:
        """Pages that somebody holds."""
        return {page for _, _, pages in self.held.values() for page in pages}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        lease, use, pages = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        shared = self.allocator.share(lease)
        assert (shared.pages, shared.use) == (lease.pages, use)
        self.held[self.next_name] = (shared, use, set(pages))
        self.next_name += 1

    @precondition(lambda self: any(lease.pages for lease, _, _ in self.held.values()))
    @rule(data=st.data())
    def own_the_last(self, data: st.DataObject) -> None:
        names = [name for name, (lease, _, _) in self.held.items() if lease.pages]
        name = data.draw(st.sampled_from(names))
        lease, _, pages = self.held[name]
        last = lease.pages[-1]
        # Names grow with time, and a lease holds a page from the time on that it was made.
        before = [other for other, (_, _, theirs) in self.held.items() if last in theirs and other < name]
        assert self.allocator.shares_last(lease) == bool(before)
        if before and (page := self.allocator.own_last(lease)) is not None:
            assert page in self.free
            self.free.remove(page)
            pages.remove(last)
            pages.add(page)
            assert set(lease.pages) == pages
        elif before:
            assert not self.free

    @rule()
    def launch_a_step(self) -> None:
        self.launched += 1
        assert self.steps.launch() == self.launched

    @precondition(lambda self: self.launched > self.processed)
    @rule()
    def process_a_step(self) -> None:
        self.processed += 1
        self.steps.process(self.processed)
        self.allocator.pass_fence(self.processed)
        for _, pages in (rest for rest in self.resting if rest[0] <= self.processed):
            self.free |= pages
        self.resting = [rest for rest in self.resting if rest[0] > self.processed]

    @invariant()
    def the_ledger_is_that_of_the_sets(self) -> None:
        def count(use: PageUse) -> int:
            return len(
                {page for _, held_for, pages in self.held.values() if held_for is use for page in pages}
            )

        ledger = self.allocator.ledger()
        assert ledger == PageLedger(
            total=NUM_PAGES,
            free=len(self.free),
            active=count(PageUse.ACTIVE),
            incoming=count(PageUse.INCOMING),
            outgoing=count(PageUse.OUTGOING),
            quarantined=sum(len(pages) for _, pages in self.resting) + count(PageUse.QUARANTINED),
        )
        in_some_state = ledger.free + ledger.active + ledger.incoming + ledger.outgoing + ledger.quarantined
        assert in_some_state == NUM_PAGES
        assert self.allocator.num_free == len(self.free)
        self.allocator.check_invariants()


PagesAndSets.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestPagesAndSets = PagesAndSets.TestCase
