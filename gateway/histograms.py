"""Buckets that suit language models, and a histogram that costs next to nothing a value.

A gateway may pass 160,000 tokens a second: an `observe` for each would be most of what it does. So the gaps
between tokens are counted in a plain list, which is added to the histogram's buckets now and then. Knows no
request.
"""

from __future__ import annotations

from bisect import bisect_left
from time import perf_counter
from typing import Any

from prometheus_client import Histogram

# As vLLM has them, down to what a small model on a GPU does.
FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    60,
)
GAPS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075)
INTER_TOKEN_S = (*GAPS_S, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
REQUEST_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 300, 600, 1800, 3600)
STAGE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class InterTokenTimes:
    """The times between tokens of all answers since the last `flush`."""

    def __init__(self) -> None:
        self._counts = [0] * (len(INTER_TOKEN_S) + 1)
        self._sum_s = 0.0

    def add(self, last_s: float, num_tokens: int) -> float:
        """Count tokens that came together, a while after `last_s`; returns when that was, for the next time.

        Tokens that came together share the time since the last. `last_s` 0: they are an answer's first.
        """
        now = perf_counter()
        if last_s and num_tokens:
            gap_s = now - last_s
            self._counts[bisect_left(INTER_TOKEN_S, gap_s / num_tokens)] += num_tokens
            self._sum_s += gap_s
        return now

    def flush(self, histogram: Histogram) -> None:
        """Add all to a histogram with the buckets INTER_TOKEN_S, and begin anew."""
        counts, self._counts = self._counts, [0] * len(self._counts)
        sum_s, self._sum_s = self._sum_s, 0.0
        inside: Any = histogram  # there is no way to observe a number of equal values
        inside._sum.inc(sum_s)
        for bucket, count in zip(inside._buckets, counts, strict=True):
            if count:
                bucket.inc(count)
