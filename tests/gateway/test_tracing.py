"""Spans of calls: their shape and times, where they go, and that nothing of it can disturb a request."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from common.config import GatewayConfig
from common.errors import ConfigError
from gateway.fake import Script
from gateway.live_requests import RequestRecord, gateway_id
from gateway.spans import SaysOnce, Spans
from gateway.text import TextPipeline
from gateway.timeline import GatewayStamps
from gateway.tracing import Tracing, open_tracing
from tests.gateway.conftest import MODEL, LiveServer
from tests.gateway.live import live_gateway
from tests.otlp import receiver, spans_of

COMPLETION = {"model": MODEL, "prompt": "the quick", "max_tokens": 4, "temperature": 0.5, "timings": True}
STAGES = ["tokenize", "submit", "queue", "prefill", "transfer", "send", "decode"]
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}


@contextmanager
def served(text: TextPipeline, tracing: Tracing | None) -> Iterator[tuple[httpx.Client, LiveServer]]:
    """Serve with it; what it has to send was sent afterwards."""
    with (
        live_gateway(text, GatewayConfig(), tracing=tracing) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        yield client, server
    if tracing is not None:
        tracing.close()


class Traced:
    """Spans that stay in this process."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Spans(SimpleSpanProcessor(self.exporter))

    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans() if span.name == name]


def id_of(span: ReadableSpan | None) -> int:
    assert span is not None
    assert span.context is not None
    return span.context.span_id


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def us(ns: int | None, since: int | None) -> float:
    assert ns is not None
    assert since is not None
    return (ns - since) / 1000


def test_the_spans_of_a_call_are_its_stages(text: TextPipeline) -> None:
    traced = Traced()
    with served(text, traced.tracing) as (client, _):
        answer = client.post("/v1/completions", json=COMPLETION)
    times = answer.json()["timings"]
    (root,) = traced.named("llm_request")
    assert (root.kind, root.parent, root.status.status_code) == (SpanKind.SERVER, None, StatusCode.UNSET)
    stages = [span for span in traced.spans() if span.parent and span.parent.span_id == id_of(root)]
    assert [span.name for span in stages] == STAGES
    at_us = 0.0
    for span in stages:
        assert us(span.start_time, root.start_time) == at_us
        at_us += round(times[f"{span.name}_ms"] * 1000)
        assert us(span.end_time, root.start_time) == at_us
    assert root.end_time == stages[-1].end_time
    chunks = traced.named("chunk")
    (prefill,) = traced.named("prefill")
    assert [parent_of(span) for span in chunks] == [id_of(prefill)] * 2
    told = times["stamps_ms"]
    ends = [us(span.end_time, root.start_time) for span in chunks]
    assert ends == [round(ms * 1000) for ms in told["chunks"]]
    assert (chunks[0].start_time, chunks[1].start_time) == (prefill.start_time, chunks[0].end_time)
    attributes = dict(root.attributes or {})
    assert attributes["gen_ai.request.id"] == answer.json()["id"]
    assert attributes["gen_ai.usage.completion_tokens"] == 4
    assert attributes["gen_ai.usage.prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.response.model"] == MODEL
    for name, ms in (("time_to_first_token", "ttft_ms"), ("e2e", "total_ms"), ("time_in_queue", "queue_ms")):
        assert attributes[f"gen_ai.latency.{name}"] == pytest.approx(times[ms] / 1000)
    assert (attributes["baton.decode_node"], attributes["baton.outcome"]) == ("decode-1", "success")
    resource = dict(root.resource.attributes)
    assert (resource["service.name"], resource["service.instance.id"]) == ("baton", gateway_id())


def test_several_choices_have_a_span_each(text: TextPipeline) -> None:
    traced = Traced()
    with served(text, traced.tracing) as (client, _):
        client.post("/v1/completions", json=COMPLETION | {"n": 3})
    (root,) = traced.named("llm_request")
    choices = traced.named("choice")
    assert [parent_of(span) for span in choices] == [id_of(root)] * 3
    parents = Counter(parent_of(span) for span in traced.spans() if span.name in STAGES)
    assert parents == {id_of(span): 7 for span in choices}
    assert dict(root.attributes or {})["gen_ai.request.n"] == 3


def test_a_trace_is_continued_and_who_does_not_sample_gets_nothing(text: TextPipeline) -> None:
    traced = Traced()
    with served(text, traced.tracing) as (client, _):
        client.post("/v1/completions", json=COMPLETION, headers=TRACEPARENT)
        client.post("/v1/completions", json=COMPLETION, headers=UNSAMPLED)
        client.post("/v1/completions", json=COMPLETION, headers={"traceparent": "00-nonsense"})
    continued, own = traced.named("llm_request")
    assert continued.context is not None
    assert continued.context.trace_id == int(TRACE_ID, 16)
    assert parent_of(continued) == int(PARENT_ID, 16)
    assert own.parent is None


def test_failures_are_errors_where_they_are_the_servers(text: TextPipeline) -> None:
    traced = Traced()
    with served(text, traced.tracing) as (client, server):
        assert client.post("/v1/completions", json={"model": MODEL}).status_code == 400
        server.nodes.script = Script(fail_after=2)
        assert client.post("/v1/completions", json=COMPLETION).status_code == 503
    wrong, failed = traced.named("llm_request")
    assert wrong.status.status_code is StatusCode.UNSET
    assert (failed.status.status_code, failed.status.description) == (
        StatusCode.ERROR,
        "the decode node died",
    )
    assert [span.name for span in traced.spans() if parent_of(span) == id_of(wrong)] == []


