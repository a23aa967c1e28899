"""The plane cuda-ipc where it cannot work: it is refused, or frames are taken, and it is said."""

from __future__ import annotations

import threading
import weakref
from contextlib import closing, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from common.config import NodeConfig, TransferConfig
from common.device import memory
from common.errors import ConfigError
from common.messages import CudaPool, Hello, HostIdentity, Role
from common.node import make_hello
from tests.wire.endpoint_world import CPU, Context, World
from tests.wire.hellos import DECODE, LAYOUT, PREFILL, here
from transfer.planes.base import PlaneUnavailable
from transfer.planes.cuda_ipc import CUDA_IPC, CudaPools
from transfer.planes.frames import FRAMES

OFFER = CudaPool(handle=bytes(64), num_pages=32, gpu="of-nobody")
US = here(PREFILL)
THEM = replace(here(DECODE), cuda=OFFER)


@pytest.mark.parametrize(
    ("offer", "reason"),
    [
        (replace(THEM, cuda=None), "offers no GPU memory"),
        (replace(THEM, cuda=replace(OFFER, handle=b"short")), "offers no GPU memory"),
        (replace(THEM, host=HostIdentity("another", 1, 1, 1)), "another host"),
        (THEM, "its GPU of-nobody is not visible here"),
    ],
)
def test_what_cannot_be_mapped_is_not_available(offer: Hello, reason: str) -> None:
    with pytest.raises(PlaneUnavailable, match=reason):
        CudaPools(torch.device("cuda", 0)).open(US, offer)


class SlowDriver:
    """Stands in for CUDA's runtime: unmapping takes until it is told to end."""

    cudaIpcMemLazyEnablePeerAccess = 1  # noqa: N815
    cudaIpcMemHandle_t = SimpleNamespace  # noqa: N815

    def __init__(self) -> None:
        self.unmapping, self.may_end = threading.Event(), threading.Event()

    def cudaIpcOpenMemHandle(self, handle: object, flags: int) -> tuple[int, int]:  # noqa: N802
        return 0, 4096

    def cudaIpcCloseMemHandle(self, address: int) -> tuple[int]:  # noqa: N802
        self.unmapping.set()
        assert self.may_end.wait(30)
        return (0,)


def test_memory_that_is_being_unmapped_is_found_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who found it would write through an address that is mapped no more, and lose its context."""
    driver = SlowDriver()
    monkeypatch.setattr(memory, "_runtime", lambda: driver)
    monkeypatch.setattr(memory, "_mapped_bytes", lambda address: 100)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    held = [memory.MappedMemory(OFFER.handle, torch.device("cuda", 0), 100)]
    known = weakref.ref(held[0])
    letting_go = threading.Thread(target=held.clear)
    letting_go.start()
    assert driver.unmapping.wait(30)
    assert known() is None
    driver.may_end.set()
    letting_go.join()


def test_memory_that_is_smaller_than_its_owner_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SlowDriver()
    driver.may_end.set()
    monkeypatch.setattr(memory, "_runtime", lambda: driver)
    monkeypatch.setattr(memory, "_mapped_bytes", lambda address: 99)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with pytest.raises(memory.DeviceMemoryError, match="99 bytes, not 100"):
        memory.MappedMemory(OFFER.handle, torch.device("cuda", 0), 100)
    assert driver.unmapping.is_set()


def test_frames_are_taken_where_it_cannot_be_mapped_and_it_is_said(
    context: Context, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    def offers_both(greeting: Hello) -> Hello:
        cuda = OFFER if greeting.role is Role.DECODE else None
        return replace(here(greeting), planes=(CUDA_IPC, FRAMES), cuda=cuda)

    with closing(World(context, address, plane=CUDA_IPC, greet=offers_both)) as world:
        assert world.p.counters()["planes_fallen_back"] == 1
        assert "prefill-0: no plane cuda-ipc with decode-0: its GPU of-nobody is not visible" in caplog.text
        world.hand_over([7], [3])
        assert world.same_pages([7], [3])


def greeting(plane: str, device: torch.device) -> Hello:
    return make_hello(
        Role.DECODE,
        NodeConfig(join="ipc:///nobody"),
        model="model-a",
        layout=LAYOUT,
        capacity_tokens=1,
        prefill_budget_tokens=1,
        transfer=TransferConfig(transfer=plane),
        device_type=device.type,
    )[0]


def test_a_node_offers_what_its_device_can_do_the_better_first() -> None:
    assert greeting("auto", CPU).planes == ("shm", "frames")
    assert greeting("auto", torch.device("cuda", 0)).planes == ("cuda-ipc", "frames")
    assert greeting("frames", torch.device("cuda", 0)).planes == ("frames",)


@pytest.mark.parametrize(("plane", "device"), [("cuda-ipc", "cpu"), ("shm", "cuda")])
def test_a_plane_that_the_device_cannot_do_is_refused(plane: str, device: str) -> None:
    with pytest.raises(ConfigError, match=f"--transfer {plane} does not work with --device {device}"):
        greeting(plane, torch.device(device))
