"""An abort in every state of a request: within two seconds all is clean, the next one is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.world_cases import CLEAN_WITHIN_S
from tests.faults.world_states import Cell, abort_there, cells


@pytest.mark.parametrize("cell", list(cells()), ids=str)
def test_an_abort_frees_everything(tiny_model: Path, cell: Cell) -> None:
    assert abort_there(tiny_model, cell) < CLEAN_WITHIN_S
