"""Deadlines on the decode node: the heap against a dict, and the scheduler's life with a clock in it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from common.messages import Submit, int32s
from common.request import SamplingParams
from decode_node.deadlines import MAX_ENDED, Deadlines
from decode_node.entry import FailedOut, RequestKey
from tests.nodes.test_decode_scheduler import DecodeLife

_KEYS = st.integers(0, 9)
_TIMES = st.integers(0, 20).map(float)
_ACTS = st.one_of(
    st.tuples(st.just("set"), _KEYS, _TIMES),
    st.tuples(st.just("discard"), _KEYS, st.none()),
    st.tuples(st.just("take"), st.none(), _TIMES),
)


@given(st.lists(_ACTS, max_size=60))
def test_the_heap_says_what_a_dict_would(acts: list[tuple[str, int, float]]) -> None:
    deadlines, model = Deadlines[int](), dict[int, float]()
    for act, key, at_s in acts:
        match act:
            case "set" if key not in model:
                deadlines.set(key, at_s)
                model[key] = at_s
            case "discard":
                deadlines.discard(key)
                model.pop(key, None)
            case "take":
                overdue = deadlines.take_overdue(at_s)
                assert set(overdue) == {key for key, due_s in model.items() if due_s <= at_s}
                times = [model.pop(key) for key in overdue]
                assert times == sorted(times)
        assert deadlines.next_s() == min(model.values(), default=None)


def test_those_that_ended_are_not_kept_until_their_time_comes() -> None:
    deadlines = Deadlines[int]()
    for key in range(10_000):
        deadlines.set(key, 3600.0)
        if key >= 10:
            deadlines.discard(key)
    assert len(deadlines._heap) <= 2 * 10 + MAX_ENDED + 1
    assert deadlines.take_overdue(3600.0) == list(range(10))


class DeadlineLife(DecodeLife):
    """Some requests have deadlines, and time passes: who is overdue ends with 504, and nobody else does."""

    def __init__(self) -> None:
        super().__init__()
        self.due_s: dict[RequestKey, float] = {}

    @rule(prompt_len=st.integers(1, 24), max_tokens=st.integers(1, 40), timeout_ms=st.integers(1, 3000))
    def submit_with_deadline(self, prompt_len: int, max_tokens: int, timeout_ms: int) -> None:
        self.ids += 1
        key, sampling = RequestKey(1, self.ids), SamplingParams(max_tokens=max_tokens, temperature=0.0)
        message = Submit(self.ids, sampling, int32s([5] * prompt_len), timeout_ms)
        self.s.submit(key, message, self.now, longest_prompt=64)
        self.due_s[key] = self.now + timeout_ms / 1000

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        before = set(self.s.keys_of(1))
        num_told = len(self.s.out)
        for transfer_id in self.s.expire(self.now):
            del self.transfers[transfer_id]
            self.quarantined.append(transfer_id)
        told = self.s.out[num_told:]
        assert all(isinstance(out, FailedOut) and out.status == 504 for out in told)
        overdue = {key for key in before if self.due_s.get(key, self.now + 1) <= self.now}
        assert {out.key for out in told} == overdue == before - set(self.s.keys_of(1))

    @invariant()
    def the_next_deadline_is_known(self) -> None:
        alive = [self.due_s[key] for key in self.s.keys_of(1) if key in self.due_s]
        assert self.s.deadline() == min(alive, default=None)


class ColocatedDeadlineLife(DeadlineLife):
    """The same where this node computes the prompts."""

    colocated = True


TestDeadlineLife = DeadlineLife.TestCase
TestColocatedDeadlineLife = ColocatedDeadlineLife.TestCase
TestDeadlineLife.settings = TestColocatedDeadlineLife.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None
)
