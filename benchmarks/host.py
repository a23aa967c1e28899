"""The host's work in a decode step: everything but the model's forward, as requests and prompts grow.

On a GPU this is what the device would wait for. Requests arrive as from a prefill node (PREBUILT), so no
prompt is computed here. The model is the tiny one: its forward is real, and its time is left out.
"""

from __future__ import annotations

import cProfile
import pstats
import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from benchmarks.engine_runs import prebuilt_ms
from benchmarks.local_node import LocalNode, Turn, load_local
from benchmarks.measure import TINY, model_folder
from benchmarks.percentiles import median
from benchmarks.report import Report
from common.request import SamplingParams
from tests.tiny import VOCAB_SIZE

_PARTS = {
    "plan": "next_step, batch",
    "inputs": "inputs, sampling, relay",
    "process": "process",
    "outbox": "outbox",
}
_AIM_MS = 1.0
_AIM_REQUESTS = 64
_PREBUILT_AIM_MS = 0.1
_SHORT_PROMPT = 100
_WARM_TURNS = 3
_MANY_TOKENS = 4096  # so that nobody ends while it is measured
_GREEDY = SamplingParams(max_tokens=_MANY_TOKENS, temperature=0.0, ignore_eos=True)
_SAMPLED = SamplingParams(max_tokens=_MANY_TOKENS, temperature=0.8, top_p=0.95, ignore_eos=True)


def _prompt(num_tokens: int) -> list[int]:
    return random.Random(num_tokens).choices(range(3, VOCAB_SIZE), k=num_tokens)


def turns_of(
    folder: Path, num_requests: int, prompt_len: int, sampling: SamplingParams, steps: int
) -> list[Turn]:
    """Decode with so many requests; return the turns after the first few."""
    engine = load_local(folder, "float32", num_requests=num_requests, max_len=prompt_len + _MANY_TOKENS)
    with closing(LocalNode(engine)) as node:
        node.arrive([node.submit(_prompt(prompt_len), sampling) for _ in range(num_requests)])
        return node.run(steps + _WARM_TURNS)[_WARM_TURNS:]


def _prebuilt_ms(folder: Path, lengths: Sequence[int], rounds: int) -> dict[int, float]:
    """Return the median milliseconds of PREBUILT for each prompt length, measured in turns."""
    engine = load_local(folder, "float32", num_requests=1, max_len=max(lengths) + _MANY_TOKENS)
    return {length: median(values) for length, values in prebuilt_ms(engine, lengths, rounds).items()}


def _host_ms(turns: Sequence[Turn]) -> float:
    return median([turn.host_s * 1000 for turn in turns])


def _add_requests(report: Report, folder: Path, sizes: Sequence[int], steps: int) -> None:
    for size in sizes:
        turns = turns_of(folder, size, _SHORT_PROMPT, _GREEDY, steps)
        aim = _AIM_MS if size <= _AIM_REQUESTS else None
        report.add(f"{size} requests", _host_ms(turns), "ms", at_most=aim)
        for part, name in _PARTS.items():
            part_ms = median([getattr(turn, f"{part}_s") * 1000 for turn in turns])
            report.add(f"  {name}", part_ms, "ms")
        turns = turns_of(folder, size, _SHORT_PROMPT, _SAMPLED, steps)
        report.add("  all, and the arithmetic of top-p", _host_ms(turns), "ms")


def _profile(folder: Path, num_requests: int, steps: int) -> None:
    """Print the functions that take the time, of all turns; cProfile's own cost makes small ones look big."""
    profile = cProfile.Profile()
    profile.enable()
    turns_of(folder, num_requests, _SHORT_PROMPT, _GREEDY, steps)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


@click.command()
@click.option("--requests", default="1,8,64", show_default=True, help="Requests that decode together.")
@click.option("--long", default=100_000, show_default=True, help="Tokens of the long prompt.")
@click.option("--long-requests", default=4, show_default=True, help="Requests with the long prompt.")
@click.option("--steps", default=100, show_default=True, help="Steps of each.")
@click.option("--profile", is_flag=True, help="Print a profile of the largest size instead.")
@click.option("--save", is_flag=True, help="Keep the result in benchmarks/results.")
def main(requests: str, long: int, long_requests: int, steps: int, **flags: Any) -> None:
    """Time the host's part of decode steps, and PREBUILT batches of short and long prompts."""
    report = Report.of_command("host")
    sizes = [int(size) for size in requests.split(",")]
    with model_folder(TINY, long + _MANY_TOKENS) as folder:
        if flags["profile"]:
            _profile(folder, max(sizes), steps)
            return
        _add_requests(report, folder, sizes, steps)
        by_length = {
            length: _host_ms(turns_of(folder, long_requests, length, _GREEDY, max(1, steps // 10)))
            for length in (_SHORT_PROMPT, long)
        }
        what = f"{long_requests} requests of {long} tokens"
        short = f"of {_SHORT_PROMPT} tokens"
        report.add(what, by_length[long], "ms", limit=by_length[_SHORT_PROMPT], limit_name=short)
        prebuilt = _prebuilt_ms(folder, (_SHORT_PROMPT, long), steps)
    report.add(
        f"PREBUILT of {long} tokens", prebuilt[long], "ms", limit=prebuilt[_SHORT_PROMPT], limit_name=short
    )
    difference_ms = abs(prebuilt[long] - prebuilt[_SHORT_PROMPT])
    report.add("  difference", difference_ms, "ms", at_most=_PREBUILT_AIM_MS)
    report.publish(save=flags["save"])


if __name__ == "__main__":
    main()
