"""Nodes whose pools differ: nothing waits for one that is gone, or is sent where it cannot be held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from common.peer import Peer
from decode_node.admission import PrefillLoad
from decode_node.entry import FailedOut
from gateway.router import Router
from tests.nodes.test_decode_scheduler import scheduler, submit
from tests.wire.hellos import DECODE

SMALL = (PrefillLoad("small", 0, 8, 8),)


def test_a_prompt_that_no_prefill_node_left_can_compute_does_not_block_those_behind_it() -> None:
    s = scheduler()
    long, short = submit(s, 1, prompt_len=20), submit(s, 2, prompt_len=5)
    s.prefill_lost(longest_prompt=8)  # the large one died
    assert [(out.key, out.status) for out in s.out if isinstance(out, FailedOut)] == [(long, 503)]
    grant = s.admit(SMALL)
    assert grant is not None
    assert (grant.entry.key, grant.node_id) == (short, "small")
    s.granted(grant, 7, 1.0)
    s.check_invariants()


def test_the_smallest_pool_of_a_decode_node_says_how_much_a_request_may_need() -> None:
    router = Router()
    assert router.capacity_tokens() is None
    for epoch, tokens in enumerate((4096, 512, 1024)):
        greeting = replace(DECODE, node_id=f"decode-{epoch}", capacity_tokens=tokens)
        router.add(Peer(greeting, epoch, "frames", cast(Any, None)), 0.0)
    assert router.capacity_tokens() == 512
