"""Whether clients of others see what we see: guidellm, aiperf, `baton bench serve` and the server's timeline.

One server, the same load by each client in turn, several rounds. Each client says how long first tokens took,
and the time between tokens. The timeline is what the server counted meanwhile (`/metrics`; an answer has the
same as `timings`): six stages until the first token, the first decode step until the second.
So a client is held against the server over the very same requests, by means, whatever else the machine did;
and the clients against each other, by medians, which only a quiet machine makes fair.

guidellm and aiperf want environments of their own (`pip install guidellm`, `pip install aiperf`); one that is
not there is left out, and told of.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.answers import read_answer
from benchmarks.load import Effort, run_load
from benchmarks.measure import model_folder
from benchmarks.options import whole_numbers
from benchmarks.outside_tools import TOOLS, Load, Times, run_tool
from benchmarks.percentiles import median
from benchmarks.report import Report
from benchmarks.requests import RequestMaker
from benchmarks.serve_figures import whole_answers
from benchmarks.server import running
from benchmarks.token_streams import StreamClient
from common.model.spec import load_spec
from gateway.timeline import FIRST_TOKEN_STAGES

_MODEL = "bench"
_OURS = "baton bench serve"
_PATIENCE_S = 300.0
_AGREE = 1.10  # the larger of two figures over the smaller
_STAGE, _PER_TOKEN = "baton_request_stage_seconds", "baton_request_time_per_output_token_seconds"


@dataclass(slots=True)
class Timeline:
    """Sums that the server counted: seconds by stage, and of how many answers."""

    sums_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_answers: int = 0

    def add(self, before: dict[str, float], after: dict[str, float]) -> None:
        """Add what came between two looks at /metrics."""
        for name in after:
            self.sums_s[name] += after[name] - before[name]
        self.num_answers = round(self.sums_s["count"])

    def mean_ms(self, *stages: str) -> float:
        """Return the mean time of some stages together."""
        return sum(self.sums_s[stage] for stage in stages) / self.num_answers * 1000


@dataclass(slots=True)
class Seen:
    """What a client said at one concurrency, and the server of the same requests."""

    times: Times = field(default_factory=Times)
    timeline: Timeline = field(default_factory=Timeline)


def look(url: str) -> dict[str, float]:
    """Return the server's sums by stage, in seconds, and the count of answers."""
    text = httpx.get(url + "/metrics", trust_env=False, timeout=_PATIENCE_S).text
    families = text_string_to_metric_families(text)
    values = {(s.name, s.labels.get("stage")): s.value for family in families for s in family.samples}
    found = {stage: value for (name, stage), value in values.items() if name == _STAGE + "_sum" and stage}
    found["count"] = values[_STAGE + "_count", "queue"]
    found["per_token"] = values[_PER_TOKEN + "_sum", None]
    return found


def run_ours(load: Load, seed: int) -> Times:
    """Put the load on the server as `baton bench serve` does."""
    client = StreamClient(load.url)
    vocab_size = load_spec(load.tokenizer).vocab_size
    maker = RequestMaker(load.model, vocab_size, is_text=False, asks_ids=False, seed=seed)
    requests = [
        client.encode(maker.body(load.prompt_tokens, load.output_tokens, i)) for i in range(load.num_requests)
    ]
    done = run_load(client, requests, None, load.concurrency, _PATIENCE_S, Effort())
    times = Times()
    for answer in whole_answers([read_answer(stream) for stream in done]):
        gaps_s = [gap_s for _, gap_s in answer.gaps()]
        times.ttft_ms.append(answer.ttft_s * 1000)
        times.second_ms.append(gaps_s[0] * 1000)
        times.itl_ms.append(sum(gaps_s) / (answer.num_tokens - 1) * 1000)
        times.prompt_tokens.append(answer.prompt_tokens or 0)
    return times


def clients(programs: dict[str, str], folder: Path) -> dict[str, Callable[[Load, int], Times]]:
    """Return what puts a load on a server, by name: it takes the load and the number of the round."""

    def outside(name: str, program: str) -> Callable[[Load, int], Times]:
        def run(load: Load, number: int) -> Times:
            inside = folder / f"{name}-{load.concurrency}-{number}"
            run_tool(TOOLS[name].command(program, load, inside), inside)
            return TOOLS[name].read(inside)

        return run

    return {_OURS: run_ours} | {name: outside(name, program) for name, program in programs.items()}


