"""The device memory of the KV cache: one tensor of all layers' pages, read and written by page id.

Knows no request and no ledger: which page is whose, and when it may be touched, is `allocator.py`'s and the
schedulers' business.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from common.errors import ConfigError
from common.kv.layout import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_DEFAULT_POOL_BYTES = 4 * 2**30


class KVPool:
    """Pages of every layer, in one allocation.

    `data` is [layers, num_pages + 1, 2 (K, V), page_size, kv_heads, head_dim]. Page 0 is padding: it is zero,
    belongs to nobody, and `num_pages` leaves it out, so valid page ids are 1 .. num_pages.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device) -> None:
        """Reserve the memory; on a CPU the system commits it only where it is written.

        Raises:
            ConfigError: the pool does not fit.
        """
        self.layout = layout
        self.num_pages = num_pages
        self.device = device
        shape = (
            layout.layers,
            num_pages + 1,
            2,
            layout.page_size,
            layout.kv_heads,
            layout.head_dim,
        )
        try:
            self.data = _zeros(shape, TORCH_DTYPES[layout.dtype], device)
        except (OSError, OverflowError, torch.OutOfMemoryError) as error:
            need_mib = (num_pages + 1) * layout.page_bytes >> 20
            raise ConfigError(
                f"a KV pool of {num_pages} pages needs {need_mib} MiB, which is not there; lower --kv-pages"
            ) from error

    def gather(self, page_ids: Sequence[int]) -> Tensor:
        """Copy pages out: uint8, flat and contiguous, [layers, n, 2, page_size, kv_heads, head_dim]."""
        return self.data.index_select(1, self._index(page_ids)).view(-1).view(torch.uint8)

    def scatter(self, page_ids: Sequence[int], data: Tensor) -> None:
        """Write pages from bytes in the order of `gather`, on this pool's device."""
        shape = (self.layout.layers, len(page_ids), *self.data.shape[2:])
        self.data.index_copy_(1, self._index(page_ids), data.view(self.data.dtype).view(shape))

    def _index(self, page_ids: Sequence[int]) -> Tensor:
        return torch.tensor(page_ids, dtype=torch.int64).to(self.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that take no memory before they are written (torch.zeros would touch them all)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Private: a shared anonymous mapping would count as shared memory. The tensor keeps it alive.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def available_memory_bytes() -> int:
    """Return the memory a process may still take: what is available, but no more than its container's limit.

    Source: /proc/meminfo (MemAvailable, in KiB) and cgroup v2's memory.max.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return available
    return min(available, int(limit)) if limit.isdecimal() else available


def default_num_pages(layout: KVLayout, memory_bytes: int) -> int:
    """Return how many pages fit in a tenth of `memory_bytes`, and in 4 GiB."""
    return max(1, min(memory_bytes // 10, MAX_DEFAULT_POOL_BYTES) // layout.page_bytes)
