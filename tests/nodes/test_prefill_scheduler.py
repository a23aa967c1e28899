"""The prefill scheduler as its node sees it: what is admitted, planned, processed and given back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.kv.layout import KVLayout
from common.messages import Prefill, int32s
from common.request import FinishReason, PrefillStamps, SampledToken, SamplingParams
from prefill_node.scheduler import PrefillScheduler

LAYOUT = KVLayout(layers=1, page_size=4, kv_heads=1, head_dim=8, dtype="float32")


def scheduler(num_pages: int = 10, budget: int = 8, num_rows: int = 4) -> PrefillScheduler[str]:
    return PrefillScheduler(
        layout=LAYOUT,
        num_pages=num_pages,
        num_rows=num_rows,
        budget=budget,
        vocab_size=100,
        context_length=64,
        eos_token_ids=(0,),
    )


def drawn(*tokens: int) -> list[SampledToken]:
    return [SampledToken(token) for token in tokens]


def prefill(prompt_len: int, **sampling: Any) -> Prefill:
    pages = LAYOUT.pages_for(prompt_len)
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return Prefill(1, params, int32s([5] * prompt_len), int32s(range(1, pages + 1)))


def test_several_prompts_share_a_step_and_chunks_end_on_pages() -> None:
    s = scheduler()
    assert s.submit("a", prefill(6)) is None
    assert s.submit("b", prefill(9)) is None
    s.admit()
    first = s.next_step(1.0)
    assert first is not None
    # 6 of a, and of the 2 tokens that are left no page of b.
    assert [(c.job.key, c.plan.start, c.plan.end, c.plan.is_last) for c in first.chunks] == [
        ("a", 0, 6, True)
    ]
    second = s.next_step(2.0)
    assert second is not None
    assert [(c.job.key, c.plan.start, c.plan.end) for c in second.chunks] == [("b", 0, 8)]


def test_a_prompt_starts_only_with_pages_for_all_of_it_and_in_order() -> None:
    s = scheduler(num_pages=5)
    s.submit("a", prefill(12))
    s.submit("big", prefill(12))
    s.submit("small", prefill(4))
    assert len(s.admit()) == 1  # a has 3 pages; big waits for its 3, and small behind big
    assert (s.num_queued, s.pages.num_free) == (2, 2)
    step = s.next_step(0.0)
    assert step is not None
    s.process(step, (), 0.0)
    s.end("a")
    assert len(s.admit()) == 2


def test_the_first_token_carries_the_finish() -> None:
    s = scheduler()
    s.submit("a", prefill(4))
    s.admit()
    step = s.next_step(1.5)
    assert step is not None
    ((_, first),) = s.process(step, drawn(0), 1.75)
    (choice,) = first.choices
    assert (choice.first_token, choice.finish) == (0, FinishReason.STOP)
    assert first.stamps == PrefillStamps(1.5, (1.75,))


def test_pages_of_a_step_in_flight_rest_until_it_is_processed() -> None:
    s = scheduler(num_pages=2)
    s.submit("a", prefill(8))
    s.admit()
    step = s.next_step(0.0)
    assert step is not None
    s.stop("a")
    s.end("a")
    assert (s.ledger().quarantined, s.ledger().free) == (2, 0)
    assert s.process(step, drawn(9), 0.0) == []
    assert (s.ledger().quarantined, s.ledger().free) == (0, 2)


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (prefill(65), "65 tokens"),
        (Prefill(1, SamplingParams(max_tokens=1), int32s(), int32s()), "0 tokens"),
        (Prefill(1, SamplingParams(max_tokens=1), int32s([100]), int32s([1])), "vocabulary"),
        (Prefill(1, SamplingParams(max_tokens=1), int32s([-1]), int32s([1])), "vocabulary"),
        (prefill(44), "has 10"),
        (Prefill(1, SamplingParams(max_tokens=1), int32s([1] * 5), int32s([1])), "granted"),
    ],
)
def test_what_can_never_be_computed_is_rejected_with_the_reason(bad: Prefill, word: str) -> None:
    s = scheduler()
    rejection = s.submit("x", bad)
    assert rejection is not None
    assert word in rejection.reason
    assert s.ledger().free == 10


class PrefillLife(RuleBasedStateMachine):
    """Transfers come, are stopped and end at any time, with up to one step in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.s = scheduler(num_pages=12, budget=8, num_rows=3)
        self.next_id = 0
        self.live: list[str] = []
        self.in_flight: list[Any] = []
        self.tokens: dict[str, int] = {}
        self.over: set[str] = set()

    @rule(prompt_len=st.integers(1, 40))
    def submit(self, prompt_len: int) -> None:
        key = f"t{self.next_id}"
        self.next_id += 1
        assert self.s.submit(key, prefill(prompt_len)) is None
        self.live.append(key)

    @rule()
    def launch(self) -> None:
        self.s.admit()
        if len(self.in_flight) < 2 and (step := self.s.next_step(0.0)) is not None:
            self.in_flight.append(step)

    @precondition(lambda self: self.in_flight)
    @rule()
    def process(self) -> None:
        step = self.in_flight.pop(0)
        ended = [c for c in step.chunks if c.plan.is_last]
        for key, _ in self.s.process(step, drawn(*(7,) * len(ended)), 0.0):
            assert key not in self.over, "a first token after the end"
            self.tokens[key] = self.tokens.get(key, 0) + 1
            assert self.tokens[key] == 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), stop_only=st.booleans())
    def leave(self, data: st.DataObject, stop_only: bool) -> None:
        key = data.draw(st.sampled_from(self.live))
        self.s.stop(key)
        self.over.add(key)
        if not stop_only:
            self.s.end(key)
            self.live.remove(key)

    @invariant()
    def pools_add_up(self) -> None:
        self.s.check_invariants()

    def teardown(self) -> None:
        for key in list(self.live):
            self.s.stop(key)
            self.s.end(key)
        while self.in_flight:
            step = self.in_flight.pop(0)
            self.s.process(step, drawn(*(7,) * sum(c.plan.is_last for c in step.chunks)), 0.0)
        assert self.s.ledger().free == 12
        assert self.s._rows.num_free == 3


TestPrefillLife = PrefillLife.TestCase
TestPrefillLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_each_choice_of_a_prompt_has_a_first_token() -> None:
    s = scheduler()
    s.submit("a", prefill(4, num_choices=3, choice=2))
    s.submit("b", prefill(4))
    s.admit()
    step = s.next_step(1.0)
    assert step is not None
    assert [(row.index, row.sampling.choice) for row in step.batch.sample_rows] == [
        (0, 2),
        (0, 3),
        (0, 4),
        (1, 0),
    ]
    (_, a), (_, b) = s.process(step, drawn(7, 0, 8, 9), 2.0)
    assert [(c.first_token, c.finish) for c in a.choices] == [(7, None), (0, FinishReason.STOP), (8, None)]
    assert [c.first_token for c in b.choices] == [9]


def test_a_stopped_prompt_of_several_choices_takes_nobody_elses_tokens() -> None:
    s = scheduler()
    s.submit("a", prefill(4, num_choices=3))
    s.submit("b", prefill(4))
    s.admit()
    step = s.next_step(1.0)
    assert step is not None
    s.stop("a")
    ((key, b),) = s.process(step, drawn(7, 0, 8, 9), 2.0)
    assert (key, [c.first_token for c in b.choices]) == ("b", [9])
