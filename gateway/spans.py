"""Calls that are over -> OpenTelemetry spans, made from their stamps, and sent by a thread of the SDK's.

    llm_request                  from the first bytes to the end; gen_ai.* attributes as vLLM names them
      tokenize ... send, decode  the stages of `timeline.py`
        chunk                    of `prefill`, each of the prompt's
    llm_request > choice > ...   where a call has several choices

One choice's spans are made in a turn of the event loop, so that streams get on. What cannot be sent is
dropped; that is logged once, and no request fails. Knows no HTTP but the two headers that say what a call is
a part of.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from common.request import SamplingParams
from gateway.live_requests import RequestRecord, gateway_id
from gateway.metrics import Outcome
from gateway.timeline import Timeline, timeline

log = logging.getLogger("baton.gateway")

CLOSE_S = 1.0
MOST_DUE = 4096  # choices whose spans are still to be made
MOST_CHUNKS = 100  # spans of one prompt
_PROPAGATOR = TraceContextTextMapPropagator()
_HEADERS = ("traceparent", "tracestate")
_EXPORTERS_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


def open_spans(endpoint: str | None) -> Spans:
    """Return what sends spans to an OTLP endpoint; None: where the standard variables say."""
    return Spans(BatchSpanProcessor(SaysOnce(OTLPSpanExporter(endpoint=endpoint))))


class SaysOnce(SpanExporter):
    """An exporter whose failures are logged once, until it succeeds again, and never raised."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._failed = False
        # It would tell of each batch, several times.
        logging.getLogger(_EXPORTERS_LOG).addFilter(self._take_from_log)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; called by the SDK's thread."""
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            self._say(str(error))
            return SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            self._say("the exporter gives no reason")
        elif self._failed:
            self._failed = False
            log.info("traces are exported again")
        return result

    def shutdown(self) -> None:
        """End."""
        self._exporter.shutdown()
        logging.getLogger(_EXPORTERS_LOG).removeFilter(self._take_from_log)

    def _take_from_log(self, record: logging.LogRecord) -> bool:
        self._say(record.getMessage())  # at the first attempt of several
        return False

    def _say(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            log.warning("traces cannot be exported, and are dropped: %s", reason)


@dataclass(frozen=True, slots=True)
class _Due:
    """A choice whose spans are still to be made."""

    parent: Context
    record: RequestRecord
    is_one_of_several: bool
    offset_ns: int  # of the clock of 1970 to that of the stamps


class Spans:
    """See `Tracing`; to be used in one event loop."""

    def __init__(self, processor: SpanProcessor) -> None:
        ours = {"service.name": "baton", "service.instance.id": gateway_id()}
        # What the environment says of this service comes last, so it wins.
        resource = Resource.create().merge(Resource(ours)).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer: Tracer = self._provider.get_tracer("baton")
        self._due: deque[_Due] = deque()
        self._has_failed = False
        self._has_dropped = False

    def add(
        self,
        records: Sequence[RequestRecord],
        model_name: str,
        sampling: SamplingParams | None,
        headers: Iterable[tuple[bytes, bytes]],
    ) -> None:
        """Make the call's own span now, and those below it soon."""
        try:
            self._add(records, model_name, sampling, headers)
        except Exception:  # our own bug; the call is over, and its client has its answer
            self._failed()

    def close(self) -> None:
        """Make and send what is left."""
        until_s = time.monotonic() + CLOSE_S / 2
        while self._due and time.monotonic() < until_s:
            self._make_next()
        # The SDK waits for an exporter that cannot be reached; we do not.
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_S)

    def _add(
        self,
        records: Sequence[RequestRecord],
        model_name: str,
        sampling: SamplingParams | None,
        headers: Iterable[tuple[bytes, bytes]],
    ) -> None:
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        parent = _PROPAGATOR.extract({name: carrier[name] for name in _HEADERS if name in carrier})
        offset_ns = time.time_ns() - time.monotonic_ns()
        begin_s = records[0].gateway.received_s
        end_s = max((r.gateway.done_s for r in records if r.gateway.done_s is not None), default=begin_s)
        begin_ns = _ns(begin_s, offset_ns)
        span = self._tracer.start_span("llm_request", parent, SpanKind.SERVER, start_time=begin_ns)
        if span.is_recording():  # else it is not sampled
            span.set_attributes(_attributes(records, model_name, sampling))
            if (error := records[0].error) is not None and records[0].outcome is Outcome.FAILED:
                span.set_status(Status(StatusCode.ERROR, error))
            below = set_span_in_context(span, parent)
            self._make_later([_Due(below, record, len(records) > 1, offset_ns) for record in records])
        span.end(begin_ns + round((end_s - begin_s) * 1e6) * 1000)  # as the stages' ends

    def _make_later(self, due: Sequence[_Due]) -> None:
        if len(self._due) + len(due) > MOST_DUE:
            if not self._has_dropped:
                self._has_dropped = True
                log.warning("more calls end than can be traced: stages of some are left out")
            return
        if not self._due:
            asyncio.get_running_loop().call_soon(self._make_soon)
        self._due += due

    def _make_soon(self) -> None:
        if self._due:
            self._make_next()
        if self._due:
            asyncio.get_running_loop().call_soon(self._make_soon)

    def _make_next(self) -> None:
        due = self._due.popleft()
        try:
            self._make(due)
        except Exception:
            self._failed()

    def _make(self, due: _Due) -> None:
        parent, record = due.parent, due.record
        times = timeline(record.gateway, record.node, record.gateway.received_s)
        begin_ns = _ns(record.gateway.received_s, due.offset_ns)

        def make(name: str, within: Context, begin_us: int, end_us: int) -> Context:
            span = self._tracer.start_span(name, within, start_time=begin_ns + begin_us * 1000)
            span.end(begin_ns + end_us * 1000)
            return set_span_in_context(span, within)

        if due.is_one_of_several:
            parent = make("choice", parent, 0, times.total_us or 0)
        at_us = 0
        for stage, us in times.stages_us.items():
            if us is None:
                return  # it ended before, and so are all behind it
            within = make(stage, parent, at_us, at_us + us)
            if stage == "prefill":
                for begin_us, end_us in pairwise([at_us, *times.chunks_us[:MOST_CHUNKS]]):
                    make("chunk", within, begin_us, end_us)
            at_us += us

    def _failed(self) -> None:
        if not self._has_failed:
            self._has_failed = True
            log.exception("a call could not be traced; others are not logged")


