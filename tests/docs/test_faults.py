"""The page on faults has every row, and says of it what the code does now."""

from __future__ import annotations

import re

from conformance.rows import NOT_APPLICABLE, load_rows, order
from tests.docs.faults import fill_tables, named_after_rows, what_broke
from tests.docs.generate import FAULTS

PAGE = FAULTS.read_text()


def test_the_page_is_current() -> None:
    assert fill_tables(PAGE) == PAGE, "run: python -m tests.docs.generate"


def test_every_row_is_there_once_with_what_broke_elsewhere() -> None:
    there = re.findall(r"^\| ([A-Z]\d+) \|", PAGE, re.MULTILINE)
    assert there == [*load_rows(), *sorted(NOT_APPLICABLE, key=order)]
    assert [id_ for id_, what in what_broke(PAGE).items() if not what] == []


def test_what_is_written_by_hand_stays_and_a_new_row_has_a_place() -> None:
    kept = what_broke(PAGE)
    without = "".join(line for line in PAGE.splitlines(keepends=True) if not line.startswith("| B3 |"))
    filled = fill_tables(without)
    assert what_broke(filled) == kept | {"B3": ""}
    assert "`baton conformance --row B3`" in filled


def test_every_test_named_after_a_row_is_of_a_row_that_is_tried() -> None:
    assert sorted(named_after_rows().keys() - load_rows().keys(), key=order) == []
