"""The core can be read in an afternoon: its code stays under 9,000 lines.

Blank lines, comments and docstrings are left out: they are what makes code quick to read, not what makes it
long. Counted apart are kernels, each of which stands by itself, the supervision of processes by
`baton serve`, and the fault points of tests: nobody needs them to follow a request.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORE = ("common", "transfer", "prefill_node", "decode_node")
KERNELS, SUPERVISION = ROOT / "common" / "kernels", ROOT / "common" / "supervision"
FAULT_POINTS = "fault*.py"
LIMIT, KERNELS_LIMIT, SUPERVISION_LIMIT, FAULTS_LIMIT = 9_000, 1_000, 1_000, 500


def code_lines(source: str) -> int:
    """Count the lines of a file that are code."""
    lines = source.splitlines()
    code = {i for i, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def lines_below(folder: Path, files: str = "*.py") -> int:
    return sum(code_lines(path.read_text()) for path in folder.rglob(files))


def test_the_core_stays_small() -> None:
    kernels, supervision = lines_below(KERNELS), lines_below(SUPERVISION)
    lines = {folder: lines_below(ROOT / folder) for folder in CORE}
    lines["common"] -= kernels + supervision
    faults = {folder: lines_below(ROOT / folder, FAULT_POINTS) for folder in CORE}
    lines = {folder: count - faults[folder] for folder, count in lines.items()}
    print(f"core: {sum(lines.values())} lines {lines}, {kernels=}, {supervision=}, {faults=}")  # noqa: T201
    assert sum(lines.values()) < LIMIT, lines
    assert kernels < KERNELS_LIMIT
    assert supervision < SUPERVISION_LIMIT
    assert sum(faults.values()) < FAULTS_LIMIT


def test_lines_are_counted() -> None:
    assert (
        code_lines(
            '"""Doc\nstring."""\n\n# comment\nx = 1  # code\n\n\ndef f():\n    """Doc."""\n    y(\n    )\n'
        )
        == 4
    )
