"""What /metrics shows, in Prometheus text: this process's own counts, and what the nodes answer when asked.

All series of the gateway are there from the start, at 0. Nothing here can fail a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from common.messages import PageLedger, Role
from gateway.nodes import Nodes, NodeSnapshot

PAGE_STATES = tuple(f.name for f in fields(PageLedger) if f.name != "total")


class Outcome(Enum):
    """How a generating call ended."""

    SUCCESS = "success"
    CLIENT_GONE = "client_gone"
    REJECTED = "rejected"  # answered with a 4xx
    FAILED = "failed"  # answered with a 5xx, or with an error in its stream


class RequestMetrics:
    """The gateway's own instruments, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "baton_requests", "Generating calls, by how they ended.", ["outcome"], registry=self.registry
        )
        for outcome in Outcome:
            self.requests.labels(outcome.value)
        self.prompt_tokens = Counter(
            "baton_prompt_tokens", "Prompt tokens submitted to the nodes.", registry=self.registry
        )
        self.generation_tokens = Counter(
            "baton_generation_tokens", "Tokens of answers.", registry=self.registry
        )
        self.running = Gauge("baton_requests_running", "Calls being served now.", registry=self.registry)


@dataclass(frozen=True, slots=True, eq=False)  # a registry keeps its collectors in a dict
class NodeMetrics:
    """A collector of what is counted elsewhere, read once for one scrape."""

    nodes: tuple[NodeSnapshot, ...]
    num_missing: int
    counters: dict[str, int]
    restarts: dict[str, int]

    def collect(self) -> Iterable[Metric]:
        """Yield every family once, as the registry wants it."""
        restarts = CounterMetricFamily("baton_restarts", "Processes started again.", labels=["role"])
        for role in Role:
            restarts.add_metric([role.value], self.restarts.get(role.value, 0))
        yield restarts
        for name, value in self.counters.items():
            yield CounterMetricFamily(f"baton_gateway_{_name(name)}", "Counted by the gateway.", value=value)
        yield GaugeMetricFamily("baton_nodes", "Nodes that answered.", value=len(self.nodes))
        yield GaugeMetricFamily("baton_nodes_missing", "Nodes that did not.", value=self.num_missing)
        pages = GaugeMetricFamily("baton_kv_pages", "KV pages by state.", labels=["node", "role", "state"])
        by_name: dict[str, CounterMetricFamily] = {}
        for node in self.nodes:
            labels = [node.node_id, node.role.value]
            for state in PAGE_STATES:
                pages.add_metric([*labels, state], getattr(node.pages, state))
            for name, value in node.counters.items():
                family = by_name.setdefault(
                    name,
                    CounterMetricFamily(
                        f"baton_node_{_name(name)}", "Counted by a node.", labels=["node", "role"]
                    ),
                )
                family.add_metric(labels, value)
        yield pages
        yield from by_name.values()


def _name(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name).removesuffix("_total")


async def exposition(metrics: RequestMetrics, nodes: Nodes) -> bytes:
    """Return the text of /metrics; the nodes are asked afresh, and one that does not answer is left out."""
    snapshots, missing = await nodes.snapshot()
    registry = CollectorRegistry()
    registry.register(NodeMetrics(snapshots, len(missing), nodes.counters(), nodes.restarts()))
    return generate_latest(metrics.registry) + generate_latest(registry)
