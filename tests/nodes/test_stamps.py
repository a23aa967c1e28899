"""When a decode node did what for a request, as it tells the gateway: stamps of the first pass, in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.messages import Begun, Choice, Commit, Finish, Granted, Tokens
from common.request import FinishReason, PrefillStamps
from decode_node.entry import DecodeStep, RequestKey, StampsOut
from decode_node.outbox import messages_of
from decode_node.scheduler import DecodeScheduler
from tests.nodes.test_decode_scheduler import EOS, IDLE, commit, drawn, scheduler, submit

AT_P = PrefillStamps(3.0, (4.0, 5.0), 6.0)


def grant(s: DecodeScheduler, now: float, transfer_id: int | None = 7, nodes: Any = IDLE) -> None:
    granted = s.admit(nodes)
    assert granted is not None
    s.granted(granted, transfer_id, now)


def said(s: DecodeScheduler) -> list[Granted | Begun]:
    """Stamps that were told."""
    return [out.news for out in s.out if isinstance(out, StampsOut)]


def finishes(s: DecodeScheduler) -> list[Finish]:
    """What was told at the end of requests."""
    return [
        end for _, message, _ in messages_of(s.out) if isinstance(message, Tokens) for end in message.finished
    ]


def step(s: DecodeScheduler, now: float) -> DecodeStep:
    planned = s.next_step(now)
    assert planned is not None
    return planned


def prebuild(s: DecodeScheduler, now: float) -> None:
    prebuilt = s.take_prebuilt()
    assert prebuilt is not None
    s.process_prebuilt(prebuilt, now)


# A prompt that a prefill node computes ----------------------------------------------------------------------


def test_a_hand_over_and_a_second_token() -> None:
    s = scheduler()
    key = submit(s, 1, max_tokens=2)  # at 0
    grant(s, 1.0)
    granted = Granted((1,), "p0", queued_s=0.0, granted_s=1.0)
    assert said(s) == [granted]
    s.transfer_done(7, replace(commit(7, 9), stamps=AT_P), 7.0)
    assert said(s) == [granted, Begun(granted, AT_P, arrived_s=7.0)]
    prebuild(s, 8.0)
    s.process(step(s, 9.0), drawn(11), 10.0)
    assert finishes(s) == [Finish(key.request_id, FinishReason.LENGTH, prebuilt_s=8.0, second_token_s=10.0)]
    assert len(said(s)) == 2


def test_what_ends_with_its_first_token_is_never_prebuilt() -> None:
    s = scheduler()
    submit(s, 1)
    grant(s, 1.0)
    s.transfer_done(7, replace(commit(7, EOS, FinishReason.STOP), stamps=AT_P), 7.0)
    assert finishes(s) == [Finish(1, FinishReason.STOP)]


def test_of_a_transfer_that_is_tried_again_the_last_grant_counts() -> None:
    s = scheduler()
    submit(s, 1)
    grant(s, 1.0)
    s.transfer_gave_out(7, 503, "gone", retryable=True, can_prefill=True)
    s.transfer_released(7)
    grant(s, 2.0, 8, nodes=(replace(IDLE[0], node_id="p1"),))
    s.transfer_done(8, replace(commit(8, 9), stamps=AT_P), 7.0)
    last = Granted((1,), "p1", queued_s=0.0, granted_s=2.0)
    assert said(s) == [replace(last, prefill_node="p0", granted_s=1.0), last, Begun(last, AT_P, 7.0)]


def test_the_choices_of_a_prompt_have_its_stamps_once() -> None:
    s = scheduler()
    submit(s, 1, max_tokens=2, num_choices=3)
    s.abort(RequestKey(1, 2))  # this one is not wanted
    grant(s, 1.0)
    s.transfer_done(7, Commit(7, 2, AT_P, tuple(Choice(token, None) for token in (9, 10, 11))), 7.0)
    granted = Granted((1, 3), "p0", queued_s=0.0, granted_s=1.0)
    assert said(s) == [granted, Begun(granted, AT_P, 7.0)]
    (tokens,) = (message for _, message, _ in messages_of(s.out) if isinstance(message, Tokens))
    assert (tokens.request_ids, tokens.begun) == ((1, 3), (Begun(granted, AT_P, 7.0),))
    prebuild(s, 8.0)
    s.process(step(s, 9.0), drawn(5, 6), 10.0)
    assert finishes(s) == [Finish(i, FinishReason.LENGTH, 8.0, 10.0) for i in (1, 3)]


# A prompt that this node computes ---------------------------------------------------------------------------


def test_a_local_prompt_has_a_stamp_for_each_chunk() -> None:
    s = scheduler(colocated=True)
    key = submit(s, 1, prompt_len=12, max_tokens=2)  # 8 tokens a step
    grant(s, 1.0, None, ())
    s.process(step(s, 2.0), drawn(), 3.0)
    s.process(step(s, 4.0), drawn(9), 5.0)
    granted = Granted((1,), None, queued_s=0.0, granted_s=1.0)
    assert said(s) == [granted, Begun(granted, PrefillStamps(2.0, (3.0, 5.0)), arrived_s=5.0)]
    s.process(step(s, 6.0), drawn(11), 7.0)
    assert finishes(s) == [Finish(key.request_id, FinishReason.LENGTH, None, second_token_s=7.0)]


def test_overlapped_a_chunk_is_done_when_its_result_is_read() -> None:
    s = scheduler(colocated=True)
    submit(s, 1, prompt_len=12)
    grant(s, 1.0, None, ())
    first, second = step(s, 2.0), step(s, 2.5)
    s.process(first, drawn(), 3.0)
    s.process(second, drawn(9), 4.0)
    assert said(s)[1:] == [Begun(Granted((1,), None, 0.0, 1.0), PrefillStamps(2.0, (3.0, 4.0)), 4.0)]


def test_local_choices_have_the_stamps_of_their_prompt() -> None:
    s = scheduler(colocated=True)
    submit(s, 1, num_choices=2)
    grant(s, 1.0, None, ())
    s.process(step(s, 2.0), drawn(9, 10), 3.0)
    granted = Granted((1, 2), None, queued_s=0.0, granted_s=1.0)
    assert said(s) == [granted, Begun(granted, PrefillStamps(2.0, (3.0,)), arrived_s=3.0)]


# Retraction -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("colocated", [False, True])
def test_what_is_computed_again_keeps_the_stamps_of_the_first_time(
    monkeypatch: pytest.MonkeyPatch, colocated: bool
) -> None:
    monkeypatch.setattr("decode_node.admission.NEAR_TOKENS", 4)
    s = scheduler(colocated=colocated, num_pages=5, max_running=4)
    now, transfer_id = 0.0, 0
    for request_id in (1, 2):
        submit(s, request_id, prompt_len=4, max_tokens=12)
    while s.keys_of(1):
        now += 1.0
        while (admitted := s.admit(IDLE)) is not None:
            transfer_id += 1
            s.granted(admitted, None if admitted.node_id is None else transfer_id, now)
            if admitted.node_id is not None:
                s.transfer_done(transfer_id, replace(commit(transfer_id, 9), stamps=AT_P), now)
        if s.take_prebuilt() is not None:
            prebuild(s, now)
        if (planned := s.next_step(now)) is not None:
            s.process(planned, drawn(*[11] * len(planned.entries)), now + 0.5)
        assert now < 100.0
    assert s.num_retracted > 0
    assert [type(news) for news in said(s)] in ([Granted, Begun] * 2, [Granted, Granted, Begun, Begun])
    by_id = {news.granted.request_ids: news for news in said(s) if isinstance(news, Begun)}
    ends = {(end.request_id,): end for end in finishes(s)}
    assert set(by_id) == set(ends) == {(1,), (2,)}
    for request_ids, begun in by_id.items():
        assert len(begun.prefill.chunks_s) == (1 if colocated else 2)
        second_s = ends[request_ids].second_token_s
        assert second_s is not None
        assert begun.arrived_s < second_s <= begun.arrived_s + 2.0
