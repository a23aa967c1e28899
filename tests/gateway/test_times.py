"""/metrics tells where the time of answers went, once for each that a node ended."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gateway.fake import Script
from tests.gateway.conftest import MODEL, LiveServer

COMPLETION = {"model": MODEL, "prompt": "the quick", "max_tokens": 4}


def scrape(client: httpx.Client) -> dict[str, float]:
    """Return the sums and counts, by name and stage."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        if family.type == "summary"
        for sample in family.samples
    }


def test_times_are_counted_once_an_answer(server: LiveServer, client: httpx.Client) -> None:
    before = scrape(client)
    for body in (COMPLETION, COMPLETION | {"prompt": ["a", "b"]}, COMPLETION | {"max_tokens": 1}):
        assert client.post("/v1/completions", json=body).status_code == 200
    with client.stream("POST", "/v1/completions", json=COMPLETION | {"stream": True}) as stream:
        stream.read()
    after = scrape(client)
    gained = {name: after[name] - before[name] for name in after}
    for place, stage in enumerate(("queue", "prefill", "transfer", "first_decode"), 1):  # TIMINGS of the fake
        assert gained[f"baton_request_stage_seconds_count {stage}"] == 5
        assert abs(gained[f"baton_request_stage_seconds_sum {stage}"] - 5 * place / 1000) < 1e-9
    assert gained["baton_time_to_first_token_seconds_count"] == 5
    assert gained["baton_request_time_per_output_token_seconds_count"] == 4
    assert gained["baton_time_to_first_token_seconds_sum"] > 0


def test_what_a_node_did_not_end_is_not_counted(server: LiveServer, client: httpx.Client) -> None:
    before = scrape(client)
    server.nodes.script = Script(fail_after=2)
    assert client.post("/v1/completions", json=COMPLETION).status_code == 503
    server.nodes.script = Script()
    answer = client.post("/v1/completions", json=COMPLETION | {"stop": " "}).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert scrape(client) == before
