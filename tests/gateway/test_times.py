"""/metrics tells where the time of answers went, once for each that came to its end."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.fake import Script
from gateway.timeline import FIRST_TOKEN_STAGES, STAGES
from tests.gateway.conftest import MODEL, LiveServer

TIMES = (
    "baton_request_stage_seconds",
    "baton_time_to_first_token_seconds",
    "baton_request_time_per_output_token_seconds",
    "baton_e2e_request_latency_seconds",
)
COMPLETION = {"model": MODEL, "prompt": "the quick", "max_tokens": 4}


def scrape(client: httpx.Client) -> dict[str, float]:
    """Return sums and counts, by name and stage, once all calls are over: answers come a moment before."""
    while "baton_requests_running 0.0" not in (text := client.get("/metrics").text):
        continue
    families = text_string_to_metric_families(text)
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        if family.name in TIMES
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def test_times_are_counted_once_an_answer(server: LiveServer, client: httpx.Client) -> None:
    before = scrape(client)
    for body in (COMPLETION, COMPLETION | {"prompt": ["a", "b"]}, COMPLETION | {"max_tokens": 1}):
        assert client.post("/v1/completions", json=body).status_code == 200
    with client.stream("POST", "/v1/completions", json=COMPLETION | {"stream": True}) as stream:
        stream.read()
    after = scrape(client)
    gained = {name: after[name] - before[name] for name in after}
    for stage in STAGES:
        assert gained[f"baton_request_stage_seconds_count {stage}"] == 5
    assert gained["baton_request_stage_seconds_count first_decode"] == 4
    assert gained["baton_time_to_first_token_seconds_count"] == 5
    in_stages = sum(gained[f"baton_request_stage_seconds_sum {stage}"] for stage in FIRST_TOKEN_STAGES)
    assert in_stages == pytest.approx(gained["baton_time_to_first_token_seconds_sum"])
    assert gained["baton_request_time_per_output_token_seconds_count"] == 4
    assert gained["baton_e2e_request_latency_seconds_count"] == 5
    whole_s = gained["baton_e2e_request_latency_seconds_sum"]
    assert whole_s > gained["baton_time_to_first_token_seconds_sum"] > 0


def test_what_failed_is_not_counted_and_what_a_stop_string_ended_is(
    server: LiveServer, client: httpx.Client
) -> None:
    before = scrape(client)
    server.nodes.script = Script(fail_after=2)
    assert client.post("/v1/completions", json=COMPLETION).status_code == 503
    assert scrape(client) == before
    server.nodes.script = Script()
    answer = client.post("/v1/completions", json=COMPLETION | {"stop": " "}).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    name = "baton_time_to_first_token_seconds_count"
    assert scrape(client)[name] == before[name] + 1
