"""The table of faults names tests that exist, and has the rows that were promised."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "faults.md"
ROWS = [
    *(
        "A1",
        "A2",
        "A4",
        "A6",
        "A8",
        "A10",
        "A13",
        "A15",
        "B1",
        "B3",
        "B4",
        "B7",
        "C1",
        "C2",
        "C3",
        "C6",
        "C10",
    ),
    *("D1", "D3", "D6", "E1", "E2", "E3", "E4", "F2", "F6", "F10", "F14", "F15", "F16", "F17", "I1", "I5"),
]


def table() -> dict[str, list[tuple[str, str]]]:
    """File and name of each row's tests."""
    rows = re.findall(r"^\| ([A-Z]\d+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert len({row for row, _ in rows}) == len(rows), "a row is there twice"
    return {row: re.findall(r"`(tests/\S+\.py)::(\w*)`", cells) for row, cells in rows}


def functions(path: str) -> set[str]:
    """The tests of a file, without running it."""
    if not (ROOT / path).exists():
        return set()
    tree = ast.parse((ROOT / path).read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return {name for name in names if name.startswith("test_")}


def test_the_table_has_the_promised_rows() -> None:
    assert list(table()) == ROWS


@pytest.mark.parametrize("row", ROWS)
def test_row_has_tests_and_all_of_them_exist(row: str) -> None:
    named = table()[row]
    assert [f"{path}::{name}" for path, name in named if name not in functions(path)] == []
    of_the_row = [name for path, name in named if path.startswith("tests/faults/")]
    assert of_the_row
    assert [name for name in of_the_row if not name.startswith(f"test_{row.lower()}_")] == []
