"""The group `baton bench`: benchmarks of a server or of this machine, each loaded when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

# Name of the command -> its module, which has it as `main`.
_MODULES = {
    "serve": "benchmarks.serve",
    "compare": "benchmarks.compare",
    "step": "benchmarks.step",
    "timeline": "benchmarks.timeline",
    "transfer": "benchmarks.transfer",
}


class _Lazy(click.Group):
    """Imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        module: Any = import_module(_MODULES[cmd_name])
        command: click.Command = module.main
        return command


@click.group(cls=_Lazy)
def bench() -> None:
    """Measure a server, or this machine."""
