"""A step's host metadata as one pinned block and one copy to the device.

Numbers are added section by section; each call returns the device's view of its section, whose content is
there once `ship` was called on the stream that reads it. The pinned block is fresh (pinned.py says why that
is safe). A block that gives a CPU its numbers is their memory itself: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from common.device.pinned import is_pin_memory_available

_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.uint8): torch.uint8,
}
_ALIGNMENT = 16  # bytes; kernels that read pairs of words need it
_FIRST_BYTES = 1 << 16


class PackedBlock:
    """Sections of numbers on their way to a device."""

    def __init__(self, device: torch.device, target: Tensor | None = None) -> None:
        """Start an empty block.

        Args:
            device: where the numbers go.
            target: [bytes] u8 on the device, used as long as there is room; otherwise fresh memory.
        """
        self._device = device
        self._target = target
        self._on_cpu = device.type == "cpu"
        self._host: Tensor | None = None
        self._there: Tensor | None = None
        self._numpy: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0

    def add(self, values: ArrayLike, dtype: type[np.generic]) -> Tensor:
        """Add numbers, flat; returns where they will be: [len(values)] of `dtype`."""
        flat = np.asarray(values, dtype).reshape(-1)
        section, there = self.reserve(flat.size, dtype)
        section[:] = flat
        return there

    def reserve(self, count: int, dtype: type[np.generic]) -> tuple[NDArray[np.generic], Tensor]:
        """Add a section to be filled before `ship`; returns it on the host and on the device."""
        kind = np.dtype(dtype)
        size = count * kind.itemsize
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if self._there is None or start + size > self._numpy.size:
            self._begin(size)
            start = 0
        assert self._there is not None
        self._used = start + size
        section = self._numpy[start : self._used].view(kind)
        return section, self._there[start : self._used].view(_DTYPES[kind])

    def ship(self) -> None:
        """Copy what was added to the device, on the current stream, without waiting."""
        if self._host is not None and self._there is not None and not self._on_cpu and self._used:
            self._there[: self._used].copy_(self._host[: self._used], non_blocking=True)
        self._host = self._there = None
        self._used = 0

    def _begin(self, least_bytes: int) -> None:
        """Go on in another buffer: the first one, or the one before is full."""
        self.ship()
        target, self._target = self._target, None
        size = max(least_bytes, _FIRST_BYTES) if target is None else target.numel()
        if size < least_bytes:
            size, target = least_bytes, None
        pin = is_pin_memory_available(self._device)
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        self._numpy = self._host.numpy()
        if self._on_cpu:
            self._there = self._host
        else:
            self._there = (
                torch.empty(size, dtype=torch.uint8, device=self._device) if target is None else target
            )


def join_int32(arrays: Sequence[memoryview], out: NDArray[np.generic]) -> None:
    """Put int32 arrays one after the other into `out` [total], of any integer type."""
    at = 0
    for array in arrays:
        out[at : at + len(array)] = np.frombuffer(array, dtype=np.int32)
        at += len(array)
