"""The plane for GPUs of one host: P maps D's pool by a handle and writes there, over NVLink or within a GPU.

D's pool is one allocation of its own. D's Hello has a handle of it, and the GPU that it is on; P maps it with
its own GPU current, so that kernels of P's GPU reach it. A mapping outlives D: the memory of a dead D is
taken until P has let go of it.
"""

from __future__ import annotations

import logging
import os
from weakref import WeakValueDictionary

import torch

from common.device.memory import HANDLE_BYTES, DeviceMemoryError, MappedMemory
from common.errors import ConfigError
from common.host import open_pidfd, same_host
from common.kv.pages import Pages
from common.kv.pool import KVPool
from common.messages import CudaPool, Hello, HostIdentity
from transfer.planes.base import PlaneUnavailable

log = logging.getLogger("baton.transfer")

CUDA_IPC = "cuda-ipc"


def cuda_pool(pool: KVPool) -> CudaPool | None:
    """Describe a pool for other processes; None where it is not on a GPU or cannot be given to them."""
    if pool.device_memory is None:
        return None
    try:
        handle = pool.device_memory.handle()
    except DeviceMemoryError as error:
        log.warning("the KV pool cannot be offered to other processes: %s", error)
        return None
    return CudaPool(handle, pool.num_pages, _uuid(pool.device))


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _check_reach(device: torch.device, uuid: str) -> None:
    """See that kernels of `device` reach the memory of the GPU with this UUID."""
    for index in range(torch.cuda.device_count()):
        other = torch.device("cuda", index)
        if _uuid(other) == uuid:
            if other != device and not torch.cuda.can_device_access_peer(device, other):
                raise PlaneUnavailable(f"{device} cannot access its GPU, {other}")
            return
    raise PlaneUnavailable(f"its GPU {uuid} is not visible here")


class CudaPools:
    """The pools of decode nodes that are mapped here, each once, for as long as somebody has its pages.

    Once, because a link that is gone may still have writes under way when the same process links again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mapped: WeakValueDictionary[tuple[HostIdentity, bytes], MappedMemory] = WeakValueDictionary()

    def open(self, local: Hello, peer: Hello) -> Pages:
        """Map the pool that a decode node on this host offers in its Hello.

        Raises:
            PlaneUnavailable: it is not there, or cannot be reached.
        """
        if peer.cuda is None or peer.layout is None or len(peer.cuda.handle) != HANDLE_BYTES:
            raise PlaneUnavailable("it offers no GPU memory")
        if not same_host(local.host, peer.host):
            raise PlaneUnavailable("it is on another host")
        _check_reach(self._device, peer.cuda.gpu)
        from common.kv.device_pages import DevicePages  # needs triton

        try:
            # By process too: nobody's handle is to find what a process mapped that is gone.
            key = (peer.host, peer.cuda.handle)
            least_bytes = (peer.cuda.num_pages + 1) * peer.layout.page_bytes
            mapped = self._mapped.get(key) or MappedMemory(peer.cuda.handle, self._device, least_bytes)
            # After the mapping: the handle of a process that is gone may by then be another's.
            pidfd = open_pidfd(local.host, peer.host)
            if pidfd is None:
                raise PlaneUnavailable("its process is gone")
            os.close(pidfd)
            self._mapped[key] = mapped
            return DevicePages(peer.layout, peer.cuda.num_pages, self._device, mapped.address, mapped)
        except (ConfigError, DeviceMemoryError, OSError) as error:
            raise PlaneUnavailable(f"its memory cannot be mapped: {error}") from None
