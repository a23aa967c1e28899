"""Several choices of one prompt on a decode node: shared pages, copies of the last, and every end of theirs.

The device of plain numbers (test_retraction.py) draws each choice's tokens from what its KV holds.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from common.messages import Choice, Commit, Submit, int32s
from common.request import FinishReason, PrefillStamps, Request, SamplingParams
from decode_node import admission
from decode_node.admission import NEAR_TOKENS, AdmissionQueue, may_enter
from decode_node.entry import FailedOut, RefusedOut, RequestKey
from decode_node.scheduler import DecodeScheduler
from tests.nodes.test_decode_scheduler import (
    EOS,
    IDLE,
    DecodeLife,
    answers,
    drawn,
    prebuild,
    scheduler,
    submit,
    tokens_of,
)
from tests.nodes.test_retraction import World, expected, run_with_aborts

STOP = FinishReason.STOP
Asked = tuple[int, int, int]  # prompt tokens, max_tokens, choices


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=4),
    st.sampled_from([1, 4, 9, 256]),
    st.integers(15, 40),
)
@settings(max_examples=400, deadline=None)
def test_every_choice_gets_the_same_tokens_as_alone(
    asked: list[Asked],
    overlap: bool,
    colocated: bool,
    max_running: int,
    aborts: list[tuple[int, int]],
    near_tokens: int,
    num_pages: int,
) -> None:
    with patch.object(admission, "NEAR_TOKENS", near_tokens):
        world = World(
            overlap=overlap,
            colocated=colocated,
            num_pages=num_pages,
            num_rows=8,
            max_running=max_running,
            max_queued=99,
        )
        live(world, asked, dict(aborts))
    assert world.s.ledger().free == num_pages
    assert world.s._holdings.num_free_rows == 8


def live(world: World, asked: list[Asked], aborts: dict[int, int]) -> None:
    """Have all of it served, with an abort of one choice in some turns."""
    right: dict[RequestKey, list[int]] = {}
    for prompt_len, max_tokens, choices in asked:
        first_id = len(right) + 1
        submit(world.s, first_id, prompt_len, max_tokens=max_tokens, num_choices=choices)
        for choice in range(choices):
            right[RequestKey(1, first_id + choice)] = expected([5] * prompt_len, max_tokens, choice)
    aborted = run_with_aborts(world, aborts)
    for key, tokens in right.items():
        told = world.told.get(key, [])
        assert told == (tokens[: len(told)] if key in aborted else tokens)


# One after the other ----------------------------------------------------------------------------------------


def commit(transfer_id: int, *first: int, ends: tuple[int, ...] = ()) -> Commit:
    """Commit these first tokens; those in `ends` end their choice."""
    choices = (Choice(token, STOP if token in ends else None) for token in first)
    return Commit(transfer_id, 2, PrefillStamps(), tuple(choices))


def grant(s: DecodeScheduler, transfer_id: int) -> None:
    granted = s.admit(IDLE)
    assert granted is not None
    s.granted(granted, transfer_id, 1.0)


def three(**changes: Any) -> tuple[DecodeScheduler, list[RequestKey]]:
    """Three choices of a prompt of a page and a quarter, granted as transfer 7."""
    s = scheduler(num_rows=6, max_running=3, **changes)
    submit(s, 1, 5, num_choices=3, max_tokens=12, ignore_eos=True)
    grant(s, 7)
    return s, [RequestKey(1, i) for i in (1, 2, 3)]


def test_full_pages_are_shared_and_the_last_is_copied_by_all_but_the_first() -> None:
    s, keys = three()
    assert s.ledger().incoming == 2
    s.transfer_done(7, commit(7, 21, 22, 23), 2.0)
    assert [tokens_of(s, key) for key in keys] == [[(0, 21, None)], [(0, 22, None)], [(0, 23, None)]]
    assert s.ledger().active == 2, "nothing is copied before somebody writes"
    prebuild(s)
    step = s.next_step(3.0)
    assert step is not None
    first, second, third = step.batch.page_ids
    assert first[0] == second[0] == third[0]
    assert step.batch.page_copies == ((first[1], second[1]), (first[1], third[1]))
    assert len({first[1], second[1], third[1]}) == 3
    assert {(row, column) for row, column, _ in step.batch.new_pages} == {
        (row, 1) for row in step.batch.req_pool_indices[1:]
    }
    assert s.ledger().active == 4
    s.process(step, drawn(1, 2, 3), 4.0)
    again = s.next_step(5.0)
    assert again is not None
    assert again.batch.page_copies == ()


def test_a_prompt_of_whole_pages_needs_no_copy() -> None:
    s = scheduler(num_rows=6, max_running=3)
    submit(s, 1, 8, num_choices=3, max_tokens=5, ignore_eos=True)
    grant(s, 7)
    s.transfer_done(7, commit(7, 21, 22, 23), 2.0)
    prebuild(s)
    step = s.next_step(3.0)
    assert step is not None
    assert step.batch.page_copies == ()
    assert s.ledger().active == 2 + 3


def test_who_is_left_alone_with_the_last_page_writes_it() -> None:
    s, keys = three()
    s.transfer_done(7, commit(7, 21, 22, 23), 2.0)
    s.abort(keys[0])
    s.abort(keys[2])
    prebuild(s)
    step = s.next_step(3.0)
    assert step is not None
    assert step.batch.page_copies == ()
    assert s.ledger().active == 2


def test_first_tokens_that_end_their_choice_end_it_alone() -> None:
    s, keys = three()
    s.transfer_done(7, commit(7, 21, 22, 23, ends=(21, 23)), 2.0)
    assert [tokens_of(s, key) for key in keys] == [[(0, 21, STOP)], [(0, 22, None)], [(0, 23, STOP)]]
    assert s.keys_of(1) == [keys[1]]
    prebuild(s)
    step = s.next_step(3.0)
    assert step is not None
    assert (len(step.entries), step.batch.page_copies) == (1, ())
    s.process(step, drawn(5), 4.0)
    assert s.abort(keys[1]) is None
    assert s.ledger().free == 12
    assert s._holdings.num_free_rows == 6


def test_all_first_tokens_end_their_choices() -> None:
    s, _ = three()
    s.transfer_done(7, commit(7, 21, 22, 23, ends=(21, 22, 23)), 2.0)
    assert s.is_idle
    assert s.ledger().free == 12
    assert s.take_prebuilt() is None


def test_a_page_is_free_when_its_last_choice_is_gone_and_its_steps_are_processed() -> None:
    s, keys = three()
    s.transfer_done(7, commit(7, 21, 22, 23), 2.0)
    prebuild(s)
    first = s.next_step(3.0)
    second = s.next_step(3.0)
    assert first is not None
    assert second is not None
    for key in keys:
        s.abort(key)
    assert (s.ledger().quarantined, s.ledger().free) == (4, 8)
    s.process(first, drawn(1, 2, 3), 4.0)
    assert s.ledger().quarantined == 4
    s.process(second, drawn(1, 2, 3), 4.0)
    assert s.ledger().free == 12


def test_a_transfer_is_given_up_with_the_last_of_its_choices() -> None:
    s, keys = three()
    assert s.abort(keys[0]) is None
    assert s.abort(keys[2]) is None
    assert s.abort(keys[0]) is None
    assert s.keys_of(1) == [keys[1]]
    assert s.abort(keys[1]) == 7
    assert s.ledger().quarantined == 2
    s.transfer_released(7)
    assert s.ledger().free == 12
    assert s.is_idle


def test_what_was_aborted_before_the_hand_over_gets_nothing() -> None:
    s, keys = three()
    s.abort(keys[1])
    s.transfer_done(7, commit(7, 21, 22, 23), 2.0)
    assert [tokens_of(s, key) for key in keys] == [[(0, 21, None)], [], [(0, 23, None)]]
    assert s._holdings.num_free_rows == 4
    prebuild(s)
    step = s.next_step(3.0)
    assert step is not None
    assert [sample.sampling.choice for sample in step.batch.sample_rows] == [0, 2]


def test_a_failed_transfer_is_tried_again_for_all_and_told_to_all() -> None:
    s, keys = three()
    s.abort(keys[1])
    for attempt in (7, 8, 9):
        if attempt > 7:
            grant(s, attempt)
        s.transfer_gave_out(attempt, 503, "gone", retryable=True, can_prefill=True)
        s.transfer_released(attempt)
    assert answers(s) == [FailedOut(key, 503, "gone", 1) for key in (keys[0], keys[2])]
    assert s.ledger().free == 12
    assert s._holdings.num_free_rows == 6


def test_all_choices_are_overdue_at_once() -> None:
    s = scheduler(num_rows=6)
    sampling = SamplingParams(max_tokens=4, num_choices=3)
    s.submit(RequestKey(1, 1), Submit(1, sampling, int32s([5]), timeout_ms=1000), 0.0, longest_prompt=64)
    s.abort(RequestKey(1, 2))
    grant(s, 7)
    assert s.expire(0.5) == []
    assert s.expire(1.0) == [7]
    assert [(out.key.request_id, out.status) for out in s.out if isinstance(out, FailedOut)] == [
        (1, 504),
        (3, 504),
    ]
    assert s.deadline() is None


def test_a_choice_that_is_overdue_later_ends_alone() -> None:
    s = scheduler(num_rows=6, max_running=3)
    sampling = SamplingParams(max_tokens=4, num_choices=2, ignore_eos=True)
    s.submit(RequestKey(1, 1), Submit(1, sampling, int32s([5]), timeout_ms=1000), 0.0, longest_prompt=64)
    grant(s, 7)
    s.transfer_done(7, commit(7, 21, 22, ends=(21,)), 0.5)
    assert s.expire(1.0) == []
    assert [(out.key.request_id, out.status) for out in s.out if isinstance(out, FailedOut)] == [(2, 504)]
    assert s.ledger().free == 12


def test_draining_hands_back_every_choice() -> None:
    s = scheduler(num_rows=6)
    submit(s, 1, num_choices=3)
    s.abort(RequestKey(1, 2))
    s.drain()
    submit(s, 4, num_choices=2)
    refused = [out.key.request_id for out in s.out if isinstance(out, RefusedOut)]
    assert refused == [1, 3, 4, 5]
    assert s.is_idle


def test_ids_that_are_taken_are_not_given_again() -> None:
    s = scheduler(num_rows=6, max_queued=99)
    submit(s, 5)
    submit(s, 3, num_choices=3)  # 3, 4 and 5
    submit(s, 5, num_choices=2)
    assert s.keys_of(1) == [RequestKey(1, 5)]
    assert s.out == []
    submit(s, 6, num_choices=3)
    s.abort(RequestKey(1, 6))
    submit(s, 6)  # while its prompt is here it names it
    submit(s, 8)
    assert s.keys_of(1) == [RequestKey(1, 5), RequestKey(1, 7), RequestKey(1, 8)]
    s.check_invariants()


def test_an_abort_of_a_choice_comes_before_its_request() -> None:
    s = scheduler(num_rows=6)
    s.abort(RequestKey(1, 2))
    submit(s, 1, num_choices=2)
    assert s.keys_of(1) == [RequestKey(1, 1)]
    s.abort(RequestKey(1, 3))
    s.abort(RequestKey(1, 4))
    submit(s, 3, num_choices=2)
    assert s.keys_of(1) == [RequestKey(1, 1)]


def test_more_choices_than_rows_are_refused_and_as_many_enter() -> None:
    s = scheduler(num_rows=4)
    submit(s, 1, num_choices=5)
    assert [(o.status, o.code, o.param) for o in s.out if isinstance(o, RefusedOut)] == [
        (400, "too_many_choices", "n")
    ] * 5
    submit(s, 10, num_choices=4)
    grant(s, 1)
    assert s._holdings.num_free_rows == 0


def test_choices_wait_for_rows_in_their_turn() -> None:
    s = scheduler(num_rows=4)
    submit(s, 1)
    grant(s, 1)
    submit(s, 2, num_choices=4)
    submit(s, 6)
    assert s.admit(IDLE) is None
    assert s.is_out_of_pages
    s.abort(RequestKey(1, 1))
    s.transfer_released(1)
    grant(s, 2)


def test_each_choice_takes_a_place_in_the_queue() -> None:
    queue: AdmissionQueue[str, str] = AdmissionQueue(3)
    assert queue.try_append("two", "", 2)
    assert queue.try_append("four", "", 4), "there was a place"
    assert len(queue) == 6
    assert not queue.try_append("one", "")
    queue.remove("four")
    assert len(queue) == 2


def test_who_may_enter_with_several_choices() -> None:
    def asked(choices: int, prompt_len: int) -> Request:
        sampling = SamplingParams(max_tokens=4 * NEAR_TOKENS, num_choices=choices)
        return Request(int32s([5] * prompt_len), sampling, prompt_len)

    near, far = NEAR_TOKENS // 16, 4 * NEAR_TOKENS // 16
    other = Request(int32s([5] * 16), SamplingParams(max_tokens=1), 16, computed_len=16, page_ids=(1,))
    assert may_enter(asked(8, 32), (), 2 + far, 16), "alone: one of them can always go on"
    assert not may_enter(asked(8, 32), (), 1 + far, 16)
    assert may_enter(asked(8, 32), (other,), 2 + 8 * near + 1, 16)
    assert not may_enter(asked(8, 32), (other,), 2 + 8 * near, 16)
    copies = 7
    assert may_enter(asked(8, 33), (other,), 3 + 8 * near + copies + 1, 16)
    assert not may_enter(asked(8, 33), (other,), 3 + 8 * near + copies, 16)


# At random --------------------------------------------------------------------------------------------------


class ChoicesLife(DecodeLife):
    """DecodeLife with several choices: transfers fail, choices end and are aborted, in any order."""

    @rule(prompt_len=st.integers(1, 24), max_tokens=st.integers(1, 40), choices=st.integers(1, 4))
    def submit_choices(self, prompt_len: int, max_tokens: int, choices: int) -> None:
        submit(self.s, self.ids + 1, prompt_len, max_tokens=max_tokens, num_choices=choices)
        self.ids += choices

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), eos=st.booleans())
    def arrive(self, data: st.DataObject, eos: bool) -> None:
        transfer_id = data.draw(st.sampled_from(sorted(self.transfers)))
        del self.transfers[transfer_id]
        entry = self.s._of_transfer[transfer_id]
        first = [self.token() for _ in range(entry.request.sampling.num_choices)]
        first[0] = EOS if eos else first[0]
        self.s.transfer_done(transfer_id, commit(transfer_id, *first, ends=(EOS,)), 0.0)

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = RequestKey(1, data.draw(st.integers(1, self.ids)))
        transfer_id = self.s.abort(key)
        assert key not in self.s.keys_of(1)
        if transfer_id is not None:
            del self.transfers[transfer_id]
            self.quarantined.append(transfer_id)


class ColocatedChoicesLife(ChoicesLife):
    """The same where this node computes the prompts."""

    colocated = True


TestChoicesLife = ChoicesLife.TestCase
TestColocatedChoicesLife = ColocatedChoicesLife.TestCase
TestChoicesLife.settings = TestColocatedChoicesLife.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None
)
