"""Drives sockets in one process until something is so, and gives up after a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from common.sockets import Pollable, wait

PATIENCE_S = 60.0  # a broken test ends; a busy machine does not break one


def until(condition: Callable[[], bool], pollables: Callable[[], Iterable[Pollable]]) -> None:
    """Evaluate `condition`, which does the work, whenever a socket is readable, until it is true."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s, "it did not happen"
        wait(pollables(), 0.02)
