"""What a long prompt does to the tokens that others are reading: streams beside it, and without it.

Some streams decode; a long prompt comes, is prefilled and gets its first token; they decode on. The time
between tokens is the client's, over HTTP: quiet (before and after), and while the prompt was computed. Twice:
with prefill in a process of its own, and with one node that does both (`--colocated`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.answers import read_answer
from benchmarks.measure import TINY, model_folder, random_prompt
from benchmarks.percentiles import percentile
from benchmarks.plot import Panel, draw
from benchmarks.report import RESULTS, Report
from benchmarks.server import running
from benchmarks.token_streams import StreamClient, TokenStream
from common.errors import LocalError
from common.model.spec import load_spec

_STREAM_PROMPT = 32
_CONTEXT = 32768  # of the tiny model: its positions
_PATIENCE_S = 300.0
_SERVERS: dict[str, tuple[str, ...]] = {"disaggregated": (), "colocated": ("--colocated",)}


@dataclass(frozen=True, slots=True)
class Observed:
    """What came over HTTP, in seconds from when the long prompt was sent."""

    gaps: list[tuple[float, float]]  # between tokens of all streams: when each ended, how long it was
    first_token_s: float  # of the prompt

    def beside(self) -> list[float]:
        """Gaps that ended while the prompt was computed, or that its computation lengthened."""
        return [gap for at, gap in self.gaps if at > 0 and at - gap < self.first_token_s]

    def quiet(self) -> list[float]:
        """The others."""
        return [gap for at, gap in self.gaps if at <= 0 or at - gap >= self.first_token_s]


def observe(url: str, vocab_size: int, context: int, sizes: tuple[int, int], quiet_s: float) -> Observed:
    """Run `sizes[0]` streams, and a prompt of `sizes[1]` tokens beside them."""
    num_streams, long_tokens = sizes
    client = StreamClient(url)
    common: dict[str, Any] = {
        "model": "bench",
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"continuous_usage_stats": True},
    }

    def start(num_tokens: int, max_tokens: int, seed: int) -> TokenStream:
        prompt = random_prompt(num_tokens, vocab_size, seed)
        return client.start(client.encode(common | {"prompt": prompt, "max_tokens": max_tokens}))

    many = context - _STREAM_PROMPT
    streams = [start(_STREAM_PROMPT, many, seed) for seed in range(num_streams)]
    client.read_until(lambda: all(stream.has_event or stream.is_done for stream in streams), _PATIENCE_S)
    first_s = time.perf_counter()
    client.read_for(quiet_s)
    sent_s = time.perf_counter()
    prompt = start(long_tokens, 1, seed=num_streams)
    client.read_until(lambda: prompt.is_done, _PATIENCE_S)
    client.read_for(quiet_s)
    client.leave()
    answer = read_answer(prompt)
    if answer.error:
        raise LocalError(f"the server did not serve the prompt: {answer.error}")
    gaps = []
    for stream in streams:
        gaps += [
            (at_s - sent_s, gap_s) for at_s, gap_s in read_answer(stream).gaps() if at_s - gap_s >= first_s
        ]
    return Observed(gaps, answer.ttft_s)


def _add_figures(report: Report, server: str, seen: Observed) -> None:
    quiet, beside = seen.quiet(), seen.beside()
    for name, percent in (("p50", 50.0), ("p99", 99.0), ("max", 100.0)):
        quiet_ms, beside_ms = percentile(quiet, percent) * 1000, percentile(beside, percent) * 1000
        report.add(f"{server}: {name} beside", beside_ms, "ms", limit=quiet_ms, limit_name="quiet")
    report.add(f"{server}: first token of the prompt", seen.first_token_s, "s")


@click.command()
@click.option("--model", default=TINY, show_default=True, help="Model: a name, a folder, or `tiny`.")
@click.option("--streams", default=8, show_default=True, help="Requests that decode.")
@click.option("--tokens", default=20_000, show_default=True, help="Length of the long prompt.")
@click.option("--quiet", default=3.0, show_default=True, help="Seconds without it, before and after.")
@click.option("--servers", default=",".join(_SERVERS), show_default=True, help="Which to start, in turn.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the gaps into this SVG file.")
@click.option("--save", is_flag=True, help="Keep result and plot in benchmarks/results.")
def main(plot: Path | None, *, save: bool, **options: Any) -> None:
    """Time the tokens of streams beside a long prompt, disaggregated and colocated."""
    report = Report.of_command("interference")
    panels = []
    sizes = (options["streams"], options["tokens"])
    with model_folder(options["model"], _CONTEXT) as folder:
        spec = load_spec(folder)
        for server in options["servers"].split(","):
            with running(folder, "--served-model-name", "bench", *_SERVERS[server]) as url:
                seen = observe(url, spec.vocab_size, spec.context_length, sizes, options["quiet"])
            _add_figures(report, server, seen)
            panels.append(Panel(server, seen.gaps, seen.first_token_s))
    _draw(report, panels, [plot] if plot else [], save=save)
    report.publish(save=save)


def _draw(report: Report, panels: Sequence[Panel], paths: list[Path], *, save: bool) -> None:
    if save:
        RESULTS.mkdir(exist_ok=True)
        paths.append(RESULTS / "interference.svg")
    title = f"{report.options['streams']} streams beside a prompt of {report.options['tokens']} tokens"
    for path in paths:
        path.write_text(draw(title, panels))


if __name__ == "__main__":
    main()
