"""/metrics is what Prometheus expects: names, types, help, all series from the start, true numbers."""

from __future__ import annotations

import ast
import asyncio
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest
from prometheus_client import Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.config import GatewayConfig
from common.messages import PageLedger, Role
from gateway.app import build_app
from gateway.exposition import exposition, text_of
from gateway.failures import FAILURES, kinds_of
from gateway.fake import FakeNodes
from gateway.histograms import INTER_TOKEN_S, InterTokenTimes
from gateway.metrics import CLIENT_COUNTERS, RequestMetrics
from gateway.node_metrics import COUNTERS, LINK_COUNTERS, node_families
from gateway.nodes import NodeSnapshot
from gateway.text import TextPipeline
from tests.gateway.conftest import LIMITS, MODEL, LiveServer

ROOT = Path(__file__).parents[2]
PAGES = PageLedger(total=10, free=10)
UNITS = ("seconds", "bytes", "tokens", "rows")  # what our histograms are of
OTHER_UNITS = re.compile(r"_(ms|us|milliseconds|minutes|kib|mib|mebibytes|percent)(_|$)")


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def scrape(nodes: FakeNodes | None = None, metrics: RequestMetrics | None = None) -> str:
    return asyncio.run(exposition(metrics or RequestMetrics(), nodes or FakeNodes())).decode()


def of_nodes(*nodes: NodeSnapshot) -> dict[str, Metric]:
    return families(text_of(lambda: node_families(nodes)).decode())


# Names ------------------------------------------------------------------------------------------------------


def test_names_and_help_are_as_prometheus_wants_them() -> None:
    """The rules of `promtool check metrics`."""
    text = scrape()
    found = families(text)
    assert len(found) > 70
    for name, family in found.items():
        assert re.fullmatch(r"(baton|process)_[a-z0-9_]+", name), name
        assert len(family.documentation) > 10, name
        assert not OTHER_UNITS.search(name), name
        assert family.type in ("counter", "gauge", "histogram"), name
        assert not re.search(r"(counter|gauge|histogram|summary|metric)", name), name
        if family.type == "counter":  # the parser takes the ending off
            assert f"# TYPE {name}_total counter" in text, name
        else:
            assert not name.endswith(("_total", "_count", "_sum", "_bucket")), name
        if family.type == "histogram":
            assert name.endswith(UNITS), name
        for sample in family.samples:
            assert all(re.fullmatch(r"[a-z]+", label) for label in sample.labels), sample
            if family.type != "histogram":
                assert not {"le", "quantile"} & sample.labels.keys(), sample
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "a family is there twice"


def test_every_series_of_the_gateway_is_there_at_0_from_the_start() -> None:
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families(generate_latest(RequestMetrics().registry).decode()).values()
        for sample in family.samples
    }
    assert set(samples.values()) == {0.0}
    for outcome in ("success", "client_gone", "rejected", "failed"):
        assert ("baton_requests_total", outcome) in samples
    for kind in kinds_of(Role.GATEWAY):
        assert ("baton_failures_total", kind.value) in samples
    for stage in ("tokenize", "submit", "queue", "prefill", "transfer", "send", "decode", "first_decode"):
        assert ("baton_request_stage_seconds_count", stage) in samples
    for name in LINK_COUNTERS | CLIENT_COUNTERS:
        assert (f"baton_gateway_{name}_total",) in samples


def test_every_series_of_a_node_is_there_though_it_has_counted_nothing() -> None:
    found = of_nodes(*(NodeSnapshot(role.value, role, 1, PAGES, {}) for role in COUNTERS))
    for role, counters in COUNTERS.items():
        for name in counters:
            values = [s.value for s in found[f"baton_node_{name}"].samples if s.labels["role"] == role.value]
            assert values == [0.0]
        kinds = {
            s.labels["kind"] for s in found["baton_node_failures"].samples if s.labels["node"] == role.value
        }
        assert kinds == {kind.value for kind in kinds_of(role)}


