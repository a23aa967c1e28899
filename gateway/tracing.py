"""Whether requests are traced with OpenTelemetry, and to where: by the option, or by its standard variables.

The packages are an extra (`otel`); they are imported only where they are used. What a span looks like is
`spans.py`'s.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from common.errors import ConfigError
from common.request import SamplingParams

if TYPE_CHECKING:
    from gateway.live_requests import RequestRecord

log = logging.getLogger("baton.gateway")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_INSTALL = 'needs packages that are not here: pip install "baton-serve[otel]"'


class Tracing(Protocol):
    """Makes spans of calls that are over."""

    def add(
        self,
        records: Sequence[RequestRecord],
        model_name: str,
        sampling: SamplingParams | None,
        headers: Iterable[tuple[bytes, bytes]],
    ) -> None:
        """Take a call over; it must not raise, and returns soon.

        Args:
            records: of its choices, at least one.
            sampling: None where the call was not read so far.
            headers: of its HTTP request; a `traceparent` among them is what the spans belong to.
        """
        ...

    def close(self) -> None:
        """Send what is left, within about a second."""
        ...


def open_tracing(endpoint: str | None, environ: Mapping[str, str] = os.environ) -> Tracing | None:
    """Return what traces requests; None where nobody asked for it.

    Args:
        endpoint: URL that takes OTLP over HTTP; without it the variables of OpenTelemetry decide. Those may
            be there for other programs, so what they ask for and cannot be done is said, and no error.

    Raises:
        ConfigError: tracing to `endpoint` cannot be done.
    """
    if endpoint is None and not _is_asked_for(environ):
        return None
    try:
        return _open(endpoint, environ)
    except ConfigError as error:
        if endpoint is not None:
            raise
        log.warning("no traces: %s", error)
        return None


def _open(endpoint: str | None, environ: Mapping[str, str]) -> Tracing:
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp-traces-endpoint {endpoint}: it begins with neither http:// nor https://")
    protocol = _first(environ, _PROTOCOLS) or _HTTP
    if protocol != _HTTP:
        raise ConfigError(f"traces go out as {_HTTP}, and the environment asks for {protocol}")
    try:
        spans: Any = import_module("gateway.spans")
        tracing: Tracing = spans.open_spans(endpoint)
    except ImportError:
        by = "--otlp-traces-endpoint" if endpoint else "exporting traces, which OTEL_EXPORTER_* ask for,"
        raise ConfigError(f"{by} {_INSTALL}") from None
    except ValueError as error:  # the packages read other OTEL_* variables, some as they are imported
        raise ConfigError(f"OpenTelemetry refuses its settings: {error}") from error
    return tracing


def _is_asked_for(environ: Mapping[str, str]) -> bool:
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if "otlp" not in environ.get("OTEL_TRACES_EXPORTER", "otlp").split(","):
        return False
    return _first(environ, _ENDPOINTS) is not None


def _first(environ: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((value for name in names if (value := environ.get(name, "").strip())), None)
