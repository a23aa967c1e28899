"""A comparison from the first request to the last: limits, rates, and the rounds of all servers.

Knows neither the options nor what follows from the figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import click

from benchmarks.compare_load import Cell, Load, Quiet, Target, Tester
from benchmarks.compare_options import Sizes
from benchmarks.compare_servers import COLOCATED, DISAGGREGATED, Servers, Side, order_of
from benchmarks.serve_figures import GoodLimits
from common.errors import ConfigError
from terminal.progress import beside_progress, progress

# Times what the quicker server takes when nothing else runs; AlpaServe (OSDI 2023) scales its limits so, too.
LIMIT_FACTOR = 3.0
_LEAST_REQUESTS = 8  # of a cell
_PROBE = 2  # times the concurrency: the least that says what a server takes


@dataclass(frozen=True, slots=True)
class Rounds:
    """The servers, what puts loads on them, and how much is measured."""

    servers: Servers
    sides: Sequence[Side]
    tester: Tester
    sizes: Sizes

    def find_limits(self, ttft_ms: float | None, itl_ms: float | None) -> GoodLimits:
        """Return the limits of goodput: what the user said, or times what the quicker server takes, quiet.

        Raises:
            ConfigError: a server does not come up, or answers nothing.
        """
        found: list[Quiet] = []
        for side in self.sides:
            target = self._target(side)
            with progress(f"{side.name}: one request at a time"):
                found.append(self.tester.quiet(target))
            if math.isnan(found[-1].itl_ms):
                raise ConfigError(f"the {side.name} server answers no request")
        long_ttft_ms, gap_ms = min(q.long_ttft_ms for q in found), min(q.itl_ms for q in found)
        return GoodLimits(ttft_ms or LIMIT_FACTOR * long_ttft_ms, itl_ms or LIMIT_FACTOR * gap_ms)

    def find_loads(self, rates: Sequence[float] | None, limits: GoodLimits) -> list[Load]:
        """Return what each server gets in a round: as many as it takes, then rates.

        Args:
            rates: requests a second; None: parts of what the better one of the pair takes.

        Raises:
            ConfigError: neither takes any.
        """
        sizes = self.sizes
        if rates is None:
            most = self._capacity(limits)
            rates = [float(f"{part * most:.3g}") for part in sizes.loads]
        else:
            most = max(rates)
        nums = [max(_LEAST_REQUESTS, round(rate * sizes.seconds)) for rate in (most, *rates)]
        nums[0] = max(nums[0], _PROBE * sizes.concurrency)  # fewer would end before the server is full
        return [
            Load(num, rate, sizes.concurrency, index)
            for index, (num, rate) in enumerate(zip(nums, (None, *rates), strict=True))
        ]

    def _capacity(self, limits: GoodLimits) -> float:
        """Return about how many requests a second the better one of the pair takes."""
        sizes = self.sizes
        probe = Load(_PROBE * sizes.concurrency, None, sizes.concurrency)
        found = []
        for side in reversed(self.sides):  # the last one of the quiet time still runs
            target = self._target(side)
            with progress(f"{side.name}: finding what it takes", probe.num) as shown:
                cell = self.tester.run(side.name, target, probe, sizes.rounds, limits, shown.advance)
            if side.name in (DISAGGREGATED, COLOCATED):
                found.append(cell.figures.get("answered", 0.0))
        if not any(found):
            raise ConfigError("no request was served: neither server takes the load")
        return max(found)

    def run(self, loads: Sequence[Load], limits: GoodLimits) -> list[Cell]:
        """Put all loads on all servers, in turn; one that runs alone gets its loads in one go."""
        cells = []
        num_rounds = self.sizes.rounds
        with progress("", num_rounds * len(self.sides) * sum(load.num for load in loads)) as shown:
            for round_ in range(num_rounds):
                with beside_progress():
                    click.echo(f"round {round_ + 1} of {num_rounds}", err=True)
                for load, side in self._turns(order_of(self.sides, round_), loads):
                    shown.say(f"{side.name}, {load.name}")
                    was_there = self.servers.runs(side)
                    target = self._target(side)
                    if not was_there:
                        self.tester.warm_up(target)
                    cell = self.tester.run(side.name, target, load, round_, limits, shown.advance)
                    cells.append(cell)
        return cells

    def _turns(self, sides: Sequence[Side], loads: Sequence[Load]) -> list[tuple[Load, Side]]:
        if self.servers.together:
            return [(load, side) for load in loads for side in sides]
        return [(load, side) for side in sides for load in loads]

    def _target(self, side: Side) -> Target:
        return Target(self.servers.url(side), side.model, side.api_key)
