"""The OpenAPI page is true: what it allows is answered as it says, what it forbids is refused as it says.

schemathesis makes requests from the page, good and bad ones, and holds the answers against it: no 5xx, no
status, content type or body that is not documented.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.gateway.conftest import WAIT_S, LiveServer


def no_server_error(context: Any, response: Any, case: Any) -> None:
    """Check for 5xx; who asks for less time than it takes is told so."""
    asked = isinstance(case.body, dict) and case.body.get("timeout") is not None
    assert response.status_code < 500 or (response.status_code == 504 and asked), response.text


CHECKS = [
    no_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
OPERATIONS = [
    ("POST", "/v1/completions", 150),
    ("POST", "/v1/chat/completions", 150),
    ("GET", "/v1/models", 5),
    ("GET", "/v1/models/{model}", 30),
    ("GET", "/health", 5),
    ("GET", "/ready", 5),
    ("GET", "/metrics", 5),
    ("GET", "/debug/kv", 5),
    ("GET", "/debug/requests", 5),
]


@pytest.fixture
def page(server: LiveServer) -> Any:
    """The page of the running gateway."""
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_operation_is_here(page: Any) -> None:
    paths = page.raw_schema["paths"]
    assert {(method.upper(), path) for path in paths for method in paths[path]} == {o[:2] for o in OPERATIONS}


@pytest.mark.parametrize(("method", "path", "examples"), OPERATIONS)
def test_answers_are_as_the_page_says(page: Any, method: str, path: str, examples: int) -> None:
    statuses: Counter[int] = Counter()
    operation = page[path][method]
    cases = st.one_of(
        operation.as_strategy(generation_mode=mode)
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    )

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def check(case: schemathesis.Case) -> None:
        response = case.call_and_validate(checks=CHECKS, timeout=WAIT_S)
        statuses[response.status_code] += 1

    check()
    if method == "POST":  # good and bad requests, both in numbers
        assert min(statuses[200], statuses[400]) > examples / 12, statuses
