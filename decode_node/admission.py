"""Who may enter, and which prefill node computes for whom. Pure.

First come, first served, and bounded; who was in already comes before all others, the oldest first. A request
enters when there are pages for its prompt and for everybody's near future (`may_enter`): few reach
max_tokens, so reserving all of it would leave most of the pool idle. Who then finds no page sits out, or is
retracted (running.py). A prefill node is kept at most max(one request, 2 x its budget) tokens ahead: what
waits longer waits here, without pages, so that pages do not idle behind its queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from common.request import Request

NEAR_TOKENS = 256  # of each answer's future, kept free at admission

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class AdmissionQueue(Generic[K, V]):
    """Requests that wait for pages, in order."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._again: dict[K, tuple[tuple[bool, int], V]] = {}  # were in already; before all others
        self._waiting: OrderedDict[K, V] = OrderedDict()
        self._choices: dict[K, int] = {}  # of those that are several requests

    def __len__(self) -> int:
        """Requests that wait: each choice is one."""
        more = sum(self._choices.values()) - len(self._choices)
        return len(self._again) + len(self._waiting) + more

    def try_append(self, key: K, item: V, num_choices: int = 1) -> bool:
        """Queue a new request; False when the queue is full. The last one gets in with all its choices."""
        if len(self) >= self._max_queued:
            return False
        self._waiting[key] = item
        if num_choices > 1:
            self._choices[key] = num_choices
        return True

    def append_again(self, key: K, item: V, rank: tuple[bool, int]) -> None:
        """Queue a request that was in already: before those that were not, by rank, and without a bound."""
        self._again[key] = (rank, item)

    def items(self) -> list[V]:
        """Return all that wait."""
        return [*(item for _, item in self._again.values()), *self._waiting.values()]

    def first(self) -> V | None:
        """The request whose turn it is."""
        if self._again:
            return min(self._again.values(), key=lambda queued: queued[0])[1]
        return next(iter(self._waiting.values()), None)

    def remove(self, key: K) -> None:
        """Take a request out, wherever it stands."""
        self._again.pop(key, None)
        self._waiting.pop(key, None)
        self._choices.pop(key, None)


def may_enter(request: Request, holders: Iterable[Request], free_pages: int, page_size: int) -> bool:
    """Say whether a request may be given the pages of its prompt.

    Beside them there must be room for the next NEAR_TOKENS tokens of everybody, this one included (of each
    choice), and for all that the one may still need who may need most: so somebody can always go on to the
    end. Where nobody else holds anything, the latter is enough.

    Args:
        request: holds nothing yet.
        holders: requests that hold pages, or are about to get some.
        free_pages: that can be given out now.
        page_size: tokens of a page.
    """
    need = -(-request.fill_len // page_size)
    near = far = 0
    others = tuple(holders)
    for each in (*others, request):
        start, choices = max(each.computed_len, each.fill_len), each.sampling.num_choices
        held = len(each.page_ids) or -(-start // page_size)
        copies = (choices - 1) * (start % page_size > 0) + each.shares_last_page
        near += copies + choices * max(0, -(-min(each.max_len, start + NEAR_TOKENS) // page_size) - held)
        far = max(far, -(-each.max_len // page_size) - held + each.shares_last_page)
    return free_pages >= need + max(near if others else 0, far)


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """A prefill node that is up."""

    node_id: str
    tokens_ahead: int  # granted and not yet computed there
    budget_tokens: int
    capacity_tokens: int  # the longest prompt that its pool holds


def choose_prefill_node(nodes: Sequence[PrefillLoad], prompt_len: int) -> str | None:
    """Take the one with least ahead that may have the prompt, in turn; None when all have enough to do."""
    able = [
        node
        for node in nodes
        if prompt_len <= node.capacity_tokens
        and (node.tokens_ahead == 0 or node.tokens_ahead + prompt_len <= 2 * node.budget_tokens)
    ]
    return min(able, key=lambda node: node.tokens_ahead).node_id if able else None
