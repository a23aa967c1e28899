"""The model and the answers of tests/system, and a way to print figures; every run starts its own server."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.system.conftest import cases, model, oracle

__all__ = ["cases", "model", "oracle", "say"]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print a line of figures, although pytest keeps what tests print."""

    def print_line(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}", end="", flush=True)  # noqa: T201

    return print_line
