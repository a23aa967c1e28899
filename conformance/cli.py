"""The command `baton conformance`."""

from __future__ import annotations

import time

import click

from common.api_key import read_api_key
from common.errors import ConfigError
from conformance.rows import NOT_APPLICABLE, Row, load_rows, order


@click.command()
@click.argument("url", required=False)
@click.option("--row", "chosen", help="Only these rows, for example A1,B3.")
@click.option("--list", "list_", is_flag=True, help="List the rows, and try nothing.")
@click.option("--proofs", is_flag=True, help="Put each row's fault back in, and check that the row fails.")
@click.option(
    "--api-key",
    envvar="BATON_API_KEY",
    help="Key that the server at URL asks for; @FILE reads it from a file.",
)
def main(url: str | None, chosen: str | None, list_: bool, proofs: bool, api_key: str | None) -> int:
    """Try the faults of others on this server.

    Starts servers of a tiny model on this machine. With URL, tries what needs nothing but HTTP on a Baton
    server that runs and that nobody else uses. Exit status 0 when nothing that was tried failed.
    """
    if not __debug__:
        raise ConfigError("baton conformance needs assertions: do not set PYTHONOPTIMIZE")
    if url is not None and proofs:
        raise ConfigError("--proofs puts faults into servers of its own: leave out the URL")
    rows, others = _choose(load_rows(), chosen)
    if list_:
        for id_ in sorted([*rows, *others], key=order):
            needs = f"needs {rows[id_].needs.value}" if id_ in rows else "does not apply"
            click.echo(f"{id_:4} {rows[id_].title if id_ in rows else others[id_]} ({needs})")
        return 0
    from conformance import runner  # with torch

    start = time.monotonic()
    if url is not None:
        results = runner.run_at(url.rstrip("/"), rows.values(), click.echo, read_api_key(api_key))
    else:
        results = runner.run_all(rows.values(), click.echo, prove=proofs)
    results += runner.not_run(others)
    for line in runner.report(results, time.monotonic() - start):
        click.echo(line)
    return int(any(result.result in (runner.FAILED, runner.UNPROVED) for result in results))


def _choose(rows: dict[str, Row], chosen: str | None) -> tuple[dict[str, Row], dict[str, str]]:
    """Return the rows that are to be tried, and those that do not apply."""
    if chosen is None:
        return rows, NOT_APPLICABLE
    ids = [id_.strip().upper() for id_ in chosen.split(",")]
    unknown = [id_ for id_ in ids if id_ not in rows and id_ not in NOT_APPLICABLE]
    if unknown:
        raise ConfigError(f"--row: there is no row {', '.join(unknown)}: see `baton conformance --list`")
    reasons = {id_: NOT_APPLICABLE[id_] for id_ in ids if id_ in NOT_APPLICABLE}
    return {id_: rows[id_] for id_ in ids if id_ in rows}, reasons
