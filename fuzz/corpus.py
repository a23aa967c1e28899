"""The inputs that are kept: one file a target, one input a line in hex."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fuzz.targets import Run

FOLDER = Path(__file__).parent / "corpus"


def load(name: str) -> list[bytes]:
    """Return the inputs of a target; none where none were kept."""
    path = FOLDER / f"{name}.hex"
    return [bytes.fromhex(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(name: str, inputs: Iterable[bytes], run: Run, *, most_bytes: int) -> int:
    """Write the inputs anew, as many as fit; return how many.

    For each outcome the shortest one goes first, then what else reached new code, the shortest first.
    """
    firsts: dict[str, bytes] = {}
    others: list[bytes] = []
    for data in sorted(set(inputs), key=lambda data: (len(data), data)):
        if firsts.setdefault(run(data), data) is not data:
            others.append(data)
    lines: list[str] = []
    for data in (*firsts.values(), *others):
        most_bytes -= 2 * len(data) + 1
        if most_bytes < 0:
            break
        lines.append(data.hex())
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.hex").write_text("".join(line + "\n" for line in lines))
    return len(lines)
