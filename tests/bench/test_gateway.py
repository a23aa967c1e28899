"""The benchmark of the gateway at toy size: a real gateway, a stand-in node, and the raw application."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gateway
from tests.bench.test_benchmarks import names, run

pytestmark = pytest.mark.system


def test_gateway(tiny_model: Path) -> None:
    size = ("--streams", "3", "--tokens", "8", "--rounds", "1", "--long", "300")
    record = run(gateway.main, "--model", str(tiny_model), *size)
    figures = {name: figure["value"] for name, figure in zip(names(record), record["figures"], strict=True)}
    assert figures["chunks a second"] > 0
    assert figures["of the raw ASGI rate"] > 0
    assert {
        "longest gap of 8 streams alone",
        "longest gap of 8 streams beside 300 token ids",
    } <= figures.keys()
