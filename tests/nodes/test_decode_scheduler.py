"""The decode scheduler: every phase, every end, and what the gateway is told."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.engine.batch import ForwardMode
from common.kv.layout import KVLayout
from common.messages import Choice, Commit, Submit, int32s
from common.request import FinishReason, PrefillStamps, SampledToken, SamplingParams
from decode_node import admission
from decode_node.admission import PrefillLoad, choose_prefill_node
from decode_node.entry import FailedOut, Out, RefusedOut, RequestKey, StampsOut, TokenOut
from decode_node.scheduler import DecodeScheduler

LAYOUT = KVLayout(layers=1, page_size=4, kv_heads=1, head_dim=8, dtype="float32")
EOS = 0
STOP = FinishReason.STOP
IDLE = (PrefillLoad("p0", 0, 8, 64),)


def scheduler(**changes: Any) -> DecodeScheduler:
    settings: dict[str, Any] = {
        "layout": LAYOUT,
        "num_pages": 12,
        "num_rows": 4,
        "max_running": 2,
        "max_queued": 3,
        "prefill_budget": 8,
        "colocated": False,
        "vocab_size": 100,
        "context_length": 64,
        "eos_token_ids": (EOS,),
    }
    return DecodeScheduler(**(settings | changes))


def submit(
    s: DecodeScheduler, request_id: int, prompt_len: int = 5, longest_prompt: int | None = 64, **sampling: Any
) -> RequestKey:
    key = RequestKey(1, request_id)
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **sampling})
    s.submit(key, Submit(request_id, params, int32s([5] * prompt_len)), 0.0, longest_prompt=longest_prompt)
    return key


def drawn(*tokens: int) -> list[SampledToken]:
    return [SampledToken(token) for token in tokens]


def commit(transfer_id: int, token: int, finish: FinishReason | None = None) -> Commit:
    return Commit(transfer_id, 2, PrefillStamps(), (Choice(token, finish),))


def arrive(s: DecodeScheduler, transfer_id: int, token: int = 9, finish: FinishReason | None = None) -> None:
    grant = s.admit(IDLE)
    assert grant is not None
    s.granted(grant, transfer_id, 1.0)
    s.transfer_done(transfer_id, commit(transfer_id, token, finish), 2.0)


def prebuild(s: DecodeScheduler) -> None:
    prebuilt = s.take_prebuilt()
    assert prebuilt is not None
    s.process_prebuilt(prebuilt, 0.0)


def tokens_of(s: DecodeScheduler, key: RequestKey) -> list[tuple[int, int, FinishReason | None]]:
    return [(o.index, o.sampled.token, o.finish) for o in s.out if isinstance(o, TokenOut) and o.key == key]


def answers(s: DecodeScheduler) -> list[Out]:
    """What was said, but for stamps."""
    return [out for out in s.out if not isinstance(out, StampsOut)]


def test_a_request_is_handed_over_and_decodes_to_its_length() -> None:
    s = scheduler()
    key = submit(s, 1, max_tokens=3)
    arrive(s, 7)
    assert tokens_of(s, key) == [(0, 9, None)], "the first token goes out before any step"
    prebuild(s)
    for token in (11, 12):
        step = s.next_step(3.0)
        assert step is not None
        assert step.batch.mode is ForwardMode.DECODE
        s.process(step, drawn(token), 4.0)
    assert tokens_of(s, key) == [(0, 9, None), (1, 11, None), (2, 12, FinishReason.LENGTH)]
    assert s.next_step(5.0) is None
    assert s.ledger().free == 12


@pytest.mark.parametrize(
    ("sampling", "token", "finish"),
    [
        ({}, EOS, FinishReason.STOP),
        ({"max_tokens": 1}, 9, FinishReason.LENGTH),
        ({"stop_token_ids": (9,)}, 9, FinishReason.STOP),
        ({"max_tokens": 1, "ignore_eos": True}, EOS, FinishReason.LENGTH),
    ],
)
def test_a_first_token_that_ends_the_request_is_never_decoded(
    sampling: dict[str, Any], token: int, finish: FinishReason
) -> None:
    s = scheduler()
    key = submit(s, 1, **sampling)
    arrive(s, 7, token, finish)
    assert tokens_of(s, key) == [(0, token, finish)]
    assert s.take_prebuilt() is None
    assert s.ledger().free == 12


def test_more_than_may_run_wait_with_their_first_token_out() -> None:
    s = scheduler(num_pages=30)
    keys = [submit(s, i) for i in (1, 2, 3)]
    for i in (1, 2, 3):
        arrive(s, i)
    prebuild(s)
    step = s.next_step(0.0)
    assert step is not None
    assert len(step.entries) == 2
    assert s.take_prebuilt() is None
    s.process(step, drawn(EOS, 9), 0.0)
    prebuild(s)
    assert all(tokens_of(s, key) for key in keys)


def test_overlap_launches_ahead_and_drops_the_step_of_a_request_that_ended() -> None:
    s = scheduler()
    key = submit(s, 1, max_tokens=10)
    arrive(s, 7)
    prebuild(s)
    first = s.next_step(0.0)
    second = s.next_step(0.0)
    assert first is not None
    assert second is not None
    s.process(first, drawn(EOS), 0.0)
    assert s.ledger().quarantined == 2, "the second step still writes a page"
    s.process(second, drawn(33), 0.0)
    assert [t for _, t, _ in tokens_of(s, key)] == [9, EOS]
    assert s.ledger().free == 12


def test_overlap_never_launches_past_max_tokens() -> None:
    s = scheduler()
    submit(s, 1, max_tokens=2)
    arrive(s, 7)
    prebuild(s)
    assert s.next_step(0.0) is not None
    assert s.next_step(0.0) is None


def test_refusals_name_what_is_wrong() -> None:
    s = scheduler()
    for i in (1, 2, 3):
        submit(s, i)
    submit(s, 4)
    submit(s, 5, prompt_len=40, max_tokens=20)
    submit(s, 6, longest_prompt=None)
    submit(s, 7, prompt_len=0)
    submit(s, 8, prompt_len=9, longest_prompt=8)
    submit(s, 9, stop_token_ids=(100,))
    refused = [(o.key.request_id, o.status, o.param) for o in s.out if isinstance(o, RefusedOut)]
    assert refused == [
        (4, 429, None),
        (5, 400, "max_tokens"),
        (6, 503, None),
        (7, 400, "prompt"),
        (8, 400, "prompt"),
        (9, 400, "stop_token_ids"),
    ]
    assert all(o.retry_after_s for o in s.out if isinstance(o, RefusedOut) and o.status in (429, 503))


def test_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    s = scheduler()
    submit(s, 1, prompt_len=30, max_tokens=2)  # 8 of 12 pages
    submit(s, 2, prompt_len=20, max_tokens=4)  # 5 pages: waits
    submit(s, 3, prompt_len=1, max_tokens=1)  # would fit
    assert s.admit(IDLE) is not None
    assert s.admit(IDLE) is None


def test_a_failed_transfer_is_tried_again_then_told() -> None:
    s = scheduler()
    key = submit(s, 1)
    for attempt in (1, 2, 3):
        grant = s.admit(IDLE)
        assert grant is not None
        s.granted(grant, attempt, 0.0)
        s.transfer_gave_out(attempt, 503, "gone", retryable=True, can_prefill=True)
        assert s.ledger().quarantined == 2
        s.transfer_released(attempt)
    assert answers(s) == [FailedOut(key, 503, "gone", 1)]
    assert s.ledger().free == 12


def test_what_is_tried_again_keeps_its_order() -> None:
    s = scheduler(num_pages=40)
    keys = [submit(s, i) for i in (1, 2, 3)]
    for i in (1, 2):
        grant = s.admit(IDLE)
        assert grant is not None
        s.granted(grant, i, 0.0)
    for i in (1, 2):
        s.transfer_gave_out(i, 503, "gone", retryable=True, can_prefill=True)
    grants = [s.admit(IDLE) for _ in keys]
    assert [grant.entry.key for grant in grants if grant is not None] == keys


def test_a_transfer_that_was_refused_for_good_is_not_tried_again() -> None:
    s = scheduler()
    key = submit(s, 1)
    grant = s.admit(IDLE)
    assert grant is not None
    s.granted(grant, 1, 0.0)
    s.transfer_gave_out(1, 400, "too long", retryable=False, can_prefill=True)
    assert answers(s) == [FailedOut(key, 400, "too long", None)]


def test_an_abort_that_comes_first_is_remembered() -> None:
    s = scheduler()
    assert s.abort(RequestKey(1, 5)) is None
    submit(s, 5)
    assert (s.num_queued, s.out) == (0, [])
    submit(s, 5)  # remembered once
    assert s.num_queued == 1


def test_a_prefill_node_is_not_buried() -> None:
    busy, free = PrefillLoad("a", 16, 8, 200), PrefillLoad("b", 0, 8, 200)
    assert choose_prefill_node([busy, free], 100) == "b"
    assert choose_prefill_node([busy], 1) is None
    assert choose_prefill_node([PrefillLoad("a", 10, 8, 200)], 6) == "a"
    assert choose_prefill_node([PrefillLoad("a", 7, 8, 200), PrefillLoad("b", 3, 8, 200)], 6) == "b"
    assert choose_prefill_node([PrefillLoad("a", 3, 8, 200), PrefillLoad("b", 3, 8, 200)], 6) == "a"
    assert choose_prefill_node([], 1) is None
    assert choose_prefill_node([PrefillLoad("small", 0, 8, 50), free], 100) == "b"


class DecodeLife(RuleBasedStateMachine):
    """Requests come, arrive, decode, fail and are aborted in any order, with up to two steps in flight.

    The model: for each request the tokens that were fed to it, which the gateway must be told in order,
    without gaps, exactly once, and nothing after its end.
    """

    colocated = False

    def __init__(self) -> None:
        super().__init__()
        self.near = patch.object(admission, "NEAR_TOKENS", 3)  # so that pages run short
        self.near.start()
        self.s = scheduler(num_pages=16, num_rows=4, max_running=3, max_queued=5, colocated=self.colocated)
        self.now = 0.0
        self.ids = 0
        self.transfers: dict[int, RequestKey] = {}
        self.quarantined: list[int] = []
        self.in_flight: list[Any] = []
        self.told: dict[RequestKey, list[int]] = {}
        self.ended: set[RequestKey] = set()
        self.aborted: set[RequestKey] = set()
        self.value = 1

    def token(self) -> int:
        self.value = self.value % 98 + 1
        return self.value

    @rule(prompt_len=st.integers(1, 24), max_tokens=st.integers(1, 40))
    def submit(self, prompt_len: int, max_tokens: int) -> None:
        self.ids += 1
        submit(self.s, self.ids, prompt_len, max_tokens=max_tokens)

    @rule()
    def grant(self) -> None:
        grant = self.s.admit(IDLE)
        if grant is not None and grant.node_id is None:
            self.s.granted(grant, None, 0.0)
        elif grant is not None:
            self.ids += 1
            self.transfers[self.ids] = grant.entry.key
            self.s.granted(grant, self.ids, 0.0)

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), eos=st.booleans())
    def arrive(self, data: st.DataObject, eos: bool) -> None:
        transfer_id = data.draw(st.sampled_from(sorted(self.transfers)))
        del self.transfers[transfer_id]
        self.s.transfer_done(
            transfer_id, commit(transfer_id, EOS, STOP) if eos else commit(transfer_id, self.token()), 0.0
        )

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), retryable=st.booleans())
    def give_out(self, data: st.DataObject, retryable: bool) -> None:
        transfer_id = data.draw(st.sampled_from(sorted(self.transfers)))
        del self.transfers[transfer_id]
        self.quarantined.append(transfer_id)
        self.s.transfer_gave_out(transfer_id, 503, "gone", retryable=retryable, can_prefill=True)

    @precondition(lambda self: self.quarantined)
    @rule()
    def release(self) -> None:
        self.s.transfer_released(self.quarantined.pop(0))

    @rule()
    def prebuild(self) -> None:
        if (prebuilt := self.s.take_prebuilt()) is not None:
            self.s.process_prebuilt(prebuilt, 0.0)

    @rule()
    def launch(self) -> None:
        if len(self.in_flight) < 2 and (step := self.s.next_step(self.now)) is not None:
            assert len(step.batch.req_pool_indices) <= 3
            assert step.batch.extend_num_tokens - step.batch.num_decode <= 8
            for entry in step.entries:
                request = entry.request
                assert request.computed_len <= len(request.page_ids) * LAYOUT.page_size
            self.in_flight.append(step)

    @precondition(lambda self: self.in_flight)
    @rule(eos=st.booleans(), took_s=st.sampled_from([0.0, 0.01, 0.02, 1.0]))
    def process(self, eos: bool, took_s: float) -> None:
        step = self.in_flight.pop(0)
        tokens = [self.token() for _ in step.entries]
        if eos and tokens:
            tokens[0] = EOS
        self.now += took_s
        self.s.process(step, drawn(*tokens), self.now)

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = RequestKey(1, data.draw(st.integers(1, self.ids)))
        self.aborted.add(key)
        transfer_id = self.s.abort(key)
        if transfer_id is not None:
            assert self.transfers.pop(transfer_id) == key
            self.quarantined.append(transfer_id)

    @rule()
    def no_prefill_node_is_left(self) -> None:
        self.s.prefill_lost()

    @invariant()
    def the_gateway_hears_a_true_story(self) -> None:
        outs, self.s.out = self.s.out, []
        for out in outs:
            assert out.key not in self.ended, "news after the end"
            if isinstance(out, StampsOut):
                assert out.key not in self.told, "how a prompt came to its tokens is told before them"
                continue
            if isinstance(out, TokenOut):
                story = self.told.setdefault(out.key, [])
                assert out.index == len(story), "a gap, or a token twice"
                story.append(out.sampled.token)
            if not isinstance(out, TokenOut) or out.finish is not None:
                self.ended.add(out.key)

    @invariant()
    def pools_add_up(self) -> None:
        self.s.check_invariants()

    def teardown(self) -> None:
        for key in self.s.keys_of(1):
            transfer_id = self.s.abort(key)
            if transfer_id is not None:
                self.quarantined.append(transfer_id)
        while self.quarantined:
            self.s.transfer_released(self.quarantined.pop())
        while self.in_flight:
            step = self.in_flight.pop(0)
            self.s.process(step, drawn(*[1] * len(step.entries)), 0.0)
        assert self.s.ledger().free == 16
        assert self.s._holdings.num_free_rows == 4
        self.near.stop()


class ColocatedLife(DecodeLife):
    """The same where this node computes the prompts: nothing arrives."""

    colocated = True


TestDecodeLife = DecodeLife.TestCase
TestColocatedLife = ColocatedLife.TestCase
TestDecodeLife.settings = TestColocatedLife.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None
)
