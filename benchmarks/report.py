"""What a benchmark says: a table for people, then one JSON line with the machine that it ran on.

Knows no benchmark. A figure comes with its limit (what the machine, or another program, does in the same
run) and with the aim that it is held against.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import torch

from common.supervision.small_machine import available_cores

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "transformers", "pyzmq", "numpy", "triton", "flashinfer-python")  # those that are here
# Options that change nothing of what is measured; and a key is a secret, which no result may have.
_NOT_MEASURED = ("save", "plot", "profile", "api_key")
# What decides how fast a CPU multiplies.
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    limit_name: str = ""  # what the limit is
    at_most: float | None = None  # the aim; at_least where more is better
    at_least: float | None = None

    @property
    def is_met(self) -> bool | None:
        """The aim is met; None where there is none."""
        if self.at_most is None and self.at_least is None:
            return None
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one run, and the options that it ran with."""

    benchmark: str
    options: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)  # of a benchmark's own, for the JSON line alone
    load_before: tuple[float, float, float] = field(default_factory=os.getloadavg)

    @classmethod
    def of_command(cls, benchmark: str) -> Report:
        """Begin the report of the command that runs, with its options."""
        params = click.get_current_context().params
        return cls(benchmark, {name: value for name, value in params.items() if name not in _NOT_MEASURED})

    def add(self, name: str, value: float, unit: str, **limits: Any) -> None:
        """Add a figure; `limits` are the other fields of Figure."""
        self.figures.append(Figure(name, value, unit, **limits))

    def publish(self, *, save: bool, label: str = "", text: str | None = None) -> Path | None:
        """Print the table and the JSON line; keep the latter in results/ when asked to, and return where.

        Args:
            label: tells several runs of a benchmark apart, in the name of the file.
            text: stands in place of the table.
        """
        click.echo(_table(self.figures) if text is None else text)
        record = self._record()
        path = None
        if save:
            RESULTS.mkdir(exist_ok=True)
            name = "-".join(filter(None, (self.benchmark, label)))
            path = RESULTS / f"{name}-{record['date'][:10]}-{record['commit'] or 'unknown'}.json"
            path.write_text(json.dumps(record, indent=1) + "\n")
            click.echo(f"\nsaved to {path.relative_to(RESULTS.parent.parent)}")
        click.echo("\n" + json.dumps(record))
        return path

    def _record(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
            "machine": _machine(),
            "load_average": {"before": self.load_before, "after": os.getloadavg()},
            "versions": {"python": platform.python_version(), **_versions()},
            "options": self.options,
            "figures": [_record_of(figure) for figure in self.figures],
            **self.extra,
        }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _record_of(figure: Figure) -> dict[str, Any]:
    facts = asdict(figure) | {"is_met": figure.is_met}
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _table(figures: Sequence[Figure]) -> str:
    rows = [("", "measured", "limit", "", "aim")]
    for figure in figures:
        rows.append(
            (
                figure.name,
                f"{_number(figure.value)} {figure.unit}",
                "" if figure.limit is None else f"{_number(figure.limit)} {figure.unit}",
                figure.limit_name,
                _aim(figure),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join(
        "  ".join(
            f"{cell:>{width}}" if column in (1, 2) else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _aim(figure: Figure) -> str:
    if figure.is_met is None:
        return ""
    bound = f"<= {figure.at_most:g}" if figure.at_most is not None else f">= {figure.at_least:g}"
    return f"{bound}  {'met' if figure.is_met else 'MISSED'}"


def _number(value: float) -> str:
    if isinstance(value, int):  # a count
        return str(value)
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _machine() -> dict[str, Any]:
    """Facts from /proc/cpuinfo (of the first processor), torch and nvidia-smi."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    flags = facts.get("flags", "").split()
    return {
        "cpu": facts.get("model name", platform.machine()),
        "cores": available_cores(),
        "torch_threads": torch.get_num_threads(),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "system": f"{platform.system()} {platform.release()}",
        "gpus": _gpus(),
    }


def _gpus() -> list[dict[str, str]]:
    """Return name, driver and memory of each GPU, as nvidia-smi tells them; none where it is not there."""
    fields = ("name", "driver_version", "memory.total")
    said = _said("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    return [dict(zip(fields, line.split(", "), strict=False)) for line in (said or "").splitlines()]


def _commit() -> str | None:
    """Return the commit of the project's folder, marked when the code is not quite that; None without git."""
    return _said("git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*")


def _said(*command: str) -> str | None:
    """Return what a command printed in the project's folder; None where it failed or is not there."""
    try:
        return subprocess.run(
            command, cwd=RESULTS.parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
