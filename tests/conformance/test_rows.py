"""Every row of the catalogue, on servers of its own: what `baton conformance` runs."""

from __future__ import annotations

import pytest

from conformance.rows import NOT_APPLICABLE, Row, load_rows
from conformance.runner import in_order
from conformance.setup import Servers


@pytest.mark.system
@pytest.mark.conformance
@pytest.mark.parametrize("row", in_order(load_rows().values()), ids=lambda row: row.id)
def test_row(row: Row, servers: Servers) -> None:
    servers.run(row)


def test_no_row_is_tried_and_has_a_reason_why_not() -> None:
    assert load_rows().keys() & NOT_APPLICABLE.keys() == set()


def test_every_row_has_a_proof() -> None:
    assert [row.id for row in load_rows().values() if row.proof is None] == []
