"""Device memory outside torch's allocator: for the KV pool, which another process may map by a handle.

torch's own sharing pickles, and its allocator may cut a block into pieces; a handle names a whole cudaMalloc.
Knows no page.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

log = logging.getLogger("baton.device")

HANDLE_BYTES = 64  # of a cudaIpcMemHandle_t
GRANULE_BYTES = 2 << 20  # of the driver's allocations
MEMORY_WAIT_S = 30.0
_MEMORY_POLL_S = 0.1


class DeviceMemoryError(Exception):
    """The driver refused; the text is its own."""


def _runtime() -> object:
    from cuda.bindings import runtime  # part of torch's CUDA builds, and of them alone

    return runtime


def _call(name: str, *args: object) -> tuple[object, ...]:
    runtime = _runtime()
    status, *values = getattr(runtime, name)(*args)
    if int(status) != 0:
        # The error stays with the thread otherwise, and torch would report it as its own.
        runtime.cudaGetLastError()  # type: ignore[attr-defined]
        _, text = runtime.cudaGetErrorString(status)  # type: ignore[attr-defined]
        raise DeviceMemoryError(f"{name}: {text.decode()}")
    return tuple(values)


@dataclass(frozen=True, slots=True)
class _ArrayInterface:
    """What torch needs to see foreign memory as a tensor; keeps its owner alive."""

    __cuda_array_interface__: dict[str, object]
    owner: object


class DeviceMemory:
    """At least `size` zeros of one device, at `address`. Freed when the last tensor over them is gone."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate.

        Raises:
            DeviceMemoryError: they are not there.
        """
        # A smaller block may share its allocation with others, whom a handle would give away too.
        self.size = -(-size // GRANULE_BYTES) * GRANULE_BYTES
        self.device = device
        with torch.cuda.device(device):
            (pointer,) = _call("cudaMalloc", self.size)
            self.address = int(pointer)  # type: ignore[call-overload]
            _call("cudaMemset", self.address, 0, self.size)

    def tensor(self, size: int) -> Tensor:
        """See the first bytes as a tensor, [size] u8."""
        interface = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
        return torch.as_tensor(_ArrayInterface(interface, self), device=self.device)

    def handle(self) -> bytes:
        """Return the handle by which another process of this host can map the memory: HANDLE_BYTES."""
        with torch.cuda.device(self.device):
            (handle,) = _call("cudaIpcGetMemHandle", self.address)
        return bytes(handle.reserved)  # type: ignore[attr-defined]

    def __del__(self) -> None:
        """Free; a pointer that the driver no longer knows (it is shutting down) is nobody's loss."""
        if (address := getattr(self, "address", None)) is not None:
            with contextlib.suppress(DeviceMemoryError, ImportError):
                _call("cudaFree", address)


class MappedMemory:
    """Another process's DeviceMemory, mapped here by its handle until the last reference to it is gone.

    Its owner's death leaves it allocated. Unmapping a dead owner's gives it back, which can take seconds: the
    last reference is not to go on a node's loop.
    """

    def __init__(self, handle: bytes, device: torch.device, least_bytes: int) -> None:
        """Map it for kernels that run on `device`.

        Raises:
            DeviceMemoryError: the handle is stale, the devices cannot reach each other, or it is smaller than
                `least_bytes`: a write past its end would cost this process its context.
        """
        runtime = _runtime()
        with torch.cuda.device(device):
            native = runtime.cudaIpcMemHandle_t()  # type: ignore[attr-defined]
            native.reserved = handle
            flags = runtime.cudaIpcMemLazyEnablePeerAccess  # type: ignore[attr-defined]
            (pointer,) = _call("cudaIpcOpenMemHandle", native, flags)
            self.address = int(pointer)  # type: ignore[call-overload]
            # Not __del__: weak references would still find the object while that is at work.
            weakref.finalize(self, _unmap, self.address, device).atexit = False
            size = _mapped_bytes(self.address)
        if size < least_bytes:
            raise DeviceMemoryError(f"it has {size} bytes, not {least_bytes}")


def _unmap(address: int, device: torch.device) -> None:
    with contextlib.suppress(DeviceMemoryError, ImportError), torch.cuda.device(device):
        _call("cudaIpcCloseMemHandle", address)


def _mapped_bytes(address: int) -> int:
    from cuda.bindings import driver

    status, _, size = driver.cuMemGetAddressRange(address)
    if int(status) != 0:
        raise DeviceMemoryError(f"cuMemGetAddressRange: error {int(status)}")
    return int(size)


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Return the device's memory that nobody has taken, and all of it."""
    return torch.cuda.mem_get_info(device)


def wait_for_memory(device: torch.device, need_bytes: int, timeout_s: float = MEMORY_WAIT_S) -> int:
    """Wait until so much of the device is free, or the time is over; return what is free then.

    The memory of a process that died stays taken while another one has it mapped, for seconds.
    """
    give_up_s = time.monotonic() + timeout_s
    free_bytes, _ = free_and_total_bytes(device)
    if free_bytes < need_bytes:
        log.warning(
            "%s has %d MiB free of the %d that this node is to have: waiting for %.0f s at the most",
            device,
            free_bytes >> 20,
            need_bytes >> 20,
            timeout_s,
        )
    while free_bytes < need_bytes and time.monotonic() < give_up_s:
        time.sleep(_MEMORY_POLL_S)
        free_bytes, _ = free_and_total_bytes(device)
    if free_bytes < need_bytes:
        log.warning("%s: going on with %d MiB; others hold the rest", device, free_bytes >> 20)
    return free_bytes
