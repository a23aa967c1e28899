"""What a device does at the most: copies within its memory and matrix products, measured here and now."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.percentiles import median

_COPIED_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}  # more than any cache
_MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
_HEAD_START_CYCLES = 1_000_000  # half a millisecond or so
_ROUNDS = {"cuda": 20, "cpu": 5}


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of work: on a GPU between two events around it, on the device's current stream.

    There it is queued behind something else, so that no part of it waits for the host.
    """
    if device.type == "cpu":
        started_s = time.perf_counter()
        work()
        return time.perf_counter() - started_s
    with torch.cuda.device(device):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_HEAD_START_CYCLES)
        begin.record()
        work()
        end.record()
        end.synchronize()
    elapsed_ms: float = begin.elapsed_time(end)
    return elapsed_ms / 1000


def _median_seconds_of(work: Callable[[], object], device: torch.device) -> float:
    work()
    return median([seconds_of(work, device) for _ in range(_ROUNDS[device.type])])


def copy_bytes_per_s(device: torch.device) -> float:
    """Return the bytes a second that a large copy reads and writes together."""
    source = torch.ones(_COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / _median_seconds_of(lambda: target.copy_(source), device)


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations a second of a large product of random matrices."""
    size = _MATRIX_SIZE[device.type]
    a, b, out = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))
    return 2 * size**3 / _median_seconds_of(lambda: torch.mm(a, b, out=out), device)


class PlainCopy:
    """One copy from a device to another, or within one, of memory that moves on from time to time."""

    def __init__(self, source: torch.device, target: torch.device, room_bytes: int) -> None:
        self._source = torch.ones(room_bytes, dtype=torch.uint8, device=source)
        self._target = torch.ones(room_bytes, dtype=torch.uint8, device=target)
        self._at = 0

    def copy_s(self, num_bytes: int) -> float:
        """Return the seconds of a copy of so many bytes."""
        at = self._at % (len(self._source) - num_bytes + 1)
        self._at += num_bytes
        source, target = (memory[at : at + num_bytes] for memory in (self._source, self._target))
        if source.is_cpu:
            # By one thread, as a node copies.
            return seconds_of(lambda: np.copyto(target.numpy(), source.numpy()), source.device)
        return seconds_of(lambda: target.copy_(source), source.device)