def counters_in(*folders: str) -> set[str]:
    """Names that code counts by: `x.counters["name"] += 1`, and names that stand for one."""
    return {
        node.slice.value
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
        and (
            (isinstance(node.value, ast.Attribute) and node.value.attr in ("counters", "_counters"))
            or (isinstance(node.value, ast.Name) and node.value.id in ("counters", "total"))
        )
    }


def test_no_counter_lacks_a_row() -> None:
    nodes = counters_in("common", "transfer", "decode_node", "prefill_node")
    assert {"steps", "step_rows"} | nodes > {"requests_lost", "chunks_broken", "planes_fallen_back"}
    discarded = set(re.findall(r'Discard\("(\w+)"\)', (ROOT / "common" / "link.py").read_text()))
    rows = {name for counters in COUNTERS.values() for name in counters}
    assert nodes | discarded <= rows | {"step_rows"}  # that one is the sum of a histogram
    assert counters_in("gateway") <= LINK_COUNTERS.keys() | CLIENT_COUNTERS.keys()
    for about in FAILURES.values():
        assert set(about.counters) <= rows | CLIENT_COUNTERS.keys()


# Numbers ----------------------------------------------------------------------------------------------------


def test_a_steps_rows_are_a_histogram() -> None:
    counters = {"steps": 9, "steps_up_to_1": 2, "steps_up_to_4": 3, "steps_up_to_2048": 4, "step_rows": 5000}
    samples = of_nodes(NodeSnapshot("d", Role.DECODE, 1, PAGES, counters))["baton_node_step_rows"].samples
    buckets = {s.labels["le"]: s.value for s in samples if "le" in s.labels}
    assert (buckets["1.0"], buckets["2.0"], buckets["4.0"], buckets["1024.0"], buckets["+Inf"]) == (
        2,
        2,
        5,
        5,
        9,
    )
    sums = {s.name: s.value for s in samples if "le" not in s.labels}
    assert sums == {"baton_node_step_rows_count": 9, "baton_node_step_rows_sum": 5000}


def test_bytes_are_pages_times_their_size() -> None:
    d = NodeSnapshot("d", Role.DECODE, 1, PAGES, {"pages_received": 7}, page_bytes=1000)
    p = NodeSnapshot("p", Role.PREFILL, 1, PAGES, {"pages_sent": 9}, page_bytes=1000)
    samples = of_nodes(d, p)["baton_node_transfer_bytes"].samples
    assert {s.labels["node"]: s.value for s in samples} == {"d": 7000, "p": 9000}


def test_what_a_node_counts_by_another_name_is_left_out() -> None:
    strange = {"steps": 3, 'x"}\n evil': 5, "steps_up_to_9": 1}
    found = of_nodes(NodeSnapshot("d", Role.DECODE, 1, PAGES, strange))
    assert {s.value for s in found["baton_node_steps"].samples} == {3}
    assert not any("evil" in name for name in found)


