"""Timings of real servers: all stages on one clock, against what the client saw of the same request."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from conformance.server import Server as FaultyServer
from tests.otlp import receiver, spans_of
from tests.system.client import Client
from tests.system.server import running, temporary_folder
from tests.timings import ENDS, assert_adds_up
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.system

NUM_REQUESTS = 30
LENGTHS = (1, 16, 17, 120, 300)


def bodies(model: str) -> Iterator[dict[str, Any]]:
    draw = random.Random(3)
    for i in range(NUM_REQUESTS):
        prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(LENGTHS[i % len(LENGTHS)])]
        tokens = draw.choice((1, 2, 9))
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        yield body | {"timings": True, "stream": i % 2 == 0}


def ask(http: httpx.Client, body: dict[str, Any]) -> tuple[dict[str, Any], float | None, float]:
    """Return timings, and the milliseconds until the first event (of a stream) and the end."""
    begin_s = time.monotonic()
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        if not body["stream"]:
            timings = json.loads(response.read())["timings"]
            return timings, None, (time.monotonic() - begin_s) * 1000
        first_ms, timings = None, None
        for line in response.iter_lines():
            if line.startswith("data: {"):
                first_ms = first_ms or (time.monotonic() - begin_s) * 1000
                timings = json.loads(line.removeprefix("data: ")).get("timings") or timings
    assert timings is not None
    return timings, first_ms, (time.monotonic() - begin_s) * 1000


def check_requests(client: Client) -> list[dict[str, Any]]:
    """Ask, and check what holds wherever prompts are computed; returns the timings."""
    found = []
    with httpx.Client(base_url=client.url, timeout=60, trust_env=False) as http:
        for body in bodies(client.model):
            timings, first_ms, whole_ms = ask(http, body)
            assert_adds_up(timings)
            assert timings["total_ms"] <= whole_ms
            if first_ms is not None:
                assert timings["ttft_ms"] <= first_ms
            # Not moved into order: they were in order.
            stages = ("tokenize", "submit", "queue", "prefill", "send")
            assert all(timings[f"{stage}_ms"] > 0 for stage in stages), timings
            stamps = timings["stamps_ms"]
            assert (stamps["second_token"] is None) == (body["max_tokens"] == 1)
            assert timings["decode_node"] == "decode-0"
            found.append(timings)
        told = http.get("/debug/requests").json()["requests"][:NUM_REQUESTS]
    assert [one["timings"] for one in reversed(told)] == found
    return found


def test_a_pair_of_nodes(pair: Client) -> None:
    for timings in check_requests(pair):
        assert timings["prefill_node"] == "prefill-0"
        assert timings["transfer_ms"] > 0
        stamps = timings["stamps_ms"]
        assert stamps["committed"] is not None
        assert (stamps["prebuilt"] is None) == (stamps["second_token"] is None)


def test_one_node_that_does_both(colocated: Client) -> None:
    for timings in check_requests(colocated):
        assert timings["prefill_node"] is None
        assert timings["stamps_ms"]["committed"] is None


def test_a_prompt_has_a_stamp_for_each_chunk(model: Path) -> None:
    with running(model, "--prefill-budget", "64") as server:
        client = Client(server.url, server.model)
        with httpx.Client(base_url=client.url, timeout=60, trust_env=False) as http:
            body = {"model": client.model, "prompt": [7] * 300, "max_tokens": 3, "timings": True}
            timings, _, _ = ask(http, body | {"stream": True})
            chunks = timings["stamps_ms"]["chunks"]
            assert len(chunks) == 5
            assert len(set(chunks)) == 5
            assert_adds_up(timings)


def test_what_was_tried_again_has_the_stamps_of_the_last_time(model: Path) -> None:
    with temporary_folder() as folder:
        server = FaultyServer(folder, model, ("--prefill", "2", "--decode", "2"))
        try:
            server.wait_ready()
            with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
                body = {"model": server.model, "prompt": [7] * 40, "max_tokens": 3, "timings": True}
                # The first decode node never hears of it; a prefill node cannot send its pages.
                for rule in ("gateway/drop:Submit", "prefill/fail:plane"):
                    server.set_faults(rule)
                    timings, first_ms, _ = ask(http, body | {"stream": True})
                    assert_adds_up(timings)
                    assert first_ms is not None
                    assert timings["ttft_ms"] <= first_ms
                    if "Submit" in rule:  # found out by two Status messages
                        assert max(ENDS, key=lambda name: timings[f"{name}_ms"]) == "submit", timings
                counted = http.get("/metrics").text
                assert "\nbaton_gateway_requests_retried_total 1.0\n" in counted
                retried = re.findall(r"baton_node_transfers_retried_total\{.*\} (\S+)", counted)
                assert sum(map(float, retried)) >= 1  # once for each prefill node that has it
        finally:
            server.process.kill()


def test_spans_of_a_server_that_ends_are_sent(model: Path) -> None:
    with receiver() as (url, requests):
        with running(model, "--otlp-traces-endpoint", f"{url}/v1/traces") as server:
            client = Client(server.url, server.model)
            with httpx.Client(base_url=client.url, timeout=60, trust_env=False) as http:
                body = {"model": client.model, "prompt": [7] * 20, "max_tokens": 3, "timings": True}
                timings, _, _ = ask(http, body | {"stream": False})
            server.stop(signal.SIGTERM)
        spans = {span.name: span for span in spans_of(requests)}
    root, prefill = spans["llm_request"], spans["prefill"]
    assert (root.end_time_unix_nano - root.start_time_unix_nano) / 1e6 == pytest.approx(timings["total_ms"])
    took_ms = (prefill.end_time_unix_nano - prefill.start_time_unix_nano) / 1e6
    assert took_ms == pytest.approx(timings["prefill_ms"])
    assert prefill.parent_span_id == root.span_id
