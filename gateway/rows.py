"""Long lists of an answer, made while it is written: some rows at a time, so that other streams get on.

The log probabilities of a prompt of 30,000 tokens are megabytes of JSON, and take a second to write. Knows no
tokens and no HTTP.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

SLICE_ROWS = 32
_MARK = uuid.uuid4().hex  # in the place of a list; nobody can have written it
_MARK_JSON = json.dumps(_MARK).encode()


class Rows:
    """The items of a JSON list, one part after the other; they are made as they are read, once."""

    def __init__(self, *parts: Iterable[Any]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        """Make them."""
        return chain.from_iterable(self._parts)


def to_json(value: Any) -> bytes:
    """Write compact JSON at once; `Rows` are lists."""
    return _dumps(value, list)


async def to_json_in_slices(value: Any) -> bytes:
    """Write the same, but `Rows` some at a time, with others' turns between."""
    found: list[Rows] = []

    def mark(rows: Rows) -> str:
        found.append(rows)
        return _MARK

    head, *tails = _dumps(value, mark).split(_MARK_JSON)
    parts = [head]
    for rows, tail in zip(map(iter, found), tails, strict=True):
        separator = b"["
        while items := list(islice(rows, SLICE_ROWS)):
            parts += [separator, to_json(items)[1:-1]]
            separator = b","
            await asyncio.sleep(0)
        parts += [b"]" if separator == b"," else b"[]", tail]
    return b"".join(parts)


def _dumps(value: Any, of_rows: Callable[[Rows], Any]) -> bytes:
    def default(item: Any) -> Any:
        if isinstance(item, Rows):
            return of_rows(item)
        raise TypeError(f"{type(item).__name__} is not JSON")

    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=default).encode()
