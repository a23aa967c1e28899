"""Where a request's time goes on a running server, stage by stage, as prompts grow.

The stages are the server's own (`"timings": true`). Beside them: for the transfer, a memcpy of the prompt's
pages; for the first decode step, a later one of the same request, as its client sees it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import click

from benchmarks.measure import memory_bandwidth, model_folder, random_prompt
from benchmarks.percentiles import median
from benchmarks.report import Report
from benchmarks.server import running
from common.config import ClientConfig
from common.model.spec import load_spec, resolve_dtype
from gateway.api_client import connect, served_model, stream

_PAGE_SIZE = 16
_MAX_TOKENS = 12
_COPIED_BYTES = 256 << 20  # more than any cache
_DECODE = "later_step_ms"
_STAGES = {
    "queue_ms": "queue",
    "prefill_ms": "prefill",
    "transfer_ms": "transfer",
    "first_decode_ms": "first decode step",
}


def ask(server: Any, model: str, prompt: list[int]) -> dict[str, float]:
    """Send one request; return its stages, and the client's median time between later tokens."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "timings": True,
    }
    timings: dict[str, Any] = {}
    times_s = []
    for event in stream(server, "/v1/completions", body):
        timings = event.get("timings") or timings
        if any(choice.get("token_ids") for choice in event.get("choices", ())):
            times_s.append(time.perf_counter())
    gaps = [after - before for before, after in pairwise(times_s[1:])]
    return {stage: timings[stage] for stage in _STAGES} | {_DECODE: median(gaps) * 1000}


@click.command()
@click.option("--model", default="smollm2-135m", help="Model: a name, a folder, or `tiny`.")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--transfer", default="auto", show_default=True, help="Data plane.")
@click.option("--lengths", default="16,64,256,1024", show_default=True, help="Tokens of the prompts.")
@click.option("--rounds", default=5, show_default=True, help="Requests of each length; the median counts.")
@click.option("--save", is_flag=True, help="Keep the result in benchmarks/results.")
def main(model: str, dtype: str, transfer: str, lengths: str, rounds: int, *, save: bool) -> None:
    """Break requests on an idle server down into stages."""
    report = Report.of_command("handover")
    sizes = [int(size) for size in lengths.split(",")]
    copied = memory_bandwidth(_COPIED_BYTES) / 2
    with model_folder(model, max(sizes) + _MAX_TOKENS) as folder:
        spec = load_spec(folder)
        layout = spec.kv_layout(_PAGE_SIZE, resolve_dtype(dtype, spec))
        options = ("--dtype", dtype, "--transfer", transfer, "--page-size", str(_PAGE_SIZE))
        with running(folder, *options) as url, connect(ClientConfig(url=url)) as server:
            name = served_model(server)
            for size in sizes:
                stages: dict[str, list[float]] = defaultdict(list)
                for seed in range(rounds + 1):
                    asked = ask(server, name, random_prompt(size, spec.vocab_size, seed))
                    for stage, value in asked.items():
                        if seed > 0:  # the first warms up
                            stages[stage].append(value)
                memcpy_ms = layout.pages_for(size) * layout.page_bytes / copied * 1000
                _add_figures(report, size, {stage: median(v) for stage, v in stages.items()}, memcpy_ms)
    report.publish(save=save)


def _add_figures(report: Report, size: int, stages: dict[str, float], memcpy_ms: float) -> None:
    limits: dict[str, dict[str, Any]] = {
        "transfer_ms": {"limit": memcpy_ms, "limit_name": "memcpy of its pages"},
        "first_decode_ms": {"limit": stages[_DECODE], "limit_name": "a later step, at the client"},
    }
    for stage, what in _STAGES.items():
        report.add(f"{size} tokens: {what}", stages[stage], "ms", **limits.get(stage, {}))


if __name__ == "__main__":
    main()
