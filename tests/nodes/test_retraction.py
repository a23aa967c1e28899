"""Pages grow with the answers; where there are too few, the youngest is retracted, and everybody finishes.

The model is a device of plain numbers: a step writes the tokens that it was fed where the batch says, reads
all that a request's KV should hold through the mirror of the page table, and draws the next token from that.
"""

from __future__ import annotations

from collections import deque
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.batch import ScheduleBatch
from common.messages import Choice, Commit, int32s
from common.request import PrefillStamps, Request, SampledToken, SamplingParams
from decode_node import admission
from decode_node.admission import NEAR_TOKENS, AdmissionQueue, may_enter
from decode_node.entry import DecodeStep, FailedOut, RequestKey, StampsOut, TokenOut
from tests.nodes.test_decode_scheduler import EOS, IDLE, LAYOUT, scheduler, submit

PAGE = LAYOUT.page_size


def token_after(kv: tuple[int, ...], choice: int = 0) -> int:
    """Draw from all the tokens so far: 0, which is EOS, once in a while."""
    return hash((17 + choice, *kv)) % 23


class Device:
    """KV, page table and relay as lists of numbers."""

    def __init__(self, num_pages: int, num_rows: int) -> None:
        self.kv = [-1] * (num_pages + 1) * PAGE
        self.table: list[dict[int, int]] = [{} for _ in range(num_rows + 1)]
        self.relay = [-1] * (num_rows + 1)

    def grant(self, request: Request) -> None:
        self.table[request.row] = dict(enumerate(request.page_ids))
        if request.outputs:
            self.relay[request.row] = request.outputs[-1]

    def write(self, row: int, position: int, token: int) -> None:
        self.kv[self.table[row][position // PAGE] * PAGE + position % PAGE] = token

    def read(self, row: int, length: int) -> tuple[int, ...]:
        return tuple(self.kv[self.table[row][i // PAGE] * PAGE + i % PAGE] for i in range(length))

    def arrive(self, request: Request, prompt: list[int]) -> list[int]:
        """What a prefill node does; returns the first token of each choice."""
        for position, token in enumerate(prompt):
            self.write(request.row, position, token)
        return [token_after(tuple(prompt), choice) for choice in range(request.sampling.num_choices)]

    def run(self, batch: ScheduleBatch) -> list[int]:
        for source, target in batch.page_copies:
            self.kv[target * PAGE : (target + 1) * PAGE] = self.kv[source * PAGE : (source + 1) * PAGE]
        for row, column, page in batch.new_pages:
            self.table[row][column] = page
        fed: list[int] = []
        for ids in batch.prefill_input_ids_cpu or ():
            fed += ids.tolist()
        num_prompts = len(batch.req_pool_indices) - batch.num_decode
        fed += [self.relay[row] for row in batch.req_pool_indices[num_prompts:]]
        places = batch.out_cache_loc().tolist()
        for place, token in zip(places, fed, strict=True):
            self.kv[place] = token
        sampled = []
        for sample in batch.sample_rows:
            row, length = batch.req_pool_indices[sample.index], batch.seq_lens[sample.index]
            kv = self.read(row, length)
            assert min(kv) >= 0, "a place that nobody wrote"
            sampled.append(token_after(kv, sample.sampling.choice))
            self.relay[row] = sampled[-1]
        return sampled


def expected(prompt: list[int], max_tokens: int, choice: int = 0) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < max_tokens and EOS not in tokens:
        tokens.append(token_after((*prompt, *tokens), choice))
    return tokens


class World:
    """A scheduler and a device, driven as a node drives them."""

    def __init__(self, *, overlap: bool, **settings: Any) -> None:
        self.s = scheduler(**settings)
        self.device = Device(self.s.num_pages, self.s.num_rows)
        self.depth = 2 if overlap else 1
        self.in_flight: deque[tuple[DecodeStep, list[int]]] = deque()
        self.told: dict[RequestKey, list[int]] = {}
        self.ids = 0

    def turn(self) -> None:
        while (grant := self.s.admit(IDLE)) is not None:
            request = grant.entry.request
            assert grant.node_id is None or not request.outputs, "a retracted one needs no prefill node"
            self.device.grant(request)
            if grant.node_id is None:
                self.s.granted(grant, None, 0.0)
            else:
                self.ids += 1
                self.s.granted(grant, self.ids, 0.0)
                tokens = self.device.arrive(request, list(request.prompt_ids))
                reason = request.sampling.finish_reason
                choices = (Choice(token, reason(token, 1, (EOS,))) for token in tokens)
                self.s.transfer_done(self.ids, Commit(self.ids, 1, PrefillStamps(), tuple(choices)), 0.0)
        parted, self.s.parted = self.s.parted, []
        for request in parted:
            if request.row:
                self.device.grant(request)
        if (prebuilt := self.s.take_prebuilt()) is not None:
            for entry in prebuilt.entries:
                self.device.relay[entry.request.row] = entry.request.outputs[-1]
            self.s.process_prebuilt(prebuilt, 0.0)
        step = self.s.next_step(0.0) if len(self.in_flight) < self.depth else None
        if step is not None:
            self.in_flight.append((step, self.device.run(step.batch)))
        if len(self.in_flight) > (self.depth - 1 if step is not None else 0):
            done, tokens = self.in_flight.popleft()
            self.s.process(done, [SampledToken(token) for token in tokens], 0.0)
        self.s.check_invariants()
        outs, self.s.out = self.s.out, []
        for out in outs:
            if isinstance(out, StampsOut):
                continue
            assert isinstance(out, TokenOut), out
            story = self.told.setdefault(out.key, [])
            assert out.index == len(story)
            story.append(out.sampled.token)

    def run(self, turns: int) -> None:
        for _ in range(turns):
            if not self.s.keys_of(1) and not self.in_flight:
                return
            self.turn()
        raise AssertionError(f"not over after {turns} turns")


requests = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=8)


@given(
    requests,
    st.booleans(),
    st.booleans(),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 7)), max_size=3),
    st.sampled_from([1, 4, 9, 256]),
)
@settings(max_examples=400, deadline=None)
def test_everybody_gets_the_same_tokens_as_alone(
    lengths: list[tuple[int, int]],
    overlap: bool,
    colocated: bool,
    max_running: int,
    aborts: list[tuple[int, int]],
    near_tokens: int,
) -> None:
    with patch.object(admission, "NEAR_TOKENS", near_tokens):
        live(lengths, overlap, colocated, max_running, aborts)


def run_with_aborts(world: World, aborts: dict[int, int]) -> set[RequestKey]:
    """Have all served to the end, with a request (by its id) aborted in some turns; returns those."""
    aborted = set()
    for turn in range(61):
        if turn in aborts:
            key = RequestKey(1, aborts[turn])
            aborted.add(key)
            world.s.abort(key)
        if world.s.keys_of(1) or world.in_flight:
            world.turn()
    world.run(3000)
    return aborted


def live(
    lengths: list[tuple[int, int]],
    overlap: bool,
    colocated: bool,
    max_running: int,
    aborts: list[tuple[int, int]],
) -> None:
    world = World(
        overlap=overlap, colocated=colocated, num_pages=15, num_rows=8, max_running=max_running, max_queued=99
    )
    prompts = {}
    for i, (prompt_len, max_tokens) in enumerate(lengths):
        prompts[submit(world.s, i, prompt_len, max_tokens=max_tokens)] = ([5] * prompt_len, max_tokens)
    aborted = run_with_aborts(world, dict(aborts))
    for key, (prompt, max_tokens) in prompts.items():
        told, right = world.told.get(key, []), expected(prompt, max_tokens)
        assert told == (right[: len(told)] if key in aborted else right)
    assert world.s.ledger().free == 15


def crowd(*, overlap: bool, colocated: bool = False) -> World:
    """Two who came with room for the beginning of their answers only."""
    world = World(overlap=overlap, num_pages=6, max_running=4, num_rows=8, colocated=colocated)
    for i in (1, 2):
        submit(world.s, i, 4, max_tokens=16, ignore_eos=True)
    return world


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("colocated", [True, False])
def test_the_youngest_is_retracted_and_comes_back(
    overlap: bool, colocated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_node.admission.NEAR_TOKENS", 4)
    world = crowd(overlap=overlap, colocated=colocated)
    world.run(200)
    assert world.s.num_retracted > 0
    assert all(len(told) == 16 for told in world.told.values())


def test_a_retracted_request_needs_no_prefill_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_node.admission.NEAR_TOKENS", 4)
    world = crowd(overlap=True)
    while not world.s.num_retracted:
        world.turn()
    world.s.prefill_lost(None)
    assert not [out for out in world.s.out if isinstance(out, FailedOut)]
    world.run(200)
    assert all(len(told) == 16 for told in world.told.values())


def test_a_retracted_request_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_node.admission.NEAR_TOKENS", 4)
    world = crowd(overlap=True)
    while not world.s.num_retracted:
        world.turn()
    assert world.s.abort(RequestKey(1, 2)) is None
    assert len(world.s.keys_of(1)) == 1
    world.run(200)
    assert len(world.told[RequestKey(1, 1)]) == 16


def test_nobody_enters_while_a_retracted_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_node.admission.NEAR_TOKENS", 4)
    world = crowd(overlap=False)
    while not world.s.num_retracted:
        world.turn()
    submit(world.s, 3, 1, max_tokens=1)
    grant = world.s.admit(IDLE)
    assert grant is None


def holder(computed: int, pages: int, prompt_len: int, max_tokens: int) -> Request:
    request = Request(int32s([5] * prompt_len), SamplingParams(max_tokens=max_tokens), prompt_len)
    request.computed_len, request.page_ids = computed, tuple(range(1, pages + 1))
    return request


def test_who_may_enter() -> None:
    new = holder(0, 0, 32, 4 * NEAR_TOKENS)
    near, far = NEAR_TOKENS // 16, 4 * NEAR_TOKENS // 16
    assert may_enter(new, (), 2 + far, 16)
    assert not may_enter(new, (), 1 + far, 16), "alone it could not finish"
    others = [holder(32, 2, 32, 10 * NEAR_TOKENS)] * 20
    assert may_enter(new, others, 2 + 21 * near, 16)
    assert not may_enter(new, others, 1 + 21 * near, 16), "the near future of all"
    ending = [holder(100, 7, 32, 69)] * 20  # one token more, for which there is room
    assert may_enter(new, ending, 2 + far, 16)


def test_a_request_that_fills_the_pool_enters_alone() -> None:
    world = World(overlap=True, num_pages=12, max_running=4, num_rows=8)
    key = submit(world.s, 1, 23, max_tokens=25, ignore_eos=True)  # 12 pages, whatever is rounded
    world.run(100)
    assert len(world.told[key]) == 25
    assert world.s.num_retracted == 0


def test_a_retracted_request_does_not_wait_behind_those_that_keep_coming(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("decode_node.admission.NEAR_TOKENS", 4)
    world = World(overlap=True, num_pages=7, max_running=2, num_rows=8, max_queued=9)
    for i in (1, 2):
        submit(world.s, i, 4, max_tokens=16, ignore_eos=True)
    while not world.s.num_retracted:
        world.turn()
    for i in range(3, 200):
        submit(world.s, i, 1, max_tokens=2, ignore_eos=True)
        world.turn()
        if len(world.told[RequestKey(1, 2)]) == 16:
            return
    raise AssertionError("others were served, and this one was not")


def test_one_that_needs_a_prefill_node_does_not_hold_up_a_retracted_one() -> None:
    queue: AdmissionQueue[str, str] = AdmissionQueue(9)
    queue.append_again("tried again", "needs a node", (True, 1))
    queue.append_again("retracted", "needs none", (False, 2))
    assert queue.first() == "needs none"
    queue.remove("retracted")
    assert queue.first() == "needs a node"


def test_all_that_wait_for_a_prefill_node_hear_that_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_node.admission.NEAR_TOKENS", 4)
    world = crowd(overlap=True)
    while not world.s.num_retracted:
        world.turn()
    keys = [submit(world.s, i, 1, max_tokens=2) for i in (3, 4)]
    world.s.prefill_lost(None)
    failed = [out.key for out in world.s.out if isinstance(out, FailedOut)]
    assert failed == keys
    world.s.out.clear()
    world.run(200)
    assert all(len(told) == 16 for told in world.told.values())
