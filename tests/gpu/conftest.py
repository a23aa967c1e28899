"""Tests that need an NVIDIA GPU; each says that it was skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.wire.conftest import address, context  # noqa: F401  (fixtures)

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device
