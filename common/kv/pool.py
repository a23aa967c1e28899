"""The device memory of the KV cache: one tensor of all layers' pages, read and written by page id.

Knows no request and no ledger: which page is whose, and when it may be touched, is `allocator.py`'s and the
schedulers' business.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from common.device.memory import DeviceMemory, DeviceMemoryError, free_and_total_bytes
from common.errors import ConfigError
from common.kv.layout import KVLayout
from common.kv.pages import HostPages, Pages

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_DEFAULT_POOL_BYTES = 4 * 2**30


class KVPool:
    """Pages of every layer, in one allocation.

    `data` is [layers, num_pages + 1, 2 (K, V), page_size, kv_heads, head_dim]. Page 0 is padding: it belongs
    to nobody, and takes what the padding of a captured step writes (elsewhere it stays zero). `num_pages`
    leaves it out, so valid page ids are 1 .. num_pages.
    """

    def __init__(
        self, layout: KVLayout, num_pages: int, device: torch.device, *, shared: bool = False
    ) -> None:
        """Reserve the memory; on a CPU the system commits it only where it is written.

        On a GPU it is one allocation outside torch's, which another process can map (`device_memory`).

        Args:
            shared: on a CPU, a memfd that another process can map (`fd`).

        Raises:
            ConfigError: the pool does not fit.
        """
        size = _num_bytes(layout, num_pages)
        self.fd: int | None = None
        self.device_memory: DeviceMemory | None = None
        try:
            if device.type == "cuda":
                self.device_memory = DeviceMemory(size, device)
                memory = self.device_memory.tensor(size)
            else:
                self.fd = _memfd(size) if shared else None
                memory = _host_memory(size, self.fd)
        except (DeviceMemoryError, OSError, OverflowError) as error:
            free = f"{free_and_total_bytes(device)[0] >> 20} MiB are free" if device.type == "cuda" else ""
            raise ConfigError(
                f"a KV pool of {num_pages} pages needs {size >> 20} MiB, which is not there"
                f"{free and f': {free} ({error})'}; lower --kv-pages"
            ) from error
        self._take(layout, num_pages, memory)

    @classmethod
    def map(cls, layout: KVLayout, num_pages: int, fd: int) -> KVPool:
        """Map the shared pool of another process; `fd` may be closed afterwards.

        Raises:
            ConfigError: it is not of this layout and size, or cannot be mapped.
        """
        size = _num_bytes(layout, num_pages)
        if os.fstat(fd).st_size != size:
            raise ConfigError(f"the shared pool has {os.fstat(fd).st_size} bytes, not {size}")
        pool = cls.__new__(cls)
        pool.fd = None
        pool.device_memory = None
        try:
            pool._take(layout, num_pages, _host_memory(size, fd))
        except OSError as error:
            raise ConfigError(f"the shared pool cannot be mapped: {error.strerror}") from None
        return pool

    def _take(self, layout: KVLayout, num_pages: int, memory: Tensor) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.device = memory.device
        shape = (layout.layers, num_pages + 1, 2, layout.page_size, layout.kv_heads, layout.head_dim)
        self.data = memory.view(TORCH_DTYPES[layout.dtype]).view(shape)
        self.pages: Pages  # the same memory
        if self.device_memory is None:
            self.pages = HostPages(layout, num_pages, memory)
            return
        from common.kv.device_pages import DevicePages  # needs triton

        self.pages = DevicePages(layout, num_pages, self.device, self.device_memory.address, memory)
        # The padding page onto itself: the kernel is built now, and not while a node's loop waits for it.
        self.pages.copy_from([0], self.pages, [0])

    def gather(self, page_ids: Sequence[int]) -> Tensor:
        """Copy pages out (see Pages)."""
        return self.pages.gather(page_ids)

    def scatter(self, page_ids: Sequence[int], data: Tensor) -> None:
        """Write pages (see Pages)."""
        self.pages.scatter(page_ids, data)


def _num_bytes(layout: KVLayout, num_pages: int) -> int:
    return (num_pages + 1) * layout.page_bytes


def _memfd(size: int) -> int:
    fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # Whoever maps it may rely on its size: a shorter file would kill the writer with SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def _host_memory(size: int, fd: int | None) -> Tensor:
    """Return zeros, [size] u8, that take no memory before they are written (torch.zeros would touch them)."""
    # Private where nobody shares it: a shared anonymous mapping would count as shared memory. The tensor
    # keeps the mapping alive.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if fd is None else mmap.MAP_SHARED
    return torch.frombuffer(mmap.mmap(-1 if fd is None else fd, size, flags=flags), dtype=torch.uint8)


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
