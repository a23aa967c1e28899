"""Prompts computed beside decoding, on a simulated clock: who gets what, and what a step takes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest

from common.engine.batch import ForwardMode
from common.request import SampledToken
from decode_node.entry import DecodeStep, TokenOut
from decode_node.scheduler import DecodeScheduler
from tests.nodes.test_decode_scheduler import LAYOUT, scheduler
from tests.nodes.test_decode_scheduler import submit as submit_short

DECODE_S, TOKEN_S = 0.010, 0.0004  # 25 tokens double a step
LOOPS = ("plain", "overlapped", "overlapped, launches wait")


def local(**changes: int) -> DecodeScheduler:
    sizes = {"num_pages": 4000, "num_rows": 32, "max_running": 16, "max_queued": 100, "prefill_budget": 256}
    return scheduler(colocated=True, context_length=10_000, **(sizes | changes))


def submit(s: DecodeScheduler, request_id: int, prompt_len: int, max_tokens: int) -> None:
    submit_short(s, request_id, prompt_len, longest_prompt=10_000, max_tokens=max_tokens, ignore_eos=True)


def num_prompt(step: DecodeStep) -> int:
    return step.batch.extend_num_tokens - step.batch.num_decode


def cost_s(step: DecodeStep) -> float:
    return DECODE_S + TOKEN_S * num_prompt(step)


@dataclass
class Node:
    """Runs a scheduler's steps in the order of a loop."""

    s: DecodeScheduler
    loop: str
    now: float = 0.0
    free_at_s: float = 0.0
    in_flight: deque[tuple[DecodeStep, float]] = field(default_factory=deque)

    def turn(self) -> DecodeStep | None:
        """Admit, launch a step if there is one, and process what is due."""
        while (grant := self.s.admit(())) is not None:
            self.s.granted(grant, None, self.now)
        step = self.s.next_step(self.now)
        if step is not None:
            rows = [step.batch.req_pool_indices[sample.index] for sample in step.batch.sample_rows]
            assert rows == [entry.request.row for entry in step.entries]
            self.free_at_s = max(self.free_at_s, self.now) + cost_s(step)
            self.in_flight.append((step, self.free_at_s))
            if self.loop == LOOPS[2]:
                self.now = self.free_at_s
        while len(self.in_flight) > (step is not None and self.loop != "plain"):
            done, done_at_s = self.in_flight.popleft()
            self.now = max(self.now, done_at_s)
            self.s.process(done, [SampledToken(9)] * len(done.entries), self.now)
        self.s.check_invariants()
        return step

    def turns(self, count: int) -> list[DecodeStep]:
        """Take turns while there is something to launch."""
        steps = (self.turn() for _ in range(count))
        return [step for step in steps if step is not None]


@pytest.fixture(params=LOOPS)
def node(request: pytest.FixtureRequest) -> Node:
    """Two requests decode, and have for a while."""
    node = Node(local(), request.param)
    for request_id in (1, 2):
        submit(node.s, request_id, prompt_len=5, max_tokens=900)
    node.turns(10)
    return node


def test_alone_a_prompt_gets_the_whole_budget() -> None:
    node = Node(local(), "plain")
    submit(node.s, 1, prompt_len=600, max_tokens=2)
    modes = [(step.batch.mode, num_prompt(step)) for step in node.turns(10)]
    assert modes == [
        (ForwardMode.EXTEND, 256),
        (ForwardMode.EXTEND, 256),
        (ForwardMode.EXTEND, 88),
        (ForwardMode.DECODE, 0),
    ]


def test_prompts_and_decoding_share_steps_of_at_most_twice_the_time(node: Node) -> None:
    submit(node.s, 3, prompt_len=2000, max_tokens=5)
    steps = node.turns(60)
    assert {step.batch.mode for step in steps} == {ForwardMode.MIXED, ForwardMode.DECODE}
    assert max(cost_s(step) for step in steps) <= 2 * DECODE_S + TOKEN_S
    settled = [num_prompt(step) for step in steps[10:] if num_prompt(step)]
    assert min(settled) >= 20, "25 would just fit, and chunks end with a page"


def test_who_decodes_gets_a_token_from_every_step_and_a_prompt_gets_on(node: Node) -> None:
    submit(node.s, 3, prompt_len=1500, max_tokens=5)
    steps = node.turns(80)
    for step in steps:
        assert {1, 2} <= {entry.key.request_id for entry in step.entries}
    chunks = [num_prompt(step) for step in steps]
    assert sum(chunks) == 1500
    while chunks[-1] == 0:
        chunks.pop()
    alone = [int(chunk == 0) for chunk in chunks]
    assert max(sum(alone[i : i + 4]) for i in range(len(alone))) <= 3
    assert sum(alone) <= len(alone) // 8


def test_a_prompt_that_ends_samples_before_those_that_decode(node: Node) -> None:
    submit(node.s, 3, prompt_len=3, max_tokens=5)
    (step,) = [step for step in node.turns(4) if step.batch.mode is ForwardMode.MIXED]
    assert [entry.key.request_id for entry in step.entries] == [3, 1, 2]
    assert [sample.index for sample in step.batch.sample_rows] == [0, 1, 2]
    assert step.batch.mix_running_indices == tuple(entry.request.row for entry in step.entries[1:])


def test_a_flood_of_short_prompts_keeps_to_budget_and_max_running_and_all_are_answered(node: Node) -> None:
    for request_id in range(3, 60):
        submit(node.s, request_id, prompt_len=1 + request_id * 7 % 50, max_tokens=1 + request_id % 9)
    steps = node.turns(400)
    # Where launches wait, a step's time is taken for the one before, whose prompts may have been shorter.
    most_s = (4 if node.loop == LOOPS[2] else 2.001) * DECODE_S
    for step in steps:
        assert len(step.batch.req_pool_indices) <= 16
        assert num_prompt(step) <= 256
        assert cost_s(step) <= most_s
    ended = [o.key.request_id for o in node.s.out if isinstance(o, TokenOut) and o.finish is not None]
    assert sorted(ended) == list(range(3, 60))


def test_beside_decoding_a_chunk_is_a_page_at_least() -> None:
    node = Node(local(prefill_budget=LAYOUT.page_size), "plain")
    submit(node.s, 1, prompt_len=2, max_tokens=300)
    submit(node.s, 2, prompt_len=40, max_tokens=2)
    steps = node.turns(30)
    assert {num_prompt(step) for step in steps} == {0, 2, 4}
    assert sum(num_prompt(step) for step in steps) == 42


def test_a_pause_between_steps_is_not_a_step_s_time() -> None:
    node = Node(local(), "plain")
    submit(node.s, 1, prompt_len=5, max_tokens=500)
    for _ in range(8):
        node.turn()
        node.now += 1.0
    submit(node.s, 2, prompt_len=900, max_tokens=2)
    assert max(cost_s(step) for step in node.turns(60)) <= 2 * DECODE_S + TOKEN_S
