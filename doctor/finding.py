"""What a check found: its level, a sentence, and what to do. Knows no check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

Fact = int | float | str | bool


class Level(Enum):
    """How bad it is; the order is from good to bad."""

    OK = "ok"
    WARNING = "warning"  # a server runs, but slower, or without something
    PROBLEM = "problem"  # `baton serve` fails here, or would be wrong


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the answer."""

    level: Level
    found: str
    remedy: str = ""  # what to do; empty when nothing is to be done
    facts: Mapping[str, Fact] = field(default_factory=dict)  # for machines: name (with its unit) -> value


def ok(found: str, **facts: Fact) -> Finding:
    """All is well."""
    return Finding(Level.OK, found, facts=facts)


def warning(found: str, remedy: str, **facts: Fact) -> Finding:
    """A server runs, but slower or without something."""
    return Finding(Level.WARNING, found, remedy, facts)


def problem(found: str, remedy: str, **facts: Fact) -> Finding:
    """A server does not run, or would be wrong."""
    return Finding(Level.PROBLEM, found, remedy, facts)


def worst(findings: list[Finding]) -> Level:
    """Return the worst level; ok where nothing was found."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)
