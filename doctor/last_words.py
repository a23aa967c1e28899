"""The last line that somebody wrote to a file: the reason of whoever says nothing else. Knows no process."""

from __future__ import annotations

import os

_TAIL_BYTES = 8192
_MOST_CHARS = 300


def last_words(fd: int, containing: str = "") -> str:
    """Return the last line of a regular file that contains the text, cut to some length; "" without one."""
    size = os.fstat(fd).st_size
    tail = os.pread(fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")
    lines = [line.strip() for line in tail.splitlines() if line.strip() and containing in line]
    return lines[-1][:_MOST_CHARS] if lines else ""
