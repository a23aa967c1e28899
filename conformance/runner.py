"""Try rows, and say what came of each: a line as it goes, a table, one JSON line."""

from __future__ import annotations

import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import torch

from common.errors import ConfigError
from conformance.client import Client
from conformance.rows import NOT_APPLICABLE, Needs, Row, order
from conformance.setup import FAILURES, WAIT_S, Models, Servers, Setup
from terminal.progress import beside_progress, progress

PASSED, FAILED, SKIPPED, PROVED, UNPROVED = "passed", "FAILED", "not run", "proved", "UNPROVED"


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a row."""

    row: str
    result: str
    seconds: float = 0.0
    title: str = ""
    reason: str = ""  # why it failed, or was not run
    proof: str = ""  # what makes it fail

    def line(self) -> str:
        """For people."""
        seconds = f"{self.seconds:6.1f} s" if self.seconds else " " * 8
        what = self.title if self.result == PASSED else self.reason
        return f"{self.row:4} {self.result:8} {seconds}  {what}"


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Those of the same options one after the other: a server is started once."""
    return sorted(rows, key=lambda row: (row.needs is Needs.FRESH, row.options, order(row.id)))


def run_all(rows: Iterable[Row], say: Callable[[str], None], *, prove: bool = False) -> list[Result]:
    """Try rows on servers of their own; with `prove`, try each with its fault put back in instead."""
    results = []
    torch.set_num_threads(1)  # two that wait for each other beside servers take 20 times as long
    with tempfile.TemporaryDirectory(prefix="bc-", dir="/tmp") as folder:
        servers = Servers(Models(Path(folder)))
        try:
            with progress("conformance", len(ordered := in_order(rows))) as shown:
                for row in ordered:
                    shown.say(row.id)
                    results.append(_prove(row, servers) if prove else _try(row, servers.run))
                    shown.advance()
                    with beside_progress():
                        say(results[-1].line())
        finally:
            servers.close()
    return results


def run_at(
    url: str, rows: Iterable[Row], say: Callable[[str], None], api_key: str | None = None
) -> list[Result]:
    """Try what needs only HTTP and the ledger, at a server that runs.

    Raises:
        ConfigError: no Baton server answers there.
    """
    try:
        client = Client(url, "", WAIT_S, api_key)
        client.model = str(client.get("/v1/models").json()["data"][0]["id"])
        client.get("/debug/kv").json()["nodes"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"no Baton server answers at {url}: {error or type(error).__name__}") from None
    results = []
    with progress("conformance", len(every := list(rows))) as shown:
        for row in every:
            if row.needs is Needs.HTTP:
                shown.say(row.id)
                results.append(_try(row, lambda row: _run_at(row, client)))
            else:
                results.append(Result(row.id, SKIPPED, title=row.title, reason="needs its own server"))
            shown.advance()
            with beside_progress():
                say(results[-1].line())
    return results


def not_run(ids: Iterable[str]) -> list[Result]:
    """The rows that do not apply."""
    return [Result(id_, SKIPPED, reason=NOT_APPLICABLE[id_]) for id_ in ids]


def report(results: Sequence[Result], wall_s: float) -> list[str]:
    """A table, and one JSON line."""
    results = sorted(results, key=lambda result: order(result.row))
    width = max(len(result.title) for result in results) + 2
    lines = ["", f"{'row':4} {'result':8} {'seconds':>8}  {'what':{width}}reason, or what makes it fail"]
    for result in results:
        seconds = f"{result.seconds:8.1f}" if result.seconds else " " * 8
        why = (result.reason or result.proof).splitlines()
        line = f"{result.row:4} {result.result:8} {seconds}  {result.title:{width}}{why[0] if why else ''}"
        lines.append(line.rstrip())
    counts = {name: sum(result.result == name for result in results) for name in (PASSED, PROVED, SKIPPED)}
    failed = [result.row for result in results if result.result in (FAILED, UNPROVED)]
    summary = {"suite": "conformance", **counts, "failed": failed, "seconds": round(wall_s, 1)}
    rows = [{key: value for key, value in asdict(result).items() if value} for result in results]
    return [*lines, "", json.dumps(summary | {"rows": rows})]


def _run_at(row: Row, client: Client) -> None:
    row.run(Setup(client))
    client.assert_ledger_clean()


def _try(row: Row, run: Callable[[Row], None]) -> Result:
    start = time.monotonic()
    result, reason = PASSED, ""
    try:
        run(row)
    except Exception as error:  # whatever it is: the other rows are tried, and the last line is JSON
        result, reason = FAILED, _why(error)
    proof = row.proof.what if row.proof is not None else ""
    return Result(row.id, result, round(time.monotonic() - start, 2), row.title, reason, proof)


def _prove(row: Row, servers: Servers) -> Result:
    if row.proof is None:
        return Result(row.id, SKIPPED, title=row.title, reason="has no proof")
    start = time.monotonic()
    result, reason = UNPROVED, "passed with its fault put back in"
    try:
        servers.prove(row)
    except FAILURES as error:
        result, reason = PROVED, f"{row.proof.what}: {_why(error)}"
    except Exception as error:  # NotStarted, or a bug of the row
        reason = _why(error)
    return Result(row.id, result, round(time.monotonic() - start, 2), row.title, reason, row.proof.what)


def _why(error: BaseException) -> str:
    """What failed: what was said, or the line that was asserted."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "conformance" in f.filename]
    at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return f"{error or type(error).__name__} ({at})" if str(error) else at
