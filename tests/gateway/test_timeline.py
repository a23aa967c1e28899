"""Stamps of strangers' clocks -> stages that add up, whatever the stamps are."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.nodes import NodeStamps
from gateway.timeline import FIRST_TOKEN_STAGES, STAMPS, GatewayStamps, timeline
from tests.timings import assert_adds_up, us

GATEWAY = GatewayStamps(100.0, 100.001, 100.002, 100.05, 100.2)
NODE = NodeStamps(
    "decode-0",
    "prefill-0",
    queued_s=100.003,
    granted_s=100.004,
    prefill_start_s=100.010,
    chunks_s=(100.020, 100.030),
    committed_s=100.031,
    arrived_s=100.040,
    prebuilt_s=100.041,
    second_token_s=100.060,
)
REQUIRED = ("queued_s", "prefill_start_s", "arrived_s")
ANY = st.floats(99, 101) | st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, -1e300])
NODES = st.builds(
    NodeStamps,
    st.just("decode-0"),
    st.none() | st.just("prefill-0"),
    *[st.none() | ANY] * 3,
    st.lists(ANY, max_size=4).map(tuple),
    *[st.none() | ANY] * 4,
)


def told(gateway: GatewayStamps, node: NodeStamps | None, now_s: float = 100.5) -> dict[str, Any]:
    return timeline(gateway, node, now_s).to_json()


def test_stages_are_what_lies_between_the_stamps() -> None:
    times = told(GATEWAY, NODE)
    assert [times[f"{stage}_ms"] for stage in FIRST_TOKEN_STAGES] == [2.0, 1.0, 7.0, 20.0, 10.0, 10.0]
    assert (times["ttft_ms"], times["decode_ms"], times["total_ms"]) == (50.0, 150.0, 200.0)
    assert times["first_decode_ms"] == 20.0
    assert (times["prefill_node"], times["decode_node"]) == ("prefill-0", "decode-0")
    assert tuple(times["stamps_ms"]) == STAMPS
    assert times["stamps_ms"]["chunks"] == [20.0, 30.0]
    assert times["stamps_ms"]["committed"] == 31.0
    assert_adds_up(times)


@given(
    own=st.tuples(*[st.floats(100, 101)] * 4).map(sorted),
    node=NODES,
)
def test_nothing_that_nodes_say_makes_stages_that_do_not_add_up(own: list[float], node: NodeStamps) -> None:
    tokenized_s, submitted_s, first_s, done_s = own
    times = timeline(GatewayStamps(100.0, tokenized_s, submitted_s, first_s, done_s), node, 102.0)
    stages = [times.stages_us[stage] for stage in FIRST_TOKEN_STAGES]
    assert all(us is not None and us >= 0 for us in stages)
    assert sum(us or 0 for us in stages) == times.ttft_us == round((first_s - 100) * 1e6)
    assert times.total_us == round((done_s - 100) * 1e6)
    if node.chunks_s and None not in [getattr(node, name) for name in REQUIRED]:
        assert_adds_up(times.to_json())


@given(node=NODES, now_s=st.floats(100.002, 101))
def test_what_lives_is_told_as_far_as_it_is(node: NodeStamps, now_s: float) -> None:
    times = told(replace(GATEWAY, first_token_s=None, done_s=None), node, now_s)
    assert [times[name] for name in ("ttft_ms", "decode_ms", "total_ms", "send_ms")] == [None] * 4
    stamps = [stamp for stamp in times["stamps_ms"].values() if isinstance(stamp, float)]
    assert all(0 <= stamp <= (now_s - 100) * 1000 + 0.001 for stamp in stamps)
    stages = [times[f"{stage}_ms"] for stage in FIRST_TOKEN_STAGES]
    known = [stage for stage in stages if stage is not None]
    assert stages == known + [None] * (6 - len(known))  # none is known behind one that is not
    ends = [times["stamps_ms"][name] for name in ("submitted", "queued", "prefill_start")]
    for (begin, end), stage in zip(pairwise(ends), stages[1:3], strict=True):
        if None not in (begin, end):
            assert us(stage) == us(end) - us(begin)


def test_what_failed_before_its_first_token_has_no_stages_behind_the_last_that_began() -> None:
    queued = NodeStamps("decode-0", queued_s=100.003)
    times = told(replace(GATEWAY, first_token_s=None), queued)
    assert (times["tokenize_ms"], times["submit_ms"]) == (2.0, 1.0)
    names = ("queue", "prefill", "transfer", "send", "decode", "ttft", "first_decode")
    assert [times[f"{name}_ms"] for name in names] == [None] * 7
    assert times["total_ms"] == 200.0
    unread = told(GatewayStamps(100.0, done_s=100.2), None)
    assert [value for name, value in unread.items() if name.endswith("_ms")][:9] == [None] * 9
    assert (unread["total_ms"], unread["decode_node"]) == (200.0, None)


def test_a_missing_stamp_gives_its_time_to_the_next_stage() -> None:
    times = told(GATEWAY, replace(NODE, queued_s=None, arrived_s=None))
    stages = [times[f"{stage}_ms"] for stage in FIRST_TOKEN_STAGES]
    assert stages == [2.0, 0.0, 8.0, 20.0, 0.0, 20.0]
    assert times["stamps_ms"]["queued"] is None
