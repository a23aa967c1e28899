"""Every row can fail: with its fault put back in it does. What `baton conformance --proofs` runs."""

from __future__ import annotations

import pytest

from conformance.rows import Row, load_rows
from conformance.setup import FAILURES, Models, Servers

pytestmark = [pytest.mark.system, pytest.mark.conformance]


@pytest.mark.parametrize("row", load_rows().values(), ids=lambda row: row.id)
def test_a_row_with_its_fault_put_back_in_fails(row: Row, models: Models) -> None:
    with pytest.raises(FAILURES):
        Servers(models).prove(row)
