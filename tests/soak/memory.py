"""The memory of a server's processes, sampled from outside while something else goes on."""

from __future__ import annotations

import asyncio
import statistics
from contextlib import suppress

import psutil

from tests.system.server import Server

MIB = 2**20
FEW_PAGES = (
    2048  # a pool of 16 MiB: a large one becomes memory page by page, as it is used for the first time
)


def rss_mib(server: Server) -> float:
    """What all processes of the server hold in memory now; pages that they share count for each."""
    total = 0
    for process in server.tree():
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total / MIB


class MemoryLog:
    """Samples, one a second."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.samples_mib = [rss_mib(server)]

    async def sample(self) -> None:
        """Go on until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            self.samples_mib.append(rss_mib(self._server))

    @property
    def growth_mib(self) -> float:
        """How much more there was in the last quarter than in the third.

        At first a prefill node takes more and more: oneDNN keeps what it made for each shape of a product, up
        to a bound.
        """
        quarter = max(1, len(self.samples_mib) // 4)
        last, third = self.samples_mib[-quarter:], self.samples_mib[-2 * quarter : -quarter]
        return statistics.median(last) - statistics.median(third or self.samples_mib[:1])