def test_times_between_tokens_are_counted_as_observe_would(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, now = random.Random(4), 5.0
    monkeypatch.setattr("gateway.histograms.perf_counter", lambda: now)
    times, one_by_one = InterTokenTimes(), Histogram("a", "b", buckets=INTER_TOKEN_S, registry=None)
    bulk = Histogram("a", "b", buckets=INTER_TOKEN_S, registry=None)
    last = times.add(0.0, 3)  # an answer's first tokens have none before them
    for i in range(500):
        num_tokens = draw.choice((1, 1, 1, 4))
        gap_s = draw.choice((*INTER_TOKEN_S, draw.expovariate(20), 7.0)) * num_tokens
        now = last + gap_s
        for _ in range(num_tokens):
            one_by_one.observe((now - last) / num_tokens)
        last = times.add(last, num_tokens)
        if i % 100 == 0:
            times.flush(bulk)
    times.flush(bulk)
    times.flush(bulk)  # nothing is left
    values = [
        {(s.name, *s.labels.values()): s.value for s in h.collect()[0].samples} for h in (bulk, one_by_one)
    ]
    assert values[0] == pytest.approx(values[1])


def test_streams_count_the_times_between_their_tokens(server: LiveServer, client: httpx.Client) -> None:
    def count() -> float:
        samples = families(client.get("/metrics").text)["baton_inter_token_latency_seconds"].samples
        return next(s.value for s in samples if s.name.endswith("_count"))

    before = count()
    body = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 6, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        stream.read()
    assert count() - before == 2 * 5


# What goes wrong --------------------------------------------------------------------------------------------


class Broken:
    """An instrument that raises whatever is done with it."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


class BrokenCollector:
    """Part of a registry that raises when it is read."""

    def collect(self) -> Iterable[Metric]:
        raise RuntimeError("collect")


@pytest.fixture
def broken(text: TextPipeline) -> tuple[httpx.AsyncClient, RequestMetrics]:
    """A gateway, in this thread, whose instruments all raise."""
    app = build_app(FakeNodes(), text, GatewayConfig(), MODEL, LIMITS)
    metrics: RequestMetrics = app.state.metrics
    for name, value in vars(metrics).items():
        if hasattr(value, "collect") and name != "registry":
            setattr(metrics, name, Broken())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway"), metrics


def test_counting_that_raises_fails_no_request_and_is_said_once(
    broken: tuple[httpx.AsyncClient, RequestMetrics], caplog: pytest.LogCaptureFixture
) -> None:
    client, metrics = broken
    metrics.registry.register(BrokenCollector())
    body = {"model": MODEL, "prompt": "the", "max_tokens": 3}

    async def asked() -> list[httpx.Response]:
        async with client:
            answers = [await client.post("/v1/completions", json=body | {"stream": s}) for s in (False, True)]
            answers.append(await client.post("/v1/completions", json=body | {"max_tokens": -1}))
            answers.append(await client.get("/metrics"))
            return answers

    with caplog.at_level(logging.ERROR):
        answer, stream, refused, page = asyncio.run(asked())
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert stream.text.endswith("data: [DONE]\n\n")
    assert (refused.status_code, page.status_code) == (400, 200)
    assert "baton_nodes" in families(page.text)  # what does work is shown
    assert [r.message for r in caplog.records] == ["metrics are not complete; this is said once"]


def test_one_that_raises_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    nodes, metrics = FakeNodes(), RequestMetrics()
    nodes.restarts = Broken  # type: ignore[assignment]
    found = families(scrape(nodes, metrics))
    assert "baton_restarts" not in found
    assert {"baton_requests", "baton_node_steps"} <= found.keys()


# Several processes ------------------------------------------------------------------------------------------

WORKER = """
from gateway.failures import Failure
from gateway.metrics import Outcome, RequestMetrics
metrics = RequestMetrics()
metrics.call_ended(Outcome.SUCCESS, [])
metrics.failed(Failure.DEADLINE)
for n in range(3):
    metrics.token_times.add(1e9, 1)  # before its time: the first bucket
metrics.catch_up({"messages_late": 2, "decode_nodes_lost": 1})
metrics.call_began()
"""
SHOW = """
import sys
from gateway.shared_counts import registry_of_all
from prometheus_client import generate_latest
sys.stdout.write(generate_latest(registry_of_all(metrics.registry)).decode())
"""


def test_several_gateways_count_as_one(tmp_path: Path) -> None:
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    def run(code: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout

    run(WORKER)
    found = families(run(WORKER + SHOW))

    def value(family: str, name: str = "_total", **labels: str) -> float:
        (one,) = (s for s in found[family].samples if s.name == family + name and s.labels == labels)
        return one.value

    assert value("baton_requests", outcome="success") == 2
    assert value("baton_failures", kind="deadline") == 2
    assert value("baton_failures", kind="decode_lost") == 2
    assert value("baton_failures", kind="client_gone") == 0
    assert value("baton_gateway_messages_late") == 4
    assert value("baton_inter_token_latency_seconds", "_bucket", le="0.001") == 6
    assert value("baton_inter_token_latency_seconds", "_count") == 6
    assert value("baton_requests_running", "") == 0  # of the one that is gone; the other's call ended first
    assert found["baton_inter_token_latency_seconds"].type == "histogram"
    assert found["baton_requests"].documentation == "Generating calls, by how they ended."
