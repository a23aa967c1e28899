"""What must hold of `timings`, wherever they were made: by the API's words, not by the gateway's code."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

# Stage -> the stamps that it lies between; "chunks" is the last of them.
ENDS = {
    "tokenize": ("received", "submitted"),
    "submit": ("submitted", "queued"),
    "queue": ("queued", "prefill_start"),
    "prefill": ("prefill_start", "chunks"),
    "transfer": ("chunks", "arrived"),
    "send": ("arrived", "first_token"),
}
# Each is in order by itself: decoding and sending overlap.
ORDERS = (
    ("received", "tokenized", "submitted", "queued", "granted", "prefill_start", "chunks", "committed"),
    ("committed", "arrived", "first_token", "done"),
    ("arrived", "prebuilt", "second_token", "done"),
)


def us(ms: float) -> int:
    """Return whole microseconds; `timings` have no others."""
    whole = round(ms * 1000)
    assert abs(whole / 1000 - ms) < 1e-9, ms
    return whole


def assert_adds_up(timings: dict[str, Any]) -> None:
    """Check the timings of an answer that has a token: stages from stamps, sums, and order."""
    stamps = timings["stamps_ms"]
    for stage, (begin, end) in ENDS.items():
        took = timings[f"{stage}_ms"]
        assert took >= 0
        assert us(took) == us(last(stamps[end])) - us(last(stamps[begin])), (stage, timings)
    assert sum(us(timings[f"{stage}_ms"]) for stage in ENDS) == us(timings["ttft_ms"])
    assert us(timings["ttft_ms"]) == us(stamps["first_token"])
    assert us(timings["ttft_ms"]) + us(timings["decode_ms"]) == us(timings["total_ms"]) == us(stamps["done"])
    assert stamps["chunks"]
    for order in ORDERS:
        known = [ms for name in order if stamps[name] is not None for ms in listed(stamps[name])]
        assert all(before <= after for before, after in pairwise(known)), (order, timings)
    assert stamps["received"] == 0
    second = stamps["second_token"]
    first_decode = None if second is None else us(second) - us(stamps["arrived"])
    told = timings["first_decode_ms"]
    assert first_decode == (None if told is None else us(told))


def listed(stamp: Any) -> list[float]:
    """Return a stamp, or the stamps of all chunks, as a list."""
    return stamp if isinstance(stamp, list) else [stamp]


def last(stamp: Any) -> float:
    """Return a stamp, or that of the last chunk."""
    return listed(stamp)[-1]
