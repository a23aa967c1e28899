"""Whether a request's stages add up to what its client waited for the first token: `baton bench timeline`.

Streams arrive at a low rate (open loop), with prompts of several lengths and `"timings": true`. The client
notes when it began to connect and when the first token's event was there; the server says its six stages.
What the client sees beyond their sum is connecting, and the way of the bytes: the smaller, the better the
server knows what its clients wait for. A sum above what the client saw is a fault of the stamps. Server and
client share the machine, so it must be quiet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from benchmarks.answers import read_answer
from benchmarks.load import Effort, run_load
from benchmarks.measure import model_folder
from benchmarks.options import whole_numbers
from benchmarks.percentiles import median, percentile
from benchmarks.report import Report
from benchmarks.requests import RequestMaker, arrivals
from benchmarks.server import first_model, running
from benchmarks.token_streams import StreamClient, TokenStream
from common.api_key import read_api_key
from common.model.spec import load_spec
from gateway.timeline import FIRST_TOKEN_STAGES
from terminal.progress import progress

_OFF_PERCENT, _AIM_PERCENT = 5.0, 95.0  # so far off at most, in so many requests
_PATIENCE_S = 120.0
_WARM_UP = 5
_OUTSIDE_VOCAB = 32_000  # of a server that runs already, whose model we do not know
_LAST_CHUNK = re.compile(rb'data: (\{[^\n]*"timings":[^\n]*\})\n\n')


@dataclass(frozen=True, slots=True)
class Seen:
    """One request, as its client and its server saw it."""

    prompt_tokens: int
    ttft_ms: float  # the client's
    stages_ms: dict[str, float]  # the server's

    @property
    def sum_ms(self) -> float:
        """The stages' sum."""
        return sum(self.stages_ms.values())

    @property
    def beyond_ms(self) -> float:
        """What the client waited beyond the sum."""
        return self.ttft_ms - self.sum_ms

    @property
    def off_percent(self) -> float:
        """How far the sum is from what the client waited."""
        return abs(self.beyond_ms) / self.ttft_ms * 100


def read(stream: TokenStream) -> Seen | str:
    """Read what came of a request; returns what is wrong, if something is."""
    answer = read_answer(stream)
    if answer.error:
        return answer.error
    found = _LAST_CHUNK.search(b"".join(data for _, data in stream.pieces))
    if found is None:
        return "the answer has no timings"
    timings: dict[str, Any] = json.loads(found[1])["timings"]
    stages = {stage: float(timings[f"{stage}_ms"]) for stage in FIRST_TOKEN_STAGES}
    return Seen(answer.prompt_tokens or 0, answer.ttft_s * 1000, stages)


def add_figures(report: Report, seen: Sequence[Seen]) -> None:
    """Add how well sums and clients agree, and where the time was."""
    off = [one.off_percent for one in seen]
    within = sum(value <= _OFF_PERCENT for value in off) / len(seen) * 100
    report.add("requests", len(seen), "requests")
    report.add(f"sum within {_OFF_PERCENT:g} % of TTFT", within, "%", at_least=_AIM_PERCENT)
    for percent in (50, 95, 99):
        report.add(f"sum off TTFT, p{percent}", percentile(off, percent), "%")
    beyond = [one.beyond_ms for one in seen]
    report.add("TTFT beyond the sum, least", min(beyond), "ms", at_least=0.0)
    report.add("TTFT beyond the sum, p50", median(beyond), "ms")
    report.add("TTFT beyond the sum, most", max(beyond), "ms")
    for length in sorted({one.prompt_tokens for one in seen}):
        here = [one for one in seen if one.prompt_tokens == length]
        report.add(f"{length} tokens: requests", len(here), "requests")
        report.add(f"{length} tokens: TTFT p50", median([one.ttft_ms for one in here]), "ms")
        for stage in FIRST_TOKEN_STAGES:
            report.add(f"{length} tokens: {stage} p50", median([one.stages_ms[stage] for one in here]), "ms")


@contextmanager
def _server(url: str | None, model: str, tokens: int, colocated: list[str]) -> Iterator[tuple[str, int]]:
    """Give the address and the vocabulary of a server that runs, or of one that runs meanwhile."""
    if url is not None:
        yield url.rstrip("/"), _OUTSIDE_VOCAB
        return
    with model_folder(model, tokens) as folder, running(folder, *colocated) as started:
        yield started, load_spec(folder).vocab_size


@click.command()
@click.option("--url", help="A Baton server that runs, without /v1  [default: one is started]")
@click.option("--api-key", envvar="BATON_API_KEY", help="Key that it asks for; @FILE reads it from a file.")
@click.option(
    "--model",
    default="smollm2-135m",
    show_default=True,
    help="Of the server that is started: a name, a folder.",
)
@click.option("--colocated", is_flag=True, help="It is one node that does both.")
@click.option(
    "--num-requests", type=click.IntRange(1), default=200, show_default=True, help="Of all lengths."
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Requests a second, whatever the server does.",
)
@click.option(
    "--prompt-tokens",
    default="64,128,256,512,1024",
    show_default=True,
    callback=whole_numbers,
    help="Lengths of prompts, in turn.",
)
@click.option(
    "--output-tokens", type=click.IntRange(1), default=8, show_default=True, help="Length of answers."
)
@click.option("--seed", default=0, show_default=True, help="Of prompts and arrivals.")
@click.option("--save", is_flag=True, help="Keep the result in benchmarks/results.")
def main(*, save: bool, **options: Any) -> None:
    """Hold the stages that a server says against the time that its client waited."""
    report = Report.of_command("timeline")
    lengths, num = options["prompt_tokens"], options["num_requests"]
    colocated = ["--colocated"] if options["colocated"] else []
    tokens = max(lengths) + options["output_tokens"]
    api_key = read_api_key(options["api_key"])
    with _server(options["url"], options["model"], tokens, colocated) as (url, vocab_size):
        client = StreamClient(url, api_key)
        maker = RequestMaker(first_model(url, api_key), vocab_size, False, False, options["seed"])
        bodies = [
            maker.body(lengths[i % len(lengths)], options["output_tokens"], i) for i in range(num + _WARM_UP)
        ]
        requests = [client.encode(body | {"timings": True}) for body in bodies]
        run_load(client, requests[num:], None, 1, _PATIENCE_S, Effort())
        due_s = arrivals(num, options["rate"], options["seed"])
        effort = Effort()
        with progress("requests", num) as shown:
            done = run_load(client, requests[:num], due_s, None, _PATIENCE_S, effort, shown.advance)
    outcomes = [read(stream) for stream in done]
    failures = [outcome for outcome in outcomes if isinstance(outcome, str)]
    for reason in sorted(set(failures)):
        click.echo(f"failed: {reason}", err=True)
    if seen := [outcome for outcome in outcomes if isinstance(outcome, Seen)]:
        add_figures(report, seen)
    report.add("failed", len(failures), "requests", at_most=0)
    report.add("client's own processor time", effort.cpu_s / effort.wall_s * 100, "%")
    report.add("latest begin behind its time", effort.late_s * 1000, "ms")
    report.publish(save=save)


if __name__ == "__main__":
    main()
