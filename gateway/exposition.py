"""The page /metrics, in Prometheus text: the gateway's own counts, and what the nodes answer when asked.

A part that cannot be had is left out and logged once; the others are still true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from common.messages import Role
from gateway.metrics import RequestMetrics
from gateway.node_metrics import node_families
from gateway.nodes import Nodes
from gateway.shared_counts import registry_of_all

VERSION = version("baton-serve")
RESTART_REASONS = ("died", "left", "stalled", "slow")


def cluster_families(num_nodes: int, num_missing: int, nodes: Nodes) -> list[Metric]:
    """What the gateway knows of all processes."""
    build = GaugeMetricFamily("baton_build_info", "1; the version is a label.", labels=["version"])
    build.add_metric([VERSION], 1)
    restarts = CounterMetricFamily(
        "baton_restarts", "Processes started again, by why.", labels=["role", "reason"]
    )
    counted = nodes.restarts()
    for role in Role:
        for reason in RESTART_REASONS:
            restarts.add_metric([role.value, reason], counted.get(role.value, {}).get(reason, 0))
    gauges = (
        ("baton_nodes", "Nodes that answered this scrape.", num_nodes),
        ("baton_nodes_missing", "Nodes that did not, or died within the last minute.", num_missing),
        ("baton_nodes_stalled", "Nodes with work and no step for 30 s.", len(nodes.stalled())),
        ("baton_ready", "1 where a request could be served now.", int(nodes.usable())),
    )
    return [build, restarts, *(GaugeMetricFamily(name, text, value=value) for name, text, value in gauges)]


@dataclass(frozen=True, slots=True, eq=False)  # a registry keeps its collectors in a dict
class _Once:
    """A collector for one scrape."""

    families: Callable[[], Iterable[Metric]]

    def collect(self) -> Iterable[Metric]:
        """Give every family once, as the registry wants it."""
        return self.families()


def text_of(families: Callable[[], Iterable[Metric]]) -> bytes:
    """Write families that are made when they are read."""
    registry = CollectorRegistry()
    registry.register(_Once(families))
    return generate_latest(registry)


async def exposition(metrics: RequestMetrics, nodes: Nodes) -> bytes:
    """Return the text of /metrics; the nodes are asked afresh, and one that does not answer is left out."""
    snapshots, missing = await nodes.snapshot()
    metrics.catch_up(nodes.counters())
    process = CollectorRegistry()
    ProcessCollector(registry=process)  # with several gateways it is of the one that answers
    parts: tuple[Callable[[], bytes], ...] = (
        lambda: generate_latest(registry_of_all(metrics.registry)),
        lambda: text_of(lambda: cluster_families(len(snapshots), len(missing), nodes)),
        lambda: text_of(lambda: node_families(snapshots)),
        lambda: generate_latest(process),
    )
    texts = []
    for part in parts:
        try:
            texts.append(part())
        except Exception:  # the others are still true
            metrics.trouble.say()
    return b"".join(texts)
