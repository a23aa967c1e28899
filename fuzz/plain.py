"""Fuzzing by mutation alone: no coverage, no dependency. What a target says of an input is what guides it."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fuzz.targets import Target

MOST_MUTATIONS = 4
SEEDS_SHARE = 0.5  # of the inputs are made from the seeds: what was kept later is mostly no message


class Found(Exception):
    """An input that made something happen that must not."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data.hex())
        self.data = data


@dataclass
class PlainRun:
    """What a run saw: how often the target said what, and the first input for each."""

    target: Target
    corpus: list[bytes]
    seen: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, bytes] = field(default_factory=dict)

    def one(self, data: bytes) -> None:
        """Run one input; keep it when its outcome is new.

        Raises:
            Found: the target raised.
        """
        try:
            what = self.target.run(data)
        except Exception as error:
            raise Found(data) from error
        if what not in self.firsts:
            self.firsts[what] = data
            self.corpus.append(data)
        self.seen[what] += 1

    def go_on(self, runs: int, draw: random.Random, until_s: float | None = None) -> int:
        """Run so many inputs, or until the time is over; return how many."""
        target, corpus = self.target, self.corpus
        for number in range(runs):
            if until_s is not None and number % 64 == 0 and time.monotonic() > until_s:
                return number
            base = target.seeds if draw.random() < SEEDS_SHARE else corpus
            data = base[draw.randrange(len(base))]
            for _ in range(min(draw.randint(1, MOST_MUTATIONS), draw.randint(1, MOST_MUTATIONS))):
                data = target.mutate(data, draw)
            self.one(data[: target.max_bytes])
        return runs


def begin(target: Target, corpus: Sequence[bytes]) -> PlainRun:
    """Run the seeds and the corpus as they are."""
    run = PlainRun(target, [])
    for data in (*target.seeds, *corpus):
        run.one(data)
    run.corpus.extend(data for data in (*target.seeds, *corpus) if data not in set(run.corpus))
    return run
