"""A run in parts: one that fails is told of, and the others go on. Knows no benchmark."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import click

from benchmarks.targets import Targets
from common.errors import ConfigError
from terminal.progress import progress


@dataclass(slots=True)
class Parts:
    """The parts of a run; says on stderr what each found and how long it took."""

    targets: Targets
    failed: list[str] = field(default_factory=list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Do a part inside."""
        started_s = time.monotonic()
        figures = self.targets.report.figures
        before = len(figures)
        try:
            with progress(name):
                yield
        except Exception as error:  # whatever it is, the other figures are still worth having
            self.failed.append(name)
            why = str(error) if isinstance(error, ConfigError) else f"\n{traceback.format_exc()}"
            click.echo(f"{name} failed: {why}", err=True)
        click.echo(f"{name}: {time.monotonic() - started_s:.1f} s", err=True)
        for figure in figures[before:]:
            click.echo(f"  {figure.name}: {figure.value:.5g} {figure.unit}", err=True)

    def publish(self, *, save: bool, label: str) -> None:
        """Say how many failed, and publish the report.

        Raises:
            SystemExit: a part failed.
            ConfigError: an aim or a limit is for a figure that is not there.
        """
        self.targets.report.add("parts that failed", len(self.failed), "parts", at_most=0)
        self.targets.report.publish(save=save, label=label)
        if self.failed:
            raise SystemExit(1)
        self.targets.check()
