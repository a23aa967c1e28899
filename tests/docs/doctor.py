"""docs/doctor.md: what is written there by hand stays, the tables of checks come from `doctor/`."""

from __future__ import annotations

import re

from doctor.asked import Check
from doctor.groups import GROUPS

_SECTION = re.compile(r"(<!-- generated: checks -->\n).*?(<!-- end -->\n)", re.DOTALL)


def fill_checks(page: str) -> str:
    """Return the page with its tables as the code is now."""
    tables = "\n".join(_table(group.name, group.checks) for group in GROUPS)
    return _SECTION.sub(lambda found: f"{found[1]}\n{tables}\n{found[2]}", page)


def _table(name: str, checks: tuple[Check, ...]) -> str:
    rows = [
        f"| `{check.name}` | {check.looks_at} | {check.warns or '·'} | {check.fails or '·'} |"
        for check in checks
    ]
    head = ["| check | looks at | warning | problem |", "| --- | --- | --- | --- |"]
    title = name[0].upper() + name[1:]
    return "\n".join([f"### {title}", "", *head, *rows, ""])
