"""When a GPU works and when it waits, from the profiler's record of its kernels and copies (CUPTI).

A captured step leaves about a microsecond between its kernels, which is the GPU's own; the host is to blame
for longer gaps. Plain intervals in, numbers out; `record` alone needs a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

HOST_GAP_NS = 5_000
_TRIMMED = 0.1  # of the record at each end: what began before, or is cut off


@dataclass(frozen=True, slots=True)
class Activity:
    """A kernel or a copy on the device."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Usage:
    """How a span of the device's time was used."""

    working: float  # share of the span in which a kernel or a copy runs
    busy: float  # the same with gaps that are not longer than HOST_GAP_NS
    longest_gap_ns: int


def record(work: Callable[[], object]) -> list[Activity]:
    """Do work; return what the GPU did meanwhile, by start."""
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profile:
        work()
    recorded = profile.profiler
    assert recorded is not None
    events = recorded.kineto_results.events()
    found = [
        Activity(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA
    ]
    return sorted(found, key=lambda activity: activity.start_ns)


def usage_of(activities: Sequence[Activity]) -> Usage:
    """Sum up a record, by start, without its ends; ValueError where there is nothing in it."""
    if not activities:
        raise ValueError("the profiler recorded nothing on the GPU")
    first_ns, last_ns = activities[0].start_ns, max(activity.end_ns for activity in activities)
    trimmed_ns = int((last_ns - first_ns) * _TRIMMED)
    begin_ns, end_ns = first_ns + trimmed_ns, last_ns - trimmed_ns
    gaps_ns = list(_gaps(activities, begin_ns, end_ns))
    span_ns = max(1, end_ns - begin_ns)
    waited_ns = sum(gap for gap in gaps_ns if gap > HOST_GAP_NS)
    return Usage(1 - sum(gaps_ns) / span_ns, 1 - waited_ns / span_ns, max(gaps_ns, default=0))


def _gaps(activities: Iterable[Activity], begin_ns: int, end_ns: int) -> Iterable[int]:
    """Give the lengths of the times between `begin_ns` and `end_ns` in which nothing runs."""
    at_ns = begin_ns
    for activity in activities:
        if activity.start_ns > at_ns:
            yield min(activity.start_ns, end_ns) - at_ns
        at_ns = max(at_ns, activity.end_ns)
        if at_ns >= end_ns:
            return


def longest(activities: Iterable[Activity], most: int) -> list[tuple[str, int, int]]:
    """Return the names that took the most time: (name, nanoseconds in all, how often)."""
    total_ns: dict[str, int] = defaultdict(int)
    count: dict[str, int] = defaultdict(int)
    for activity in activities:
        total_ns[activity.name] += activity.end_ns - activity.start_ns
        count[activity.name] += 1
    names = sorted(total_ns, key=lambda name: -total_ns[name])[:most]
    return [(name, total_ns[name], count[name]) for name in names]
