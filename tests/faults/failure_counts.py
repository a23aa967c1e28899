"""What is counted as failures, read from an exposition as Prometheus reads it."""

from __future__ import annotations

from collections import Counter

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.messages import Role
from gateway.exposition import text_of
from gateway.failures import Failure
from gateway.metrics import RequestMetrics
from gateway.node_metrics import node_families
from gateway.nodes import NodeSnapshot
from tests.faults.world import World

Counts = Counter[tuple[Role, Failure]]


def failures_in(text: str) -> Counts:
    """Return the sums of all failure series, by who counts them and kind."""
    counts: Counts = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "baton_failures_total":
                counts[Role.GATEWAY, Failure(sample.labels["kind"])] += int(sample.value)
            elif sample.name == "baton_node_failures_total":
                role, kind = Role(sample.labels["role"]), Failure(sample.labels["kind"])
                counts[role, kind] += int(sample.value)
    return counts


class Watched:
    """A world whose failures are counted: by its gateway, and by its nodes whether or not it can ask them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._metrics = RequestMetrics()

    def failures(self) -> Counts:
        """Return the sums now."""
        self._metrics.catch_up(self._world.client.counters())
        nodes = [
            NodeSnapshot(f"{role.value}-0", role, 1, *node._stats())
            for role, node in ((Role.DECODE, self._world.d), (Role.PREFILL, self._world.p))
        ]
        own = failures_in(generate_latest(self._metrics.registry).decode())
        return own + failures_in(text_of(lambda: node_families(nodes)).decode())
