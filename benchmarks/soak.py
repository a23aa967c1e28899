"""A soak: random requests for a long time, while everything that can happen to a server does.

Clients ask for what an oracle has the answers of; some leave, some are in a hurry. Nodes are killed, stopped,
stalled and told to end, bursts come that are more than is taken and, with `--faults`, messages are lost and
pages change (`BATON_FAULTS`). At the end every answer was right or an error that is allowed, all pages are
free, and the processes that lived through it have no more memory and file descriptors than before.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import click

from benchmarks.report import RESULTS, Report
from benchmarks.soak_accidents import NODES, STALL_TIMEOUT_S, Accidents
from benchmarks.soak_plot import Chart, draw
from benchmarks.soak_requests import LOST, REQUEST_TIMEOUT_S, Crowd, make_cases
from benchmarks.soak_watch import Watch, slope_per_minute
from conformance.process import START_S
from conformance.server import Server
from conformance.waiting import poll_until
from tests.model.paged import transformers_greedy
from tests.system.client import Client
from tests.system.conftest import EOS_PROMPT
from tests.system.test_logprobs_penalties import Loop
from tests.tiny import IM_END, write_tiny_model

_OPTIONS = {
    "--prefill": 2, "--decode": 2, "--kv-pages": 512, "--max-running": 16, "--max-queued": 64,
    "--stall-timeout": STALL_TIMEOUT_S, "--drain-grace": 5, "--request-timeout": REQUEST_TIMEOUT_S,
}  # fmt: skip
_NUM_CASES = 60
_CLEAN_S = 5.0
_LATE_S = 5.0  # beyond its deadline, on a busy machine
_LAST_ROUND = 50
_MOST_MIB_PER_MINUTE, _MOST_FDS = 1.0, 2
_FLAT_MINUTES = 10  # a shorter run is warming up: each burst that is the largest so far takes memory
_LASTING = ("gateway", "supervisor")  # the processes that nobody kills


def _model(folder: Path) -> Path:
    """Write the tiny model of the tests, which answers EOS_PROMPT with an end of sequence."""
    ((first,),) = transformers_greedy(write_tiny_model(folder / "plain"), [EOS_PROMPT], 1)
    return write_tiny_model(folder / "eos", eos_token_id=[IM_END, first])


async def _soak(crowd: Crowd, accidents: Accidents, watch: Watch, clients: int, until_s: float) -> None:
    async with crowd.client.session() as http, asyncio.TaskGroup() as group:
        watching = group.create_task(watch.go_on())
        asking = [group.create_task(crowd.ask(http)) for _ in range(clients)]
        try:
            await accidents.go_on(http, until_s)
        finally:
            crowd.is_over = True
        await asyncio.wait(asking)
        watching.cancel()


def _settle(server: Server, client: Client, crowd: Crowd, watch: Watch) -> float:
    """Wait until all is as in the beginning; return the seconds until all pages were free."""
    poll_until(lambda: set(NODES) <= server.nodes().keys(), START_S, "all nodes are back", server.tail)
    poll_until(lambda: not client.get("/debug/kv").json()["missing"], START_S, "all joined", server.tail)
    server.wait_ready()
    start_s = time.monotonic()
    client.assert_ledger_clean(START_S)
    took_s = time.monotonic() - start_s
    before = crowd.tally.ends["right"]

    async def last_round() -> None:
        async with crowd.client.session() as http:
            while crowd.tally.ends["right"] < before + _LAST_ROUND:
                await crowd.one(http)

    asyncio.run(last_round())
    client.assert_ledger_clean(_CLEAN_S)
    watch.look()
    return took_s


def _report(report: Report, crowd: Crowd, accidents: Accidents, watch: Watch, clean_s: float) -> None:
    tally = crowd.tally
    report.add("requests", sum(tally.ends.values()), "")
    for end, count in sorted(tally.ends.items()):
        report.add(f"ended: {end}", count, "")
    report.add("wrong answers", len(tally.wrong), "", at_most=0)
    report.add("slowest answer", tally.slowest_s, "s", at_most=REQUEST_TIMEOUT_S + _LATE_S)
    for what, count in sorted(accidents.counts.items()):
        report.add(f"happened: {what}", count, "")
    report.add("all pages free again after", clean_s, "s", at_most=_CLEAN_S)
    for name in _LASTING:
        fds = watch.descriptors(name)
        report.add(f"{name}: memory", watch.memory(name)[-1][1], "MiB")
        slope = slope_per_minute(watch.memory(name))
        most = _MOST_MIB_PER_MINUTE if report.options["minutes"] >= _FLAT_MINUTES else None
        report.add(f"{name}: memory, slope", slope, "MiB/min", at_most=most)
        report.add(f"{name}: descriptors", fds[-1][1], "", limit=fds[0][1], limit_name="at the start")
        report.add(f"{name}: descriptors more", fds[-1][1] - fds[0][1], "", at_most=_MOST_FDS)
    # A node starts with little, and each is started again and again: the most that any of them ever has.
    (mib, fds_3), (last_mib, last_fds) = watch.most(NODES, 3), watch.most(NODES, 4)
    report.add("nodes: most memory, last quarter", last_mib, "MiB", limit=mib, limit_name="third quarter")
    report.add("nodes: most descriptors, last quarter", last_fds, "", limit=fds_3, limit_name="third quarter")


def _picture(report: Report, crowd: Crowd, accidents: Accidents, watch: Watch) -> str:
    end_s = max(at_s for at_s, _ in watch.memory("supervisor"))
    names = (*_LASTING, *NODES)
    ends: dict[str, Counter[int]] = {}
    for (second, end), count in crowd.tally.by_second.items():
        ends.setdefault(end, Counter())[second] += count
    rates = {
        end: [(float(s), float(counts[s])) for s in range(int(end_s))] for end, counts in sorted(ends.items())
    }
    charts = [
        Chart("requests ended a second", rates),
        Chart("memory, MiB", {name: watch.memory(name) for name in names}),
        Chart("file descriptors", {name: watch.descriptors(name) for name in names}),
    ]
    title = f"A soak of {end_s / 60:.1f} minutes: {sum(crowd.tally.ends.values())} requests"
    return draw(title, charts, accidents.happened, end_s)


@click.command()
@click.option("--minutes", default=20.0, show_default=True, help="How long.")
@click.option(
    "--clients", default=24, show_default=True, help="Clients that ask, each one request at a time."
)
@click.option("--seed", default=1, show_default=True, help="The same gives the same requests and accidents.")
@click.option("--faults/--no-faults", default=False, help="Fault points are set now and then.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw what happened into this SVG file.")
@click.option("--save", is_flag=True, help="Keep result and plot in benchmarks/results.")
def main(minutes: float, clients: int, seed: int, plot: Path | None, *, faults: bool, save: bool) -> None:
    """Ask and break for a long time; check every answer and, at the end, every page."""
    report = Report.of_command("soak")
    with tempfile.TemporaryDirectory(prefix="bt-", dir="/tmp") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = _model(folder)
        loop = Loop(model)
        cases = make_cases(loop, _NUM_CASES, seed)
        (folder / "server").mkdir()
        words = [str(word) for option in _OPTIONS.items() for word in option]
        server = Server(folder / "server", model, words)
        stack.callback(server.kill)
        server.wait_ready()
        client = Client(server.url, server.model)
        poll_until(lambda: len(client.get("/debug/kv").json()["nodes"]) == 4, START_S, "all joined")
        crowd = Crowd(client, cases, loop, random.Random(seed))
        crowd.tally.allowed += (LOST,) if faults else ()
        accidents = Accidents(server, crowd, random.Random(seed + 1), faults)
        watch = Watch(server)
        try:
            asyncio.run(_soak(crowd, accidents, watch, clients, time.monotonic() + 60 * minutes))
            clean_s = _settle(server, client, crowd, watch)
            server.stop()
        except BaseException:
            Path("soak.log").write_text(server.log)
            click.echo("\n".join(crowd.tally.wrong[:5]), err=True)
            raise
        tracebacks = server.log.count("Traceback")
        if crowd.tally.wrong or tracebacks:
            Path("soak.log").write_text(server.log)
    _report(report, crowd, accidents, watch, clean_s)
    report.add("tracebacks in the log", tracebacks, "", at_most=0)
    if save:
        RESULTS.mkdir(exist_ok=True)
    for path in filter(None, (plot, RESULTS / "soak.svg" if save else None)):
        path.write_text(_picture(report, crowd, accidents, watch))
    click.echo("\n".join(crowd.tally.wrong[:5]), err=True)
    report.publish(save=save)
    if not all(figure.is_met in (None, True) for figure in report.figures):
        sys.exit(1)


if __name__ == "__main__":
    main()
