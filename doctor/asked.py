"""What `baton doctor` was asked: the options of `baton serve`, and its own few.

It travels to the worker as the plain values of the command line, so both build the same from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import pick
from common.supervision.serve import ServeConfig
from doctor.config import DoctorConfig
from doctor.finding import Finding


@dataclass(frozen=True, slots=True)
class Asked:
    """The server that is meant, and how it is to be looked at."""

    config: ServeConfig
    doctor: DoctorConfig
    cache: Path | None

    @classmethod
    def of(cls, values: dict[str, Any]) -> Asked:
        """Build it from the options of the command."""
        cache = values.get("cache")
        return cls(ServeConfig.of(values), pick(DoctorConfig, values), None if cache is None else Path(cache))


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to look at; the texts stand in docs/doctor.md.

    `run` yields a finding or several; none where the check does not apply. What it raises is a problem.
    """

    name: str
    looks_at: str
    warns: str  # what is a warning; empty where nothing is
    fails: str  # what is a problem; empty where nothing is
    run: Callable[[Asked], Iterator[Finding]]
    limit_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Group:
    """Checks that stand together."""

    name: str
    checks: tuple[Check, ...]
