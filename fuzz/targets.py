"""The targets by name. Each is made when it is asked for: some need the tiny model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Run = Callable[[bytes], str]
Mutate = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True, slots=True)
class Target:
    """What is fuzzed.

    `run` raises when something happened that must not, else it names what came of the bytes; an input with a
    new name is worth keeping. `mutate` knows the shape of an input.
    """

    run: Run
    seeds: Sequence[bytes]
    mutate: Mutate
    max_bytes: int


def _codec() -> Target:
    from fuzz import codec

    return Target(codec.run, codec.seeds(), codec.mutate, codec.MAX_BYTES)


def _machines(name: str) -> Callable[[], Target]:
    def make() -> Target:
        from fuzz import machines

        return Target(machines.RUNS[name], machines.seeds(), machines.mutate, machines.MAX_BYTES)

    return make


def _pairs(name: str) -> Callable[[], Target]:
    def make() -> Target:
        from fuzz import pairs

        return Target(pairs.RUNS[name], pairs.seeds(), pairs.mutate, pairs.MAX_BYTES)

    return make


def _bodies() -> Target:
    from fuzz import bodies

    return Target(bodies.runner(), bodies.seeds(), bodies.mutate, bodies.MAX_BYTES)


TARGETS: dict[str, Callable[[], Target]] = {
    "codec": _codec,
    "receiver": _machines("receiver"),
    "sender": _machines("sender"),
    "link": _machines("link"),
    "link-pair": _pairs("link-pair"),
    "transfer-pair": _pairs("transfer-pair"),
    "one-sided-pair": _pairs("one-sided-pair"),
    "bodies": _bodies,
}
