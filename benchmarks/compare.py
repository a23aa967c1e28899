"""Whether to disaggregate on this machine: the same load on both kinds of server: `baton bench compare`.

1. Start the servers, or find those that run.
2. Ask each for one answer at a time: from that, the limits of goodput.
3. Find what each takes: requests from so many clients at any time. The rates are parts of that.
4. In rounds (A B, B A, ...): as many as it takes, then each rate.
5. Say what differs by more than the rounds among themselves, and give the verdict (verdict.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.advice import SetUp, advise
from benchmarks.charts import draw
from benchmarks.compare_figures import Comparison, table
from benchmarks.compare_load import Mix, Tester
from benchmarks.compare_options import Sizes, takes_options
from benchmarks.compare_rounds import LIMIT_FACTOR, Rounds
from benchmarks.compare_servers import (
    COLOCATED,
    DISAGGREGATED,
    Asked,
    Servers,
    Side,
    fit_together,
    plan_sides,
)
from benchmarks.measure import model_folder
from benchmarks.report import Report
from benchmarks.server import first_model
from benchmarks.verdict import Evidence, Judgement, judge
from common.api_key import read_api_key
from common.config import EngineConfig
from common.errors import ConfigError
from common.gpus import count_gpus
from common.model.spec import load_spec

_TINY_CONTEXT = 32_768
_VOCAB_SIZE = 32_000  # of servers that run already, if nothing is said


def _sides(options: dict[str, Any], num_gpus: int) -> list[Side]:
    """Return the servers; those that run already where the user gives their addresses.

    Raises:
        ConfigError: one address is missing, or a server there cannot be asked.
    """
    urls = [options["disaggregated_url"], options["colocated_url"]]
    if any(urls) and not all(urls):
        raise ConfigError("--disaggregated-url and --colocated-url go together")
    if all(urls):
        api_key = read_api_key(options["api_key"])
        addresses = zip((DISAGGREGATED, COLOCATED), (url.rstrip("/") for url in urls), strict=True)
        return [Side(name, (), url, first_model(url, api_key), api_key) for name, url in addresses]
    both = ["--device", options["device"], "--load-format", options["load_format"]]
    nodes = options["prefill"], options["decode"], options["colocated_nodes"]
    return plan_sides(Asked(*nodes, (*both, *shlex.split(options["serve"]))), num_gpus)


@contextmanager
def _servers(
    options: dict[str, Any], sides: Sequence[Side], sizes: Sizes, num_gpus: int
) -> Iterator[tuple[Servers, int]]:
    """Make ready what starts the servers; gives the vocabulary's size, too.

    Raises:
        ConfigError: the model has no room for such requests.
    """
    if sides[0].url:
        yield Servers(Path(), together=True), options["vocab_size"] or _VOCAB_SIZE
        return
    with model_folder(options["model"], _TINY_CONTEXT) as folder:
        spec = load_spec(folder, options["load_format"])
        needed = max(sizes.short_prompt_tokens, sizes.long_prompt_tokens) + sizes.output_tokens
        if needed > spec.context_length:
            raise ConfigError(
                f"a prompt and its answer take {needed} tokens, the model has room for "
                f"{spec.context_length}: give a smaller --long-prompt-tokens"
            )
        num_nodes = len(sides) * (options["prefill"] + options["decode"])
        fits = num_gpus == 0 and fit_together(folder, num_nodes)
        together = fits if options["servers"] == "auto" else options["servers"] == "together"
        options["servers"] = "together" if together else "apart"
        with Servers(folder, together, len(sides) if num_gpus else 0) as servers:
            yield servers, options["vocab_size"] or spec.vocab_size


def _record(
    comparison: Comparison, evidence: Evidence, judgement: Judgement, advice: Sequence[str]
) -> dict[str, Any]:
    """Return what the JSON line has of it, beside the figures."""
    return {
        "verdict": judgement.verdict.value,
        "rule": judgement.rule,
        "reason": judgement.reason,
        "advice": advice,
        "limits": asdict(comparison.limits),
        "deciding_rate": comparison.deciding_rate,
        "others": evidence.others,
        "client_cores": evidence.client_cores,
        "has_a_say": [
            {
                "figure": key,
                "disaggregated": figure.disaggregated,
                "colocated": figure.colocated,
                "gain": figure.gain,
                "noise": figure.noise,
                "finding": figure.finding.value,
            }
            for key, figure in evidence.figures.items()
        ],
        "cells": [cell.record for cell in comparison.cells],
    }


def _notes(comparison: Comparison, options: dict[str, Any], sides: Sequence[Side]) -> list[str]:
    """Return what a reader of the table has to know."""
    limits, rate = comparison.limits, comparison.deciding_rate
    how = f" ({LIMIT_FACTOR:g} times what the quicker server takes for one request alone)"
    first, gaps = (how if options[name] is None else "" for name in ("ttft_limit_ms", "itl_limit_ms"))
    if first == gaps:
        first = ""
    share = round(100 * options["long_share"])
    notes = [
        f"prompts of {options['short_prompt_tokens']} tokens, {share} % of {options['long_prompt_tokens']}; "
        f"answers of {options['output_tokens']}; means of {options['rounds']} rounds",
        f"limits: first token {limits.ttft_ms:.4g} ms{first}, 99 of 100 gaps {limits.itl_ms:.4g} ms{gaps}",
        f"latencies have a say at {rate:.3g} requests/s, the highest rate that both hold"
        if rate is not None
        else "latencies have no say: no rate is held by both",
    ]
    if sides[0].model != sides[1].model:
        notes.append(f"the servers name different models: {sides[0].model} and {sides[1].model}")
    if len(sides) > 2:
        notes.append(f"{sides[2].name}: has one GPU where the others have several; it is not in the verdict")
    return notes


@click.command()
@takes_options
def main(*, plot: Path | None, save: bool, **options: Any) -> None:
    """Say whether MODEL is better served with prefill and decode in separate processes here, and why."""
    report = Report.of_command("compare")
    num_gpus = count_gpus(EngineConfig(device=options["device"]))
    sizes = Sizes.of(report.options, on_gpu=num_gpus > 0)
    sides = _sides(options, num_gpus)
    said = report.options
    if sides[0].url:
        said["model"] = sides[0].model
    mix = Mix(
        sizes.short_prompt_tokens,
        sizes.long_prompt_tokens,
        options["long_share"],
        sizes.output_tokens,
        options["seed"],
    )
    with _servers(said, sides, sizes, num_gpus) as (servers, vocab_size):
        rounds = Rounds(servers, sides, Tester(mix, vocab_size, options["patience_s"]), sizes)
        limits = rounds.find_limits(options["ttft_limit_ms"], options["itl_limit_ms"])
        loads = rounds.find_loads(options["rates"], limits)
        cells = rounds.run(loads, limits)
    rates = [load.rate for load in loads if load.rate is not None]
    comparison = Comparison([side.name for side in sides], rates, cells, limits)
    evidence = comparison.evidence(None if sides[0].url else options["most_others"] / 100)
    judgement = judge(evidence)
    gpus = min(num_gpus, options["prefill"] + options["decode"])
    set_up = SetUp(gpus, options["prefill"], options["decode"], sizes.rounds, is_known=not sides[0].url)
    advice = advise(judgement, evidence, set_up)
    report = replace(report, extra={"comparison": _record(comparison, evidence, judgement, advice)})
    _publish(report, comparison, judgement, advice, _notes(comparison, said, sides), plot, save=save)


def _publish(
    report: Report,
    comparison: Comparison,
    judgement: Judgement,
    advice: Sequence[str],
    notes: Sequence[str],
    plot: Path | None,
    *,
    save: bool,
) -> None:
    rows = comparison.rows()
    for row in rows:
        at = "capacity" if row.rate is None else f"{row.rate:.3g}/s"
        for side, value in row.values.items():
            report.add(f"{at}, {side}: {row.rule.name}", value, row.unit)
    verdict = [f"verdict: {judgement.verdict.value} ({judgement.reason})"]
    verdict += [f"  advice: {line}" for line in advice]
    text = "\n".join([table(rows, comparison.sides), "", *notes, "", *verdict])
    saved = report.publish(save=save, label=report.options["label"], text=text)
    picture = draw(
        f"{report.options['model']}: {judgement.verdict.value}",
        comparison.charts(),
        [judgement.reason, *notes],
    )
    for path in filter(None, (plot, saved and saved.with_suffix(".svg"))):
        path.write_text(picture)


if __name__ == "__main__":
    main()
