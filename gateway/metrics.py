"""What /metrics shows, in Prometheus text: this process's own counts, and what the nodes answer when asked.

All series of the gateway are there from the start, at 0. Nothing here can fail a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from common.messages import PageLedger, Role, Timings
from gateway.answer import Answer
from gateway.nodes import Nodes, NodeSnapshot
from gateway.shared_counts import registry_of_all

STAGES = tuple(f.name for f in fields(Timings))
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
        self.running = Gauge(
            "baton_requests_running",
            "Calls being served now.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self._links: dict[str, tuple[Counter, int]] = {}  # with what was counted of each
        self._stages = Summary(
            "baton_request_stage_seconds",
            "Where the time until the second token went, of answers that nodes ended.",
            ["stage"],
            registry=self.registry,
        )
        for stage in STAGES:
            self._stages.labels(stage.removesuffix("_ms"))
        self._first_token = Summary(
            "baton_time_to_first_token_seconds",
            "From submitting a prompt to its first token, in the gateway.",
            registry=self.registry,
        )
        self._per_token = Summary(
            "baton_request_time_per_output_token_seconds",
            "Mean time between the tokens of an answer that has several.",
            registry=self.registry,
        )

    def count_links(self, counters: dict[str, int]) -> None:
        """Take over what the links of this process have counted since it began."""
        for name, value in counters.items():
            if name not in self._links:
                full_name = f"baton_gateway_{_name(name)}"
                self._links[name] = Counter(full_name, "Counted by the gateway.", registry=self.registry), 0
            counter, before = self._links[name]
            counter.inc(value - before)
            self._links[name] = counter, value

    def count_times(self, answer: Answer) -> None:
        """Count where an answer's time went; nothing, where the node did not end it."""
        if answer.timings is None:
            return
        for stage in STAGES:
            self._stages.labels(stage.removesuffix("_ms")).observe(getattr(answer.timings, stage) / 1000)
        begun_s, first_s, end_s = answer.times_s
        self._first_token.observe(first_s - begun_s)
        if answer.num_tokens > 1:
            self._per_token.observe((end_s - first_s) / (answer.num_tokens - 1))


@dataclass(frozen=True, slots=True, eq=False)  # a registry keeps its collectors in a dict
class NodeMetrics:
    """A collector of what is counted elsewhere, read once for one scrape."""

    nodes: tuple[NodeSnapshot, ...]
    num_missing: int
    restarts: dict[str, int]

    def collect(self) -> Iterable[Metric]:
        """Yield every family once, as the registry wants it."""
        restarts = CounterMetricFamily("baton_restarts", "Processes started again.", labels=["role"])
        for role in Role:
            restarts.add_metric([role.value], self.restarts.get(role.value, 0))
        yield restarts
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
    registry.register(NodeMetrics(snapshots, len(missing), nodes.restarts()))
    metrics.count_links(nodes.counters())
    return generate_latest(registry_of_all(metrics.registry)) + generate_latest(registry)
