"""How long pages are held after a client left: an abort in every state that a request can be in, on a CPU.

The world of tests/faults: gateway, decode and prefill node of the tiny model in one thread, on real sockets.
A figure is from the client's leaving until both ledgers are clean: the time that passed here, and what the
world let pass until a deadline. It is the worst of some rounds. Each round also checks that the next request
is answered rightly.
"""

from __future__ import annotations

import click
import torch

from benchmarks.measure import TINY, model_folder
from benchmarks.report import Report
from tests.faults.world_cases import CLEAN_WITHIN_S
from tests.faults.world_states import abort_there, cells

_CONTEXT = 512


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Aborts in each state; the slowest counts.")
@click.option("--save", is_flag=True, help="Keep the result in benchmarks/results.")
def main(rounds: int, *, save: bool) -> None:
    """Abort a request in each state, on both planes, with and without overlap."""
    torch.set_num_threads(1)  # to the tiny model a second thread is a burden
    report = Report.of_command("abort_states")
    with model_folder(TINY, _CONTEXT) as folder:
        for cell in cells():
            # Another one before: what is loaded and built the first time is not the abort's.
            took_s = [abort_there(folder, cell) for _ in range(rounds + 1)][1:]
            name = f"{cell.state.name}, {cell.plane}, overlap {'on' if cell.overlap else 'off'}"
            report.add(name, max(took_s) * 1000, "ms", at_most=CLEAN_WITHIN_S * 1000)
    report.publish(save=save)


if __name__ == "__main__":
    main()