def add_figures(report: Report, at: str, seen: dict[str, Seen]) -> None:
    """Add what each client saw beside the server's own figure, and how far they are from each other."""
    for client, of in seen.items():
        counted = {"limit": of.timeline.num_answers, "limit_name": "timeline"}
        report.add(f"{at}, {client}: requests", len(of.times), "requests", **counted)
        report.add(f"{at}, {client}: prompt, mean", fmean(of.times.prompt_tokens), "tokens")
        pairs = {
            "TTFT": (of.times.ttft_ms, of.timeline.mean_ms(*FIRST_TOKEN_STAGES)),
            "second token": (of.times.second_ms, of.timeline.mean_ms("first_decode")),
            "ITL": (of.times.itl_ms, of.timeline.mean_ms("per_token")),
        }
        for name, (values_ms, timeline_ms) in pairs.items():
            if values_ms:
                mean_ms = fmean(values_ms)
                limits = {"limit": timeline_ms, "limit_name": "timeline"}
                report.add(f"{at}, {client}: {name}, mean", mean_ms, "ms", **limits)
                _add_ratio(report, f"{at}, {client}: {name}, mean", [mean_ms, timeline_ms])
    for name, kind in {"TTFT": "ttft_ms", "ITL": "itl_ms"}.items():
        medians_ms = {client: median(getattr(of.times, kind)) for client, of in seen.items()}
        for client, median_ms in medians_ms.items():
            report.add(f"{at}, {client}: {name} p50", median_ms, "ms")
        _add_ratio(report, f"{at}, clients: {name} p50", list(medians_ms.values()))


def _add_ratio(report: Report, name: str, values: Sequence[float]) -> None:
    report.add(f"{name}, larger / smaller", max(values) / min(values), "x", at_most=_AGREE)


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True, help="Folder or short name.")
@click.option("--guidellm", default="guidellm", show_default=True, help="The program, by name or path.")
@click.option("--aiperf", default="aiperf", show_default=True, help="The program, by name or path.")
@click.option(
    "--concurrency", default="1,4", show_default=True, callback=whole_numbers, help="Requests at any time."
)
@click.option("--num-requests", default=20, show_default=True, help="Of each client, concurrency and round.")
@click.option("--prompt-tokens", default=128, show_default=True, help="Length of prompts.")
@click.option("--output-tokens", type=click.IntRange(3), default=32, show_default=True, help="Of answers.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="In turn, all clients.")
@click.option("--save", is_flag=True, help="Keep the result in benchmarks/results.")
def main(*, save: bool, **options: Any) -> None:
    """Hold the figures of guidellm and aiperf against ours and the server's own."""
    report = Report.of_command("outside_clients")
    programs = {}
    for tool in TOOLS:
        if found := shutil.which(options[tool]):
            programs[tool] = found
        else:
            click.echo(f"{tool} is not installed: left out", err=True)
    sizes = (options["num_requests"], options["prompt_tokens"], options["output_tokens"])
    seen: dict[int, dict[str, Seen]] = defaultdict(lambda: defaultdict(Seen))
    with (
        model_folder(options["model"], sum(sizes[1:])) as model,
        tempfile.TemporaryDirectory() as temporary,
        running(model, "--served-model-name", _MODEL) as url,
    ):
        first = Load(url, _MODEL, model, options["concurrency"][0], *sizes)
        run_ours(first, options["rounds"])  # warm-up
        for number in range(options["rounds"]):
            for name, run in clients(programs, Path(temporary)).items():
                for concurrency in options["concurrency"]:
                    before = look(url)
                    of = seen[concurrency][name]
                    of.times.extend(run(replace(first, concurrency=concurrency), number))
                    of.timeline.add(before, look(url))
    for concurrency, by_client in seen.items():
        add_figures(report, f"{concurrency} at a time", by_client)
    report.publish(save=save)


if __name__ == "__main__":
    main()
