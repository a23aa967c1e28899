"""One piece of a comparison: a server under a mix of short and long prompts, and what its answers say.

Knows neither how servers are started nor what follows from the figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import click
import numpy as np

from benchmarks.answers import Answer, read_answer
from benchmarks.load import Effort, run_load
from benchmarks.machine_use import MachineUse
from benchmarks.percentiles import median, percentile
from benchmarks.requests import RequestMaker, arrivals
from benchmarks.serve_figures import GoodLimits
from benchmarks.token_streams import StreamClient
from terminal.progress import beside_progress

_LEAST_MS = 0.001  # two chunks that were read together are 0 ms apart, which has no ratio
_QUIET_REQUESTS = 3  # of each length, alone
_MOST_LOADS = 1 << 10  # of a round
_PERCENTS = {"p50": 50.0, "p90": 90.0, "p99": 99.0}


@dataclass(frozen=True, slots=True)
class Mix:
    """The requests: lengths in tokens, and which share of the prompts is long."""

    short_tokens: int
    long_tokens: int
    long_share: float
    output_tokens: int
    seed: int

    def lengths(self, num: int, number: int) -> list[int]:
        """Return the prompt lengths of `num` requests, in an order of their own for each `number`."""
        lengths = [self.long_tokens] * round(num * self.long_share)
        lengths += [self.short_tokens] * (num - len(lengths))
        order: list[int] = np.random.default_rng((self.seed, number)).permutation(lengths).tolist()
        return order


@dataclass(frozen=True, slots=True)
class Load:
    """`num` requests: at a rate (requests a second), or so many at any time where `rate` is None."""

    num: int
    rate: float | None
    concurrency: int
    index: int = 0  # among those of a round

    @property
    def name(self) -> str:
        """For people."""
        return "as many as it takes" if self.rate is None else f"{self.rate:.3g} requests/s"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server is, and what it calls its model."""

    url: str
    model: str
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """What came of a load in a round; times are in ms, rates a second."""

    side: str
    rate: float | None  # None: as many as the server takes
    round_: int
    figures: dict[str, float]  # empty where nothing was served
    failed: int
    num: int
    client_cores: float
    others: float  # share of the cores

    @property
    def record(self) -> dict[str, object]:
        """For the JSON line."""
        return {
            "server": self.side,
            "rate": self.rate,
            "round": self.round_,
            "requests": self.num,
            "failed": self.failed,
            "client_cores": self.client_cores,
            "others": self.others,
            **self.figures,
        }


@dataclass(frozen=True, slots=True)
class Quiet:
    """One request at a time: medians in ms."""

    long_ttft_ms: float
    itl_ms: float


@dataclass(frozen=True, slots=True)
class Tester:
    """Puts loads on one server at a time, the very same on each.

    Args:
        vocab_size: token ids of prompts are below.
        patience_s: of silence, after which what is open has failed.
    """

    mix: Mix
    vocab_size: int
    patience_s: float

    def warm_up(self, target: Target) -> None:
        """Ask a server that was just started for an answer of each length, and take no note of it."""
        self._ask(target, [self.mix.short_tokens, self.mix.long_tokens], 0, None, 1, Effort())

    def quiet(self, target: Target) -> Quiet:
        """Ask a server for one answer at a time; the first of each length is not counted.

        The figures are nan where it serves none.
        """
        mix, gaps_ms = self.mix, []
        ttft_ms = float("nan")
        for tokens in (mix.short_tokens, mix.long_tokens):
            answers = self._ask(target, [tokens] * (_QUIET_REQUESTS + 1), 0, None, 1, Effort())[1:]
            if not (whole := _whole(answers)):
                return Quiet(float("nan"), float("nan"))
            ttft_ms = median([answer.ttft_s * 1000 for answer in whole])
            gaps_ms += _gaps_ms(whole)
        return Quiet(ttft_ms, max(median(gaps_ms or [0.0]), _LEAST_MS))

    def run(
        self,
        side: str,
        target: Target,
        load: Load,
        round_: int,
        limits: GoodLimits,
        done: Callable[[int], None] = lambda count: None,
    ) -> Cell:
        """Put a load on a server; that of a round is the same for all, and shares nothing with another.

        Args:
            done: is told how many requests ended.
        """
        number = 1 + round_ * _MOST_LOADS + load.index  # 0 is the quiet time
        due_s = arrivals(load.num, load.rate, self.mix.seed + number) if load.rate else None
        most_open = None if load.rate else load.concurrency
        effort, before = Effort(), MachineUse.now()
        lengths = self.mix.lengths(load.num, number)
        answers = self._ask(target, lengths, number, due_s, most_open, effort, done)
        others = MachineUse.now().others_since(before)
        whole = _whole(answers)
        figures = _figures(answers, whole, limits, load.rate) if whole else {}
        failed, cores = len(answers) - len(whole), effort.cpu_s / effort.wall_s
        return Cell(side, load.rate, round_, figures, failed, len(answers), cores, others)

    def _ask(
        self,
        target: Target,
        lengths: Sequence[int],
        number: int,
        due_s: Sequence[float] | None,
        most_open: int | None,
        effort: Effort,
        done: Callable[[int], None] = lambda count: None,
    ) -> list[Answer]:
        client = StreamClient(target.url, target.api_key)
        maker = RequestMaker(target.model, self.vocab_size, is_text=False, asks_ids=False, seed=self.mix.seed)
        first = number << 20  # prompts are of one load alone: no cache of prefixes helps
        bodies = (maker.body(n, self.mix.output_tokens, first + i) for i, n in enumerate(lengths))
        requests = [client.encode(body) for body in bodies]
        streams = run_load(client, requests, due_s, most_open, self.patience_s, effort, done)
        return [read_answer(stream) for stream in streams]


def _whole(answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers that are whole, and tell of the others."""
    for error, count in Counter(answer.error for answer in answers if answer.error).most_common(3):
        with beside_progress():
            click.echo(f"{count} requests failed: {error}", err=True)
    return [answer for answer in answers if not answer.error]


def _gaps_ms(answers: Sequence[Answer]) -> list[float]:
    return [gap_s * 1000 for answer in answers for _, gap_s in answer.gaps()]


def _figures(
    answers: Sequence[Answer], whole: Sequence[Answer], limits: GoodLimits, rate: float | None
) -> dict[str, float]:
    ttft_ms = [answer.ttft_s * 1000 for answer in whole]
    figures = {f"ttft_{at}": percentile(ttft_ms, percent) for at, percent in _PERCENTS.items()}
    if gaps_ms := _gaps_ms(whole):
        figures |= {f"itl_{at}": percentile(gaps_ms, percent) for at, percent in _PERCENTS.items()}
        figures["itl_max"] = max(gaps_ms)
    figures = {name: max(value, _LEAST_MS) for name, value in figures.items()}
    wall_s = max(answer.ended_s for answer in whole) - min(answer.begun_s for answer in answers)
    answered = len(whole) / wall_s
    good = sum(limits.are_kept(answer) for answer in whole) / len(answers)
    return figures | {
        "answered": answered,
        "output": sum(answer.num_tokens for answer in whole) / wall_s,
        "within": 100 * good,
        # Of those that come, as the last answer ends after the time in which they do.
        "good": good * (rate or answered),
    }
