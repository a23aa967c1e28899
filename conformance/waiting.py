"""Ask again and again until something is so, or the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

POLL_S = 0.02

T = TypeVar("T")


def poll_until(
    probe: Callable[[], T | None], deadline_s: float, what: str, log: Callable[[], str] = str
) -> T:
    """Ask until `probe` gives something that is neither None nor False.

    Raises:
        AssertionError: it does not in time.
    """
    end = time.monotonic() + deadline_s
    while True:
        value = probe()
        if value is not None and value is not False:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s:g} s: {what}\n{log()}".rstrip())
        time.sleep(POLL_S)
