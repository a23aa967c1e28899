"""Memory and file descriptors of the server's processes, sampled from outside."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from conformance.server import Server

_EVERY_S = 1.0
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process had at a time."""

    at_s: float
    pid: int
    rss_mib: float
    num_fds: int


@dataclass
class Watch:
    """Samples of every process by its name, one a second."""

    server: Server
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    start_s: float = field(default_factory=time.monotonic)

    async def go_on(self) -> None:
        """Sample until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_EVERY_S)

    def look(self) -> None:
        """Take a sample of each process."""
        at_s = time.monotonic() - self.start_s
        for name, pid in {**self.server.nodes(), "supervisor": self.server.process.pid}.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                sample = Sample(at_s, pid, process.memory_info().rss / _MIB, process.num_fds())
                self.samples.setdefault(name, []).append(sample)

    def memory(self, name: str) -> list[tuple[float, float]]:
        """Return (second, MiB)."""
        return [(sample.at_s, sample.rss_mib) for sample in self.samples.get(name, ())]

    def descriptors(self, name: str) -> list[tuple[float, float]]:
        """Return (second, file descriptors)."""
        return [(sample.at_s, float(sample.num_fds)) for sample in self.samples.get(name, ())]

    def most(self, names: Sequence[str], quarter: int) -> tuple[float, float]:
        """Return the most MiB and file descriptors that any of them had in a quarter of the time, 1 to 4."""
        samples = [sample for name in names for sample in self.samples.get(name, ())]
        end_s = max(sample.at_s for sample in samples)
        inside = [s for s in samples if (quarter - 1) / 4 <= s.at_s / end_s <= quarter / 4]
        return max(s.rss_mib for s in inside), float(max(s.num_fds for s in inside))


def slope_per_minute(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of a line through the second half of the points (least squares)."""
    points = points[len(points) // 2 :]
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return 60 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
