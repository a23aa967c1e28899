"""Who may enter, and which prefill node computes for whom. Pure.

First come, first served, and bounded. A request enters when pages for prompt + max_tokens are free: it can
then always finish. A prefill node is kept at most max(one request, 2 x its budget) tokens ahead: what waits
longer waits here, without pages, so that pages do not idle behind its queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class AdmissionQueue(Generic[K, V]):
    """Requests that wait for pages, in order."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._again: OrderedDict[K, V] = OrderedDict()  # were in already; before all others
        self._waiting: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._again) + len(self._waiting)

    def try_append(self, key: K, item: V) -> bool:
        """Queue a new request; False when the queue is full."""
        if len(self) >= self._max_queued:
            return False
        self._waiting[key] = item
        return True

    def append_again(self, key: K, item: V) -> None:
        """Queue a request that was in already: before those that were not, and without a bound."""
        self._again[key] = item

    def first(self) -> V | None:
        """The request whose turn it is."""
        return next(iter((self._again or self._waiting).values()), None)

    def remove(self, key: K) -> V | None:
        """Take a request out, wherever it stands."""
        return self._again.pop(key, None) or self._waiting.pop(key, None)


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
