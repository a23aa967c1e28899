"""Bytes as a source of choices: a run of a machine is what its bytes say, and the same each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Reads choices from bytes, one byte each; beyond the end every byte is 0."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """How many bytes were not read yet."""
        return max(0, len(self._data) - self._at)

    def byte(self) -> int:
        """Return the next byte."""
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, limit: int) -> int:
        """Return a number from 0 to limit - 1."""
        return self.byte() % limit

    def one_of(self, items: Sequence[T]) -> T:
        """Return one of the items."""
        return items[self.below(len(items))]
