"""Rows can fail: with their fault put back in they do. A few here; all by `baton conformance --proofs`."""

from __future__ import annotations

import pytest

from conformance.rows import load_rows
from conformance.setup import FAILURES, Models, Servers

pytestmark = [pytest.mark.system, pytest.mark.conformance]

CHEAP = ("A1", "A15", "B15", "C1", "D1", "F6")


@pytest.mark.parametrize("id_", CHEAP)
def test_a_row_with_its_fault_put_back_in_fails(id_: str, models: Models) -> None:
    with pytest.raises(FAILURES):
        Servers(models).prove(load_rows()[id_])
