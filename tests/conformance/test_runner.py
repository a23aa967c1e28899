"""What `baton conformance` says of rows, whatever they raise."""

from __future__ import annotations

import json
import subprocess

import pytest
from click.testing import CliRunner

from common.errors import ConfigError
from conformance.cli import main
from conformance.rows import Needs, Proof, Row
from conformance.runner import report, run_all
from conformance.setup import Setup


def raises(error: Exception) -> Row:
    def run(s: Setup) -> None:
        raise error

    return Row("Z1", "a row", Needs.NOTHING, (), Proof("a fault"), run)


@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("x", 1), StopIteration(), ConfigError("no")])
def test_a_row_that_breaks_has_failed_and_the_table_is_whole(error: Exception) -> None:
    said: list[str] = []
    last = json.loads(report(run_all([raises(error)], said.append), 1.0)[-1])
    assert last["failed"] == ["Z1"]
    assert said[0].startswith("Z1   FAILED")


def test_a_row_that_breaks_is_no_proof() -> None:
    said: list[str] = []
    results = run_all([raises(StopIteration()), raises(AssertionError())], said.append, prove=True)
    assert [result.result for result in results] == ["UNPROVED", "proved"]


def test_proofs_need_servers_of_their_own() -> None:
    result = CliRunner().invoke(main, ["http://127.0.0.1:9", "--proofs"])
    assert isinstance(result.exception, ConfigError)
    assert "leave out the URL" in str(result.exception)
