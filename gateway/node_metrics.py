"""What nodes count, as Prometheus families: each counter of theirs has a row here, with what it means.

A node answers with its counters when it is asked, by name; one that it has not counted yet is 0. A name that
has no row is not shown. Knows no instrument of the gateway's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from common.messages import PageLedger, Role
from gateway.failures import FAILURES, kinds_of
from gateway.nodes import NodeSnapshot

PAGE_STATES = tuple(f.name for f in fields(PageLedger) if f.name != "total")
ROWS = tuple(1 << i for i in range(11))  # upper bounds of a step's rows
LABELS = ["node", "role"]

# Of any process's links; the gateway has them too.
LINK_COUNTERS = {
    "links_refused": "Refusals of links, given or taken, each time.",
    "peers_refused": "Peers that this process refused, each reason once.",
    "messages_rejected": "Bytes that are no message of this version of the protocol.",
    "messages_malformed": "Bytes that are no message of any version.",
    "messages_misplaced": "Messages that go the wrong way, or that the transfer's state does not allow.",
    "messages_lost": "Gaps in a peer's sequence of messages.",
    "messages_late": "Messages about what is over.",
    "messages_duplicate": "Messages whose number was passed, and requests for a transfer that is open.",
    "messages_of_another_epoch": "Messages of a process that is gone.",
    "messages_before_greeting": "Messages on a link that is not up, or was replaced.",
    "greetings_repeated": "Answers to a greeting that was answered.",
    "greetings_misplaced": "Greetings that go the wrong way, or to a link that is down.",
}
STEP_COUNTERS = {
    "steps": "Forward passes that were launched.",
    "tokens_computed": "Prompt tokens that were computed, again after a retraction.",
    "attention_fallbacks": "1 where attention is not the fastest for this GPU; the log says why.",
}
DECODE_COUNTERS = {
    "requests_submitted": "Requests that gateways submitted.",
    "requests_aborted": "Requests that were given up: their client left, or had enough.",
    "requests_prebuilt": "Hand-overs: requests that began to decode with pages from a prefill node.",
    "requests_expired": "Requests that did not end within their deadline.",
    "requests_retracted": "Requests whose pages were taken for others; they go on later.",
    "requests_lost": "Requests that their gateway does not know: its last word was lost.",
    "tokens_sampled": "Tokens of answers.",
    "transfers_started": "Transfers of a prompt's pages that were asked for.",
    "transfers_done": "Transfers that brought pages and first token.",
    "transfers_failed": "Transfers that will not be completed.",
    "transfers_aborted": "Transfers that were given up because nobody wants them any more.",
    "transfers_retried": "Transfers that failed and are tried again.",
    "transfers_lost": "Transfers that the prefill node does not know: a message was lost.",
    "pages_received": "KV pages that came.",
    "pages_wrong": "Transfers that failed because pages came out of order, too many or too few.",
    "chunks_broken": "Chunks of pages with a wrong size or checksum, or beyond the credit.",
    "prefill_nodes_lost": "Prefill nodes that died, or whose link broke.",
    "prefill_nodes_failed": "Transfers that a prefill node gave up, though it does not leave.",
    "gateways_lost": "Gateways that died, or whose link broke.",
    "peers_unusable": "Prefill nodes whose address this process cannot use.",
}
PREFILL_COUNTERS = {
    "transfers_started": "Transfers that decode nodes asked for.",
    "transfers_rejected": "Transfers that were not taken.",
    "transfers_aborted": "Transfers that their decode node gave up.",
    "aborts_before_request": "Requests that were dropped because their abort came first.",
    "pages_sent": "KV pages that left.",
    "planes_fallen_back": "Links of this host whose pages travel in messages: D's memory cannot be mapped.",
}
COUNTERS: dict[Role, dict[str, str]] = {
    Role.DECODE: LINK_COUNTERS | STEP_COUNTERS | DECODE_COUNTERS,
    Role.PREFILL: LINK_COUNTERS | STEP_COUNTERS | PREFILL_COUNTERS,
}
MOVED = {Role.DECODE: "pages_received", Role.PREFILL: "pages_sent"}


def node_families(nodes: Iterable[NodeSnapshot]) -> list[Metric]:
    """Every family of the nodes, whoever answered; a node counts from its own start."""
    pages = GaugeMetricFamily("baton_kv_pages", "KV pages by state.", labels=[*LABELS, "state"])
    running = GaugeMetricFamily(
        "baton_node_requests_running", "Requests that a node computes, a second ago at most.", labels=LABELS
    )
    queued = GaugeMetricFamily(
        "baton_node_requests_queued", "Requests that wait at a node, a second ago at most.", labels=LABELS
    )
    rows = HistogramMetricFamily("baton_node_step_rows", "Rows of a step: its batch size.", labels=LABELS)
    moved = CounterMetricFamily(
        "baton_node_transfer_bytes", "KV bytes that came (decode) or left (prefill).", labels=LABELS
    )
    failures = CounterMetricFamily(
        "baton_node_failures", "Failures by kind (docs/metrics.md).", labels=[*LABELS, "kind"]
    )
    counted = {
        name: CounterMetricFamily(f"baton_node_{name}", _help(name), labels=LABELS)
        for counters in COUNTERS.values()
        for name in counters
    }
    for node in nodes:
        labels, counters = [node.node_id, node.role.value], node.counters
        for state in PAGE_STATES:
            pages.add_metric([*labels, state], getattr(node.pages, state))
        running.add_metric(labels, node.running)
        queued.add_metric(labels, node.queued)
        rows.add_metric(labels, *_buckets(counters))
        moved.add_metric(labels, counters.get(MOVED[node.role], 0) * node.page_bytes)
        for kind in kinds_of(node.role):
            total = sum(counters.get(name, 0) for name in FAILURES[kind].counters)
            failures.add_metric([*labels, kind.value], total)
        for name in COUNTERS[node.role]:
            counted[name].add_metric(labels, counters.get(name, 0))
    return [pages, running, queued, rows, moved, failures, *counted.values()]


def _help(name: str) -> str:
    """What a counter is, in the words of each role that has it."""
    texts = {role: counters[name] for role, counters in COUNTERS.items() if name in counters}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return " ".join(f"{role.value.capitalize()}: {text}" for role, text in texts.items())


def _buckets(counters: Mapping[str, int]) -> tuple[list[tuple[str, float]], float]:
    """The steps with up to so many rows, and the sum of their rows."""
    buckets, total = [], 0
    for bound in ROWS:
        total += counters.get(f"steps_up_to_{bound}", 0)
        buckets.append((f"{bound:.1f}", float(total)))
    more = sum(value for name, value in counters.items() if name.startswith("steps_up_to_"))
    return [*buckets, ("+Inf", float(more))], float(counters.get("step_rows", 0))
