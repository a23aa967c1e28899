"""The cells of a comparison put side by side: figures for the verdict, a table, charts, the JSON line's part.

Runs nothing, and gives no verdict.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.charts import Chart, Series
from benchmarks.compare_load import Cell
from benchmarks.compare_servers import COLOCATED, DISAGGREGATED
from benchmarks.percentiles import median
from benchmarks.serve_figures import GoodLimits
from benchmarks.verdict import (
    CAPACITY,
    GOODPUT,
    LATENCIES,
    RULES,
    Compared,
    Evidence,
    Rule,
    compare,
    deciding_rate,
    geometric_mean,
)

_MUCH = 100  # a noise beyond is not told apart
_LEAST_GOOD = 0.02  # of the requests, where servers are compared: a ratio to nothing would say no more
_UNITS = {"answered": "requests/s", "output": "tokens/s", "within": "%", "good": "requests/s"}


def _shown(key: str, name: str, *, more_is_better: bool = False) -> Rule:
    return Rule(key, name, 1.25, more_is_better, "stands in the table, and has no say")


# All that stands in the table for a rate; those of LATENCIES have a say at one of them.
SHOWN = (
    *LATENCIES[:2],
    _shown("ttft_p99", "TTFT p99"),
    *LATENCIES[2:3],
    _shown("itl_p90", "inter-token p90"),
    *LATENCIES[3:],
    _shown("itl_max", "inter-token max"),
    _shown("answered", "answered", more_is_better=True),
    _shown("output", "output", more_is_better=True),
    _shown("within", "within the limits", more_is_better=True),
    _shown("good", "goodput", more_is_better=True),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A figure at a rate (None: at capacity), of each server; `compared` where both of the pair have it."""

    rate: float | None
    rule: Rule
    values: dict[str, float]
    compared: Compared | None
    has_say: bool

    @property
    def unit(self) -> str:
        """Of the values."""
        return _UNITS.get(self.rule.key, "ms")