def _ns(at_s: float, offset_ns: int) -> int:
    """Return the time since 1970 of a stamp of time.monotonic()."""
    return round(at_s * 1e9) + offset_ns


def _attributes(
    records: Sequence[RequestRecord], model_name: str, sampling: SamplingParams | None
) -> dict[str, AttributeValue]:
    first = records[0]
    times = timeline(first.gateway, first.node, first.gateway.received_s)
    found: dict[str, AttributeValue | None] = {
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": first.call_id,
        "gen_ai.usage.num_sequences": len(records),
        "gen_ai.usage.prompt_tokens": first.prompt_tokens,
        "gen_ai.usage.completion_tokens": sum(record.output_tokens for record in records),
        "gen_ai.response.finish_reasons": [r.finish_reason for r in records if r.finish_reason is not None],
        "baton.outcome": None if first.outcome is None else first.outcome.value,
        "baton.decode_node": times.decode_node,
        "baton.prefill_node": times.prefill_node,
        **_latencies(times),
    }
    if sampling is not None:
        found |= {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.n": sampling.num_choices,
        }
    return {name: value for name, value in found.items() if value is not None}


def _latencies(times: Timeline) -> dict[str, AttributeValue | None]:
    """Return vLLM's names for parts of the time, in seconds."""
    stages = times.stages_us
    prefill, decode = stages["prefill"], stages["decode"]
    parts = {
        "time_in_queue": stages["queue"],
        "time_to_first_token": times.ttft_us,
        "e2e": times.total_us,
        "time_in_model_prefill": prefill,
        "time_in_model_decode": decode,
        "time_in_model_inference": None if prefill is None or decode is None else prefill + decode,
    }
    return {f"gen_ai.latency.{name}": None if us is None else us / 1e6 for name, us in parts.items()}
