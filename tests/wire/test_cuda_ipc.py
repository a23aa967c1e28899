"""The plane cuda-ipc where it cannot work: it is refused, or frames are taken, and it is said."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from common.config import NodeConfig, TransferConfig
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
