"""A scrape of real nodes: true to what they did, and not held up by one that is silent or gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.exposition import exposition
from gateway.metrics import RequestMetrics
from tests.faults.world import TURN_S, P, World, world
from tests.faults.world_states import LONG

WITHIN_S = 2.0


def scrape(w: World) -> tuple[dict[str, Metric], float]:
    """Return the families, and how long it took by the world's clock."""
    since_s = w.now
    text = w.start(exposition(RequestMetrics(), w.client))
    w.until(text.done, 2 * WITHIN_S)
    families = text_string_to_metric_families(text.result().decode())
    return {family.name: family for family in families}, w.now - since_s


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    """Return the sum of the series that have these labels."""
    samples = families[name].samples
    found = [s.value for s in samples if labels.items() <= s.labels.items() and "le" not in s.labels]
    assert found, (name, labels)
    return sum(found)


def test_what_nodes_did_is_shown(tiny_model: Path) -> None:
    with world(tiny_model) as w:
        w.until_ended(w.ask(LONG, 8))
        w.until(w.is_clean)
        w.two_statuses()
        found, _ = scrape(w)
        for role, node in (("decode", w.d), ("prefill", w.p)):
            pages = w.d._engine.layout.pages_for(len(LONG))
            moved_bytes = pages * node._engine.layout.page_bytes
            assert value(found, "baton_node_transfer_bytes", role=role) == moved_bytes
            assert value(found, "baton_node_transfers_started", role=role) == 1
            assert value(found, "baton_node_requests_running", role=role) == 0
        assert value(found, "baton_node_tokens_computed", role="prefill") == len(LONG)
        assert value(found, "baton_node_tokens_computed", role="decode") == 0
        assert value(found, "baton_node_requests_prebuilt") == 1
        decode_steps = found["baton_node_step_rows"].samples
        sums = {
            s.name: s.value for s in decode_steps if s.labels["role"] == "decode" and "le" not in s.labels
        }
        assert sums == {
            "baton_node_step_rows_count": 7,
            "baton_node_step_rows_sum": 7,
        }  # the 8th token is P's
        assert (value(found, "baton_nodes"), value(found, "baton_ready")) == (2, 1)


def silent(w: World) -> None:
    """Its process is stopped."""
    w.held.add(P)


def gone(w: World) -> None:
    """Its process is gone, and nobody knows yet."""
    w.held.add(P)
    w.lines[1].cut()


@pytest.mark.parametrize("what_p_is", [silent, gone])
def test_a_node_that_does_not_answer_is_left_out(
    tiny_model: Path, what_p_is: Callable[[World], None]
) -> None:
    with world(tiny_model) as w:
        what_p_is(w)
        found, took_s = scrape(w)
        assert took_s <= WITHIN_S + TURN_S
        assert (value(found, "baton_nodes"), value(found, "baton_nodes_missing")) == (1, 1)
        assert {sample.labels["node"] for sample in found["baton_node_steps"].samples} == {"decode-0"}
