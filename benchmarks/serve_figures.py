"""What answers say about a server: times to the first token and between tokens, rates, goodput.

Sends nothing. ITL is the time between two chunks of a stream, as the client got them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import click

from benchmarks.answers import Answer
from benchmarks.load import Effort
from benchmarks.percentiles import median, percentile
from benchmarks.targets import Targets
from common.errors import ConfigError

_ALL = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
_FEW = {"p50": 50.0, "max": 100.0}


@dataclass(frozen=True, slots=True)
class GoodLimits:
    """What a request must keep to count as goodput; None: anything is good."""

    ttft_ms: float | None
    itl_ms: float | None  # for 99 of 100 of the request's own gaps

    def are_kept(self, answer: Answer) -> bool:
        """Say whether a whole answer kept them."""
        gaps_s = [gap_s for _, gap_s in answer.gaps()]
        return (self.ttft_ms is None or answer.ttft_s * 1000 <= self.ttft_ms) and (
            self.itl_ms is None or not gaps_s or percentile(gaps_s, 99.0) * 1000 <= self.itl_ms
        )


def whole_answers(answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers that are whole, and tell of the others.

    Raises:
        ConfigError: there is none.
    """
    whole = [answer for answer in answers if not answer.error]
    errors = Counter(answer.error for answer in answers if answer.error).most_common(3)
    if not whole:
        raise ConfigError(f"no request was served: {errors[0][0]}")
    for error, count in errors:
        click.echo(f"{count} requests failed: {error}", err=True)
    return whole


def _add_times(
    targets: Targets, name: str, times_s: Sequence[float], percents: dict[str, float]
) -> dict[str, float]:
    values_ms = {at: percentile(times_s, percent) * 1000 for at, percent in percents.items()}
    for at, value_ms in values_ms.items():
        targets.add(f"{name} {at}", value_ms, "ms")
    return values_ms


def add_row(targets: Targets, answers: Sequence[Answer], prompt_tokens: int) -> None:
    """Add the few figures of one of several prompt lengths."""
    whole, of = whole_answers(answers), f"{prompt_tokens} tokens:"
    _add_times(targets, f"{of} TTFT", [answer.ttft_s for answer in whole], _FEW)
    if gaps_s := [gap_s for answer in whole for _, gap_s in answer.gaps()]:
        _add_times(targets, f"{of} ITL", gaps_s, _FEW)
    if len(whole) < len(answers):
        targets.add(f"{of} failed", len(answers) - len(whole), "requests")


def add_load(targets: Targets, answers: Sequence[Answer], limits: GoodLimits) -> None:
    """Add all figures of one load."""
    whole = whole_answers(answers)
    _add_times(targets, "TTFT", [answer.ttft_s for answer in whole], _ALL)
    gaps_s = [gap_s for answer in whole for _, gap_s in answer.gaps()]
    if gaps_s:
        _add_times(targets, "ITL", gaps_s, _ALL)
        targets.add("chunks that came with the one before", 100 * gaps_s.count(0.0) / len(gaps_s), "%")
    num_tokens = sum(answer.num_tokens for answer in whole)
    num_chunks = sum(len(answer.chunks) for answer in whole)
    targets.add("tokens a chunk", num_tokens / num_chunks, "tokens")
    wall_s = max(answer.ended_s for answer in whole) - min(answer.begun_s for answer in answers)
    targets.add("output", num_tokens / wall_s, "tokens/s")
    prompt_tokens = [answer.prompt_tokens for answer in whole if answer.prompt_tokens is not None]
    if prompt_tokens:
        targets.add("prompts", sum(prompt_tokens) / wall_s, "tokens/s")
        targets.add("prompt length", median(prompt_tokens), "tokens")
    targets.add("answered", len(whole) / wall_s, "requests/s")
    targets.add("failed", len(answers) - len(whole), "requests")
    if limits != GoodLimits(None, None):
        good = sum(limits.are_kept(answer) for answer in whole)
        targets.add("within the limits", 100 * good / len(answers), "%")
        targets.add("goodput", good / wall_s, "requests/s")


def add_phase(
    targets: Targets,
    phase: str,
    answers: Sequence[Answer],
    window_s: tuple[float, float],
    prompt_tokens: int,
    quiet_ms: dict[str, float] | None = None,
) -> dict[str, float]:
    """Add and return the times in ms between the tokens of held streams, of the gaps of a window of time.

    Args:
        prompt_tokens: of each stream; with what came by a token of the window, the context of its step.
        quiet_ms: the same without long prompts; then all gaps count that touch the window. None: this is the
            quiet time, and gaps count that are within the window.
    """
    begin_s, end_s = window_s
    inside_s = 0.0 if quiet_ms is None else float("inf")
    gaps_s = [
        gap_s
        for answer in answers
        for at_s, gap_s in answer.gaps()
        if begin_s < at_s <= end_s + inside_s and begin_s - inside_s <= at_s - gap_s < end_s
    ]
    if not gaps_s:
        raise ConfigError(f"no token came in the {phase} time: hold streams for longer")
    values_ms = {at: percentile(gaps_s, percent) * 1000 for at, percent in _ALL.items()}
    for at, value_ms in values_ms.items():
        beside = {} if quiet_ms is None else {"limit": quiet_ms[at], "limit_name": "quiet"}
        targets.add(f"{phase}: ITL {at}", value_ms, "ms", **beside)
    if contexts := [
        prompt_tokens + num_tokens
        for answer in answers
        for at_s, num_tokens in zip(
            (at_s for at_s, _ in answer.chunks), accumulate(n for _, n in answer.chunks), strict=True
        )
        if begin_s < at_s <= end_s
    ]:
        targets.add(f"{phase}: context, mean", sum(contexts) / len(contexts), "tokens")
    tokens = sum(n for answer in answers for at_s, n in answer.chunks if begin_s < at_s <= end_s)
    targets.add(f"{phase}: output", tokens / (end_s - begin_s), "tokens/s")
    if quiet_ms is not None and quiet_ms["p50"] > 0:  # 0: a server so fast that chunks come together
        targets.add(f"ITL p99 {phase} over p50 quiet", values_ms["p99"] / quiet_ms["p50"], "x")
    return values_ms


def add_long(targets: Targets, answers: Sequence[Answer]) -> None:
    """Add the times of the long prompts that came meanwhile."""
    whole = whole_answers(answers)
    _add_times(targets, "long prompts: TTFT", [answer.ttft_s for answer in whole], _ALL)
    targets.add("long prompts: answered", len(whole), "requests")
    targets.add("long prompts: failed", len(answers) - len(whole), "requests")


def add_effort(targets: Targets, effort: Effort) -> None:
    """Add what says whether the client was what was measured."""
    targets.add("client's processor time", effort.cpu_s / effort.wall_s, "cores", limit=1.0)
    targets.add("request sent late, max", effort.late_s * 1000, "ms")
