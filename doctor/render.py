"""Findings as lines for people, or as one JSON object. Knows no check."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from doctor.finding import Finding, Level, worst

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}
_LEVEL_CHARS = max(len(level.value) for level in Level)
_QUIET_S = 2.0  # what is over by then needs no word about it
_CLEAR_LINE = "\r\x1b[K"


@dataclass(frozen=True, slots=True)
class Row:
    """A finding, with the check that made it."""

    group: str
    check: str
    finding: Finding


class Lines:
    """Writes a line as each finding comes, and the name of the check that is waited for."""

    def __init__(self, name_chars: int) -> None:
        self._name_chars = name_chars
        self._group = ""
        self._shows_progress = sys.stderr.isatty()
        self._is_waiting = False
        # Not for NO_COLOR (no-color.org); otherwise click leaves colours out where stdout is no terminal.
        self._color = False if os.environ.get("NO_COLOR") else None

    def waiting(self, check: str, seconds: float) -> None:
        """Say on a terminal what takes its time."""
        if self._shows_progress and seconds >= _QUIET_S:
            click.echo(f"{_CLEAR_LINE}  looking at {check}: {seconds:.0f} s", err=True, nl=False)
            self._is_waiting = True

    def over(self) -> None:
        """Take that line away."""
        if self._is_waiting:
            click.echo(_CLEAR_LINE, err=True, nl=False)
            self._is_waiting = False

    def row(self, row: Row) -> None:
        """Write a finding."""
        self.over()
        if row.group != self._group:
            self._say(("\n" if self._group else "") + click.style(row.group, bold=True))
            self._group = row.group
        level = click.style(f"{row.finding.level.value:<{_LEVEL_CHARS}}", fg=_COLOURS[row.finding.level])
        self._say(f"  {level}  {row.check:<{self._name_chars}}  {_printable(row.finding.found)}")
        if row.finding.remedy:
            self._say(f"{' ' * (_LEVEL_CHARS + self._name_chars + 6)}to do: {_printable(row.finding.remedy)}")

    def summary(self, rows: Sequence[Row], model: str) -> None:
        """Write what follows from all of it."""
        self.over()
        level = worst([row.finding for row in rows])
        self._say(f"\n{click.style(counted(rows), bold=True)}. {_CONCLUSIONS[level].format(model=model)}")

    def _say(self, text: str) -> None:
        click.echo(text, color=self._color)


_CONCLUSIONS = {
    Level.OK: "`baton serve {model}` works here.",
    Level.WARNING: "`baton serve {model}` works here, but for what the warnings say is slower, lacking, or "
    "not known yet.",
    Level.PROBLEM: "`baton serve {model}` would fail here, or be wrong: mend the problems first.",
}


def _printable(text: str) -> str:
    """Return text as one line: names of others may have anything in them, also what moves a cursor."""
    return "".join(char if char.isprintable() else " " for char in text)


def counted(rows: Sequence[Row]) -> str:
    """Count the findings by level."""
    count = Counter(row.finding.level for row in rows)
    words = {Level.OK: "ok", Level.WARNING: "warning", Level.PROBLEM: "problem"}
    return ", ".join(
        f"{count[level]} {word}{'s' * (count[level] != 1 and level is not Level.OK)}"
        for level, word in words.items()
    )


def as_json(rows: Sequence[Row], begun_s: float, about: dict[str, Any]) -> str:
    """Return everything as one JSON object; `begun_s` is of time.monotonic()."""
    findings = [row.finding for row in rows]
    count = Counter(finding.level for finding in findings)
    return json.dumps(
        about
        | {
            "level": worst(findings).value,
            "counts": {level.value: count[level] for level in Level},
            "seconds": round(time.monotonic() - begun_s, 3),
            "checks": [
                {
                    "group": row.group,
                    "check": row.check,
                    "level": row.finding.level.value,
                    "found": row.finding.found,
                    "remedy": row.finding.remedy,
                    "facts": dict(row.finding.facts),
                }
                for row in rows
            ],
        },
        indent=1,
    )
