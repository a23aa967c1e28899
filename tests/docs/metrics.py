"""docs/metrics.md: how to use them is written there by hand, what there is comes from the registries."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client import Metric, ProcessCollector

from common.messages import PageLedger
from gateway.exposition import cluster_families
from gateway.failures import FAILURES
from gateway.fake import FakeNodes
from gateway.metrics import RequestMetrics
from gateway.node_metrics import COUNTERS, node_families
from gateway.nodes import NodeSnapshot

_SECTION = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
_NODES = [NodeSnapshot(role.value, role, 1, PageLedger(0), {}) for role in COUNTERS]
_OPEN = {"node", "le", "version"}  # labels whose values are not listed


def gateway_families() -> list[Metric]:
    """Those that a gateway counts itself."""
    return list(RequestMetrics().registry.collect())


def all_families() -> list[Metric]:
    """Every family that /metrics can show."""
    process = ProcessCollector(registry=None)  # type: ignore[arg-type]
    return [
        *gateway_families(),
        *cluster_families(2, 0, FakeNodes()),
        *node_families(_NODES),
        *process.collect(),
    ]


def fill_page(page: str) -> str:
    """Return the page with its tables as the code is now."""
    tables = {
        "failures": _failures(),
        "gateway": _families(gateway_families()),
        "cluster": _families(cluster_families(2, 0, FakeNodes())),
        "nodes": _families(node_families(_NODES)),
    }
    return _SECTION.sub(lambda found: found[1] + tables[found[2]] + found[3], page)


def shown_name(family: Metric) -> str:
    """The name that a query uses; of a histogram, what its series begin with."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def _failures() -> str:
    rows = []
    for kind, about in FAILURES.items():
        where = ", ".join(role.value for role in about.counted_by)
        rows.append(f"| `{kind.value}` | {where} | {about.what} | {about.advice} |")
    return _table("kind | counted by | what happened | what to do", rows)


def _families(families: Iterable[Metric]) -> str:
    rows = []
    for family in families:
        values: dict[str, dict[str, None]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label != "le":
                    values.setdefault(label, {})[value] = None
        labels = [
            label if label in _OPEN or label == "kind" else f"{label}: {' '.join(found)}"
            for label, found in values.items()
        ]
        row = f"`{shown_name(family)}` | {family.type} | {'; '.join(labels)} | {family.documentation}"
        rows.append(f"| {row} |")
    return _table("metric | type | labels | is", rows)


def _table(head: str, rows: list[str]) -> str:
    return "\n".join([f"| {head} |", "|" + " --- |" * len(head.split(" | ")), *rows, ""])
