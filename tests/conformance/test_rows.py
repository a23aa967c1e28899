"""Every row of the catalogue, on servers of its own: what `baton conformance` runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.rows import NOT_APPLICABLE, ROWS, Row, load_rows, order
from conformance.runner import in_order
from conformance.setup import Servers

CATALOGUE = Path(__file__).parent.parent.parent / "docs" / "faults.md"


@pytest.mark.system
@pytest.mark.conformance
@pytest.mark.parametrize("row", in_order(load_rows().values()), ids=lambda row: row.id)
def test_row(row: Row, servers: Servers) -> None:
    servers.run(row)


def test_every_row_is_tried_or_has_a_reason() -> None:
    """No row of the page on faults is left out, and none is both."""
    load_rows()
    assert ROWS.keys() & NOT_APPLICABLE.keys() == set()
    named = set(re.findall(r"^\| ([A-K]\d+) \|", CATALOGUE.read_text(), re.MULTILINE))
    assert sorted(named - ROWS.keys() - NOT_APPLICABLE.keys(), key=order) == []


def test_every_row_has_a_proof() -> None:
    assert [row.id for row in load_rows().values() if row.proof is None] == []
