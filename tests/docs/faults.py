"""docs/faults.md: what broke elsewhere is written there by hand, all else comes from rows and tests."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from conformance.rows import NOT_APPLICABLE, Row, load_rows, order

TESTS = Path(__file__).parents[1] / "faults"
_SECTION = re.compile(r"(<!-- generated: (tried|not tried) -->\n).*?(<!-- end -->\n)", re.DOTALL)
_WRITTEN = re.compile(r"^\| ([A-Z]\d+) \| (.*?) \|", re.MULTILINE)


def what_broke(page: str) -> dict[str, str]:
    """Return what the page says, by hand, of each row."""
    return dict(_WRITTEN.findall(page))


def fill_tables(page: str) -> str:
    """Return the page with both tables as the code is now; a row that is new has an empty cell to fill."""
    written, tests = what_broke(page), named_after_rows()
    tried = [
        f"| {id_} | {written.get(id_, '')} | {_shown_by(row, tests.get(id_, {}))} | {_made_to_fail_by(row)} |"
        for id_, row in load_rows().items()
    ]
    others = [
        f"| {id_} | {written.get(id_, '')} | {NOT_APPLICABLE[id_]} |"
        for id_ in sorted(NOT_APPLICABLE, key=order)
    ]
    tables = {
        "tried": _table("row | what broke elsewhere | shown here by | made to fail by", tried),
        "not tried": _table("row | what broke elsewhere | why it is not tried", others),
    }
    return _SECTION.sub(lambda found: found[1] + tables[found[2]] + found[3], page)


def named_after_rows() -> dict[str, dict[str, str]]:
    """Return the tests that are named after a row, each with its file: nothing is imported."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and (named := re.match(r"test_([a-z]\d+)_", node.name)):
                found[named[1].upper()][node.name] = path.name
    return found


def _table(head: str, rows: list[str]) -> str:
    return "\n".join([f"| {head} |", "|" + " --- |" * len(head.split(" | ")), *rows, ""])


def _shown_by(row: Row, tests: dict[str, str]) -> str:
    named = [f"[`{name}`](../tests/faults/{file})" for name, file in tests.items()]
    return "<br>".join([f"`baton conformance --row {row.id}`: {row.title}", *named])


def _made_to_fail_by(row: Row) -> str:
    assert row.proof is not None, row.id
    return row.proof.what + (f" (`{row.proof.faults}`)" if row.proof.faults else "")
