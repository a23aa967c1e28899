"""The conformance suite of data planes, on each plane."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from common.kv.layout import KVLayout
from tests.wire.endpoint_world import Context, World
from tests.wire.hellos import LAYOUT
from tests.wire.plane_aborts import ABORTS
from tests.wire.plane_churn import Churn
from tests.wire.plane_conformance import HAND_OVERS, Check, OpenWorld, PlaneUnderTest
from tests.wire.slow_streams import LaggingStream
from transfer.planes.frames import FRAMES
from transfer.planes.shm import SHM

PLANES = [
    PlaneUnderTest(name, one_sided=name == SHM, lagging=lagging)
    for lagging in (False, True)
    for name in (FRAMES, SHM)
]


@pytest.fixture(params=PLANES, ids=lambda plane: plane.name + "-lagging" * plane.lagging)
def plane(request: pytest.FixtureRequest) -> PlaneUnderTest:
    assert isinstance(request.param, PlaneUnderTest)
    return request.param


@pytest.fixture
def open_world(plane: PlaneUnderTest, context: Context, address: str) -> Iterator[OpenWorld]:
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
                stream=LaggingStream() if plane.lagging else None,
            )
            worlds.append(world)
            return stack.enter_context(closing(world))

        yield open_one


@pytest.mark.parametrize("check", [*HAND_OVERS, *ABORTS], ids=lambda check: check.__name__)
def test_plane(check: Check, plane: PlaneUnderTest, open_world: OpenWorld) -> None:
    check(plane, open_world)


def test_many_transfers_and_aborts(open_world: OpenWorld) -> None:
    churn = Churn(open_world())
    churn.run(200)
    assert churn.released > 0 < churn.done
