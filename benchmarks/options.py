"""Options that several benchmarks have. Knows no benchmark."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import click


def choices_of(config: type[Any], name: str) -> click.Choice[str]:
    """Return the values that a field of a config can have."""
    field = next(field for field in fields(config) if field.name == name)
    return click.Choice(field.metadata["choices"])


def whole_numbers(context: click.Context, param: click.Parameter, value: str) -> list[int]:
    """Read numbers above 0, separated by commas; an empty text is none."""
    try:
        numbers = [int(number) for number in value.split(",") if value]
    except ValueError:
        raise click.BadParameter("not whole numbers, separated by commas") from None
    if any(number < 1 for number in numbers):
        raise click.BadParameter("numbers above 0 are wanted")
    return numbers


class NewFile(click.Path):
    """A file to be written when all is measured: its folder must be there before."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse what could not be written."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not os.access(path.absolute().parent, os.W_OK):
            self.fail(f"{path.absolute().parent} is no folder that can be written", param, ctx)
        return path
