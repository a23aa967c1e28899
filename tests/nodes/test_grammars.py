"""Requests whose grammar is being compiled: they hold nothing, hold up nobody, and end as all others do."""

from __future__ import annotations

from typing import Any

import pytest

from common.messages import Submit, int32s
from common.request import FinishReason, Grammar, GrammarKind, SampledToken, SamplingParams
from decode_node.entry import FailedOut, RefusedOut, RequestKey
from decode_node.scheduler import DecodeScheduler
from tests.nodes.test_decode_scheduler import IDLE, arrive, prebuild, scheduler, submit, tokens_of
from tests.nodes.test_prefill_scheduler import drawn, prefill
from tests.nodes.test_prefill_scheduler import scheduler as prefill_scheduler

GRAMMAR = Grammar(GrammarKind.REGEX, "a+")


def refusals(s: DecodeScheduler) -> list[tuple[int, int, str | None, str | None]]:
    return [(o.key.request_id, o.status, o.code, o.param) for o in s.out if isinstance(o, RefusedOut)]


def test_it_waits_for_its_grammar_and_others_go_ahead() -> None:
    s = scheduler()
    key = submit(s, 1, grammar=GRAMMAR)
    assert s.compiling() == [(key, GRAMMAR)]
    assert s.admit(IDLE) is None
    other = submit(s, 2)
    arrive(s, 8)
    assert tokens_of(s, other)
    assert s.keys_of(1) == [key, other], "the gateway is told that it is here"
    s.compiled(key, "compiled")
    assert s.compiling() == []
    grant = s.admit(IDLE)
    assert grant is not None
    assert (grant.entry.key, grant.entry.request.compiled_grammar) == (key, "compiled")
    s.granted(grant, 9, 1.0)
    s.check_invariants()


def test_what_cannot_be_compiled_is_refused() -> None:
    s = scheduler()
    s.not_compiled(submit(s, 1, grammar=GRAMMAR), 400, "no grammar")
    s.not_compiled(submit(s, 2, grammar=GRAMMAR, num_choices=2), 503, "busy")
    assert refusals(s) == [
        (1, 400, "invalid_grammar", None),
        (2, 503, None, None),
        (3, 503, None, None),
    ]
    assert [o.retry_after_s for o in s.out if isinstance(o, RefusedOut)] == [None, 1, 1]
    assert s.is_idle
    s.check_invariants()


@pytest.mark.parametrize(
    ("fields", "param"), [({"min_tokens": 1}, "min_tokens"), ({"ignore_eos": True}, "ignore_eos")]
)
def test_a_grammar_alone_decides_when_an_answer_ends(fields: dict[str, Any], param: str) -> None:
    s = scheduler()
    submit(s, 1, grammar=GRAMMAR, **fields)
    assert refusals(s) == [(1, 400, None, param)]


def test_they_are_bounded_by_themselves_and_in_the_queue() -> None:
    s = scheduler(max_queued=2)
    keys = [submit(s, i, grammar=GRAMMAR) for i in (1, 2, 3)]
    assert refusals(s) == [(3, 429, None, None)]
    submit(s, 4)
    submit(s, 5)
    for key in keys[:2]:
        s.compiled(key, "compiled")  # meanwhile the queue is full
    assert refusals(s)[1:] == [(1, 429, None, None), (2, 429, None, None)]
    s.check_invariants()


@pytest.mark.parametrize("end", ["abort", "deadline", "drain"])
def test_it_ends_while_its_grammar_is_compiled(end: str) -> None:
    s = scheduler()
    key = RequestKey(1, 1)
    params = SamplingParams(max_tokens=4, grammar=GRAMMAR)
    s.submit(key, Submit(1, params, int32s([5]), timeout_ms=1000), 0.0, longest_prompt=64)
    match end:
        case "abort":
            assert s.abort(key) is None
            assert s.out == []
        case "deadline":
            assert s.deadline() == 1.0
            assert s.expire(1.0) == []
            assert [(type(o), o.status) for o in s.out if isinstance(o, FailedOut)] == [(FailedOut, 504)]
        case _:
            s.drain()
            assert refusals(s) == [(1, 503, "node_draining", None)]
    assert s.compiling() == []
    assert s.is_idle
    assert s.deadline() is None
    s.check_invariants()


def test_a_token_that_the_grammar_does_not_have_ends_its_request_alone() -> None:
    s = scheduler()
    key = submit(s, 1, grammar=GRAMMAR)
    s.compiled(key, "compiled")
    arrive(s, 7)
    other = submit(s, 2)
    arrive(s, 8)
    prebuild(s)
    step = s.next_step(3.0)
    assert step is not None
    s.process(step, [SampledToken(11, error="token 11 is not in the grammar"), SampledToken(12)], 4.0)
    assert FailedOut(key, 500, "token 11 is not in the grammar") in s.out
    assert tokens_of(s, key) == [(0, 9, None)], "it is not told"
    assert tokens_of(s, other)[-1] == (1, 12, None)
    s.check_invariants()


def test_a_transfer_waits_for_its_grammar_and_others_go_ahead() -> None:
    s = prefill_scheduler()
    assert s.submit("a", prefill(6, grammar=GRAMMAR)) is None
    assert s.submit("b", prefill(6)) is None
    assert s.compiling() == [("a", GRAMMAR)]
    assert (len(s.admit()), s.num_queued, s.num_computing) == (1, 0, 1)
    s.compiled("a", "compiled")
    (request,) = s.admit()
    assert request.compiled_grammar == "compiled"
    step = s.next_step(1.0)
    assert step is not None
    (_, first), *_ = s.process(step, drawn(7, 8)[: len(step.batch.sample_rows)], 2.0)
    assert first.choices[0].finish is not FinishReason.STOP


@pytest.mark.parametrize("end", ["stop", "end"])
def test_a_transfer_ends_while_its_grammar_is_compiled(end: str) -> None:
    s = prefill_scheduler()
    s.submit("a", prefill(6, grammar=GRAMMAR))
    getattr(s, end)("a")
    s.end("a")
    assert (s.compiling(), s.num_queued) == ([], 0)
    assert s.ledger().free == s.ledger().total