class Comparison:
    """The cells of all rounds.

    Args:
        rates: that were offered, ascending.
        limits: of goodput.
    """

    def __init__(
        self, sides: Sequence[str], rates: Sequence[float], cells: Sequence[Cell], limits: GoodLimits
    ) -> None:
        self.sides, self.rates, self.cells, self.limits = sides, rates, cells, limits
        pair = [self.mean(side, None, "answered") for side in (DISAGGREGATED, COLOCATED)]
        held = [capacity for capacity in pair if capacity is not None]
        self.deciding_rate = deciding_rate(rates, held) if len(held) == 2 else None

    def values(self, side: str, rate: float | None, key: str) -> list[float]:
        """Return a figure of each round, in order; rounds in which nothing was served are left out."""
        return [
            cell.figures[key]
            for cell in sorted(self.cells, key=lambda cell: cell.round_)
            if (cell.side, cell.rate) == (side, rate) and key in cell.figures
        ]

    def mean(self, side: str, rate: float | None, key: str) -> float | None:
        """Return the geometric mean over the rounds; nothing (0) in all of them has none, and is 0."""
        values = self.values(side, rate, key)
        if not any(values):
            return 0.0 if values else None
        return geometric_mean(_at_least(values, rate, key))

    def _compared(self, rule: Rule, *of: tuple[float | None, str]) -> Compared | None:
        """Compare a figure; `of` is rate and key for each of the pair."""
        pair = [
            _at_least(self.values(side, rate, key), rate, key)
            for side, (rate, key) in zip((DISAGGREGATED, COLOCATED), of, strict=True)
        ]
        return compare(rule, *pair) if len(pair[0]) == len(pair[1]) > 1 else None

    def evidence(self, most_others: float | None) -> Evidence:
        """Return what the verdict is made of.

        Args:
            most_others: share of the cores that others may take; None: it is not known what they took.
        """
        found = {CAPACITY.key: self._compared(CAPACITY, (None, "answered"), (None, "answered"))}
        best = [self._best_rate(side) for side in (DISAGGREGATED, COLOCATED)]
        if best[0] is not None and best[1] is not None:
            found[GOODPUT.key] = self._compared(GOODPUT, (best[0], "good"), (best[1], "good"))
        if (rate := self.deciding_rate) is not None:
            found |= {
                rule.key: self._compared(rule, (rate, rule.key), (rate, rule.key)) for rule in LATENCIES
            }
        figures = {rule.key: figure for rule in RULES if (figure := found.get(rule.key)) is not None}
        failed = {
            side: sum(cell.failed for cell in self.cells if cell.side == side)
            / max(1, sum(cell.num for cell in self.cells if cell.side == side))
            for side in (DISAGGREGATED, COLOCATED)
        }
        cores: dict[tuple[str, float | None], list[float]] = defaultdict(list)
        for cell in self.cells:
            cores[cell.side, cell.rate].append(cell.client_cores)
        most_cores = max(map(median, cores.values()), default=0.0)
        if most_others is None:
            return Evidence(figures, failed, most_cores)
        others = median([cell.others for cell in self.cells]) if self.cells else 0.0
        return Evidence(figures, failed, most_cores, others, most_others)

    def _best_rate(self, side: str) -> float | None:
        """Return the rate at which a server's goodput is the best."""
        means = {rate: self.mean(side, rate, "good") for rate in self.rates}
        return max(
            (rate for rate in means if means[rate] is not None), key=lambda r: means[r] or 0, default=None
        )

    def rows(self) -> list[Row]:
        """Return all figures: the rates in order, then capacity."""
        rows = []
        for rate in (*self.rates, None):
            for rule in SHOWN:
                values = {side: self.mean(side, rate, rule.key) for side in self.sides}
                known = {side: value for side, value in values.items() if value is not None}
                has_say = (rate is not None and rate == self.deciding_rate and rule in LATENCIES) or (
                    rate is None and rule.key == "answered"
                )
                compared = self._compared(rule, (rate, rule.key), (rate, rule.key))
                if known:
                    rows.append(Row(rate, rule, known, compared, has_say))
        return rows

    def charts(self) -> list[Chart]:
        """Return the picture's charts: latencies and goodput by rate, a colour for each server."""
        first, itl = ("ttft_p50", "ttft_p90", "ttft_p99"), ("itl_p50", "itl_p99", "itl_max")
        return [
            Chart("time to first token", "requests/s", "ms", self._lines(first), is_log=True),
            Chart("time between tokens", "requests/s", "ms", self._lines(itl), is_log=True),
            Chart("goodput", "requests/s that come", "requests/s within the limits", self._lines(("good",))),
            Chart(
                "requests within the limits",
                "requests/s that come",
                "%",
                self._lines(("within",)),
                y_max=100.0,
            ),
        ]

    def _lines(self, keys: Sequence[str]) -> list[Series]:
        lines = []
        for colour, side in enumerate(self.sides):
            for dash, key in enumerate(keys):
                means = [(rate, self.mean(side, rate, key)) for rate in self.rates]
                points = [(rate, mean) for rate, mean in means if mean is not None]
                name = f"{side} {key.partition('_')[2]}".strip()
                lines.append(Series(name, points, colour, dash))
        return lines


def _at_least(values: Sequence[float], rate: float | None, key: str) -> list[float]:
    """Return the values, with what has a ratio in place of nothing: of requests within the limits, if any."""
    least = {"within": 100 * _LEAST_GOOD, "good": _LEAST_GOOD * (rate or 1.0)}.get(key, 0.0)
    return [max(value, least) for value in values]


def table(rows: Sequence[Row], sides: Sequence[str]) -> str:
    """Return the rows for people; a figure that has a say in the verdict says what it says."""
    head = ["", *sides, "disaggregated is", "noise", "has a say"]
    lines: list[list[str]] = []
    rate: float | None = -1.0
    for row in rows:
        if row.rate != rate:
            rate = row.rate
            lines.append(["as many as it takes" if rate is None else f"{rate:.3g} requests/s"])
        values = [f"{row.values[side]:.4g} {row.unit}" if side in row.values else "" for side in sides]
        lines.append([f"  {row.rule.name}", *values, *_said(row)])
    widths = [max(len(line[i]) for line in [head, *lines] if len(line) > i) for i in range(len(head))]
    widths[0] = max(len(line[0]) for line in lines if len(line) > 1) if lines else 0
    return "\n".join(
        "  ".join(
            f"{cell:>{width}}" if 0 < column < len(head) - 1 else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(line, widths, strict=False))
        ).rstrip()
        for line in [head, *lines]
    )


def _said(row: Row) -> list[str]:
    if row.compared is None:
        return ["", "", ""]
    factor = max(row.compared.gain, 1 / row.compared.gain)
    word = "better" if row.compared.gain >= 1 else "worse"
    finding = row.compared.finding.value if row.has_say else ""
    noise = f"{row.compared.noise:.2f}x" if row.compared.noise < _MUCH else f"over {_MUCH}x"
    return [f"{factor:.2f}x {word}", noise, finding]
