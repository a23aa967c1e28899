"""A receiver of OpenTelemetry traces over HTTP, and what it was told."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Told = tuple[str, ExportTraceServiceRequest]  # with the path


class Receiver(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    requests: list[Told]

    def do_POST(self) -> None:
        told = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.path, told))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""


@contextmanager
def receiver() -> Iterator[tuple[str, list[Told]]]:
    """Give the address of one, and what it was told so far."""
    handler = type("_Receiver", (Receiver,), {"requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler.requests
        server.shutdown()
        thread.join()


def spans_of(requests: Sequence[Told]) -> list[Span]:
    """Return all spans."""
    return [
        span
        for _, told in requests
        for part in told.resource_spans
        for scope in part.scope_spans
        for span in scope.spans
    ]
