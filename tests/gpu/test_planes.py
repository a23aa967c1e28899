"""The conformance suite of data planes on GPUs: both ends on one, and on two where there are two.

Both ends are in this process, which cannot map its own memory by a handle: see test_cuda_ipc.py for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import torch

from common.kv.layout import KVLayout
from tests.wire.endpoint_world import CPU, Context, World
from tests.wire.hellos import LAYOUT
from tests.wire.plane_aborts import ABORTS
from tests.wire.plane_churn import Churn
from tests.wire.plane_conformance import HAND_OVERS, Check, OpenWorld, PlaneUnderTest
from transfer.planes.cuda_ipc import CUDA_IPC
from transfer.planes.frames import FRAMES

GPUS = [torch.device("cuda", index) for index in range(min(2, torch.cuda.device_count()))] or [
    torch.device("cuda", 0)  # named, and skipped
]
ON_GPUS = [(GPUS[0], d_gpu) for d_gpu in GPUS]
CASES = [
    *((PlaneUnderTest(CUDA_IPC, one_sided=True), pair) for pair in ON_GPUS),
    *((PlaneUnderTest(FRAMES, one_sided=False), pair) for pair in (*ON_GPUS, (CPU, GPUS[0]), (GPUS[0], CPU))),
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0].name} {case[1][0]} to {case[1][1]}")
def case(request: pytest.FixtureRequest) -> tuple[PlaneUnderTest, tuple[torch.device, torch.device]]:
    plane, (p_device, d_device) = request.param
    # torch lets one GPU reach another when it first copies from it.
    torch.ones(1, device=p_device).to(d_device).to(p_device)
    return plane, (p_device, d_device)


@pytest.fixture
def plane(case: tuple[PlaneUnderTest, object]) -> PlaneUnderTest:
    return case[0]


@pytest.fixture
def open_world(
    case: tuple[PlaneUnderTest, tuple[torch.device, torch.device]], context: Context, address: str
) -> Iterator[OpenWorld]:
    plane, (p_device, d_device) = case
    with ExitStack() as stack:
        worlds: list[World] = []

        def open_one(*, layout: KVLayout = LAYOUT, num_pages: int = 32, tapped: bool = False) -> World:
            world = World(
                context,
                f"{address}{len(worlds)}",
                layout=layout,
                num_pages=num_pages,
                plane=plane.name,
                tapped=tapped,
                p_device=p_device,
                d_device=d_device,
            )
            worlds.append(world)
            return stack.enter_context(closing(world))

        yield open_one


@pytest.mark.parametrize("check", [*HAND_OVERS, *ABORTS], ids=lambda check: check.__name__)
def test_plane(check: Check, plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    check(plane, open_world)


def test_a_thousand_transfers_with_aborts(open_world: OpenWorld) -> None:
    world = open_world(layout=KVLayout(layers=4, page_size=16, kv_heads=8, head_dim=128, dtype="bfloat16"))
    churn = Churn(world)
    churn.run(1000)
    assert churn.released > 0 < churn.done
    assert world.d.counters()["chunks_broken"] == 0
