"""Aims and limits that the user gives on the command line, put beside the figures that they name.

A figure `TTFT p50` in ms is named ttft_p50_ms. More is better for rates and shares, less for anything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import click

from benchmarks.report import Report
from common.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
_UNIT_WORDS = {"%": "percent"}


def takes_targets(command: F) -> F:
    """Give a command the options --aim and --limit."""
    kinds = {
        "limit": "What the machine, or another program, does; stands beside the figure.",
        "aim": "Hold a figure against this, as in ttft_p50_ms=16; at least for rates and shares.",
    }
    for name, text in kinds.items():
        command = click.option(f"--{name}", multiple=True, metavar="NAME=VALUE", help=text)(command)
    return command


def name_of(name: str, unit: str) -> str:
    """Return what a figure is called on the command line."""
    return re.sub(r"\W+", "_", f"{name} {_UNIT_WORDS.get(unit, unit)}".lower().replace("/", " per ")).strip(
        "_"
    )


@dataclass(slots=True)
class Targets:
    """Adds figures to a report, each with its aim and its limit.

    Raises:
        ConfigError: an aim or a limit is not NAME=VALUE.
    """

    report: Report
    aims: dict[str, float]
    limits: dict[str, float]
    names: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, report: Report, aim: Sequence[str], limit: Sequence[str]) -> Targets:
        """Read what the options of `takes_targets` say."""
        return cls(report, _values(aim), _values(limit))

    def add(self, name: str, value: float, unit: str, **limits: Any) -> None:
        """Add a figure; `limits` are other fields of Figure."""
        key = name_of(name, unit)
        self.names.add(key)
        if key in self.aims:
            more_is_better = unit == "%" or unit.endswith("/s")
            limits["at_least" if more_is_better else "at_most"] = self.aims[key]
        if key in self.limits:
            limits |= {"limit": self.limits[key], "limit_name": ""}
        self.report.add(name, value, unit, **limits)

    def check(self) -> None:
        """Find names that no figure has; called when all figures are there.

        Raises:
            ConfigError: there is one.
        """
        if unknown := sorted((self.aims.keys() | self.limits.keys()) - self.names):
            raise ConfigError(f"there is no figure {unknown[0]}, only {', '.join(sorted(self.names))}")


def _values(given: Sequence[str]) -> dict[str, float]:
    values = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            values[name] = float(value)
        except ValueError:
            raise ConfigError(f"{text!r} is not NAME=VALUE with a number") from None
    return values
