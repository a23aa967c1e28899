"""Aborts that came before what they are about. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

REMEMBERED_ABORTS = 4096  # most are of what is over, and never asked for again


class EarlyAborts(Generic[K]):
    """The last REMEMBERED_ABORTS of them."""

    def __init__(self) -> None:
        self._keys: OrderedDict[K, None] = OrderedDict()

    def remember(self, key: K) -> None:
        """Note an abort of something that is not here."""
        self._keys[key] = None
        while len(self._keys) > REMEMBERED_ABORTS:
            self._keys.popitem(last=False)

    def take(self, key: K) -> bool:
        """Say whether what comes now was aborted before; it is forgotten then."""
        found = key in self._keys
        self._keys.pop(key, None)
        return found