class Broken(SpanExporter):
    """Does to each batch what is next: True sends it, False does not, an exception is raised."""

    def __init__(self, *does: bool | Exception) -> None:
        self._does = list(does)

    def export(self, spans: Any) -> SpanExportResult:
        does = self._does.pop(0)
        if isinstance(does, Exception):
            raise does
        return SpanExportResult.SUCCESS if does else SpanExportResult.FAILURE


def test_an_exporter_that_fails_is_logged_once_until_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.gateway")
    exporter = SaysOnce(Broken(False, ValueError("no"), False, True, True, ValueError("no route")))
    for _ in range(6):
        exporter.export(())
    said = [record.message.partition(",")[0].partition(":")[0] for record in caplog.records]
    assert said == ["traces cannot be exported", "traces are exported again", "traces cannot be exported"]
    assert "no route" in caplog.records[-1].message
    exporter.shutdown()


def test_a_bug_in_tracing_costs_no_answer(text: TextPipeline, caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(SimpleSpanProcessor):
        def on_start(self, *_: Any) -> None:
            raise ValueError("a bug")

    with served(text, Spans(Faulty(InMemorySpanExporter()))) as (client, _):
        for _ in range(3):
            assert client.post("/v1/completions", json=COMPLETION).status_code == 200
    assert sum("could not be traced" in record.message for record in caplog.records) == 1


def test_more_than_can_be_traced_is_left_out(
    text: TextPipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.spans.MOST_DUE", 2)
    traced = Traced()
    with served(text, traced.tracing) as (client, _):
        for num in (3, 2, 3):
            assert client.post("/v1/completions", json=COMPLETION | {"n": num}).status_code == 200
    assert len(traced.named("llm_request")) == 3
    assert len(traced.named("choice")) == 2
    assert sum("than can be traced" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(("close_s", "made"), [(60.0, 3), (0.0, 0)])
def test_the_end_does_not_wait_for_all_that_is_left(
    monkeypatch: pytest.MonkeyPatch, close_s: float, made: int
) -> None:
    monkeypatch.setattr("gateway.spans.CLOSE_S", close_s)
    traced = Traced()
    stamps = GatewayStamps(1.0, 2.0, 3.0, 4.0, 5.0)
    records = [RequestRecord("cmpl-1", i, "/v1/completions", stamps) for i in range(3)]

    async def end_at_once() -> None:
        traced.tracing.add(records, MODEL, None, ())
        traced.tracing.close()

    asyncio.run(end_at_once())
    assert (len(traced.named("llm_request")), len(traced.named("choice"))) == (1, made)


# Over HTTP ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["option", "variable of traces", "variable of all"])
def test_spans_reach_a_receiver(text: TextPipeline, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    with receiver() as (url, requests):
        if by != "option":
            name = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" if "traces" in by else "OTEL_EXPORTER_OTLP_ENDPOINT"
            monkeypatch.setenv(name, f"{url}/own" if "traces" in by else url)
        tracing = open_tracing(f"{url}/own" if by == "option" else None)
        with served(text, tracing) as (client, _):
            client.post("/v1/completions", json=COMPLETION)
        assert {path for path, _ in requests} == {"/v1/traces" if by == "variable of all" else "/own"}
    parts = [part for _, told in requests for part in told.resource_spans]
    assert Counter(span.name for span in spans_of(requests)) == Counter(
        ["llm_request", *STAGES, "chunk", "chunk"]
    )
    resource = {each.key: each.value.string_value for each in parts[0].resource.attributes}
    assert resource["service.name"] == "ours"


def test_a_receiver_that_is_not_there_costs_nothing_but_a_line(
    text: TextPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with served(text, open_tracing(f"http://127.0.0.1:{port}/v1/traces")) as (client, _):
        for _ in range(3):
            assert client.post("/v1/completions", json=COMPLETION).status_code == 200
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in said] == ["baton.gateway"]
    assert "cannot be exported" in said[0].message


# Whether at all -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": " "},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nobody_asked(environ: dict[str, str]) -> None:
    assert open_tracing(None, environ) is None


def test_what_cannot_be_done_is_an_error_where_the_option_asks(caplog: pytest.LogCaptureFixture) -> None:
    grpc = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    with pytest.raises(ConfigError, match="grpc"):
        open_tracing("http://x:4317", grpc)
    with pytest.raises(ConfigError, match="http://"):
        open_tracing("localhost:4318", {})
    assert not caplog.records
    assert open_tracing(None, grpc) is None
    assert "grpc" in caplog.text


def test_what_the_packages_refuse_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many")
    with pytest.raises(ConfigError, match="OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"):
        open_tracing("http://x:4318/v1/traces", {})
    assert open_tracing(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}) is None
    assert "no traces: OpenTelemetry refuses its settings" in caplog.text


def test_without_the_packages_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "gateway.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install \"baton-serve\[otel\]\""):
        open_tracing("http://x:4318/v1/traces", {})
    assert open_tracing(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}) is None
    assert "baton-serve[otel]" in caplog.text
