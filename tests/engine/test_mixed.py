"""Prompts and decoding in MIXED steps give what EXTEND and DECODE steps of each request alone give."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from common.config import EngineConfig, ModelConfig
from common.device.watch import EventWatch
from common.engine.batch import ForwardMode, ScheduleBatch, prepare_for_decode, prepare_for_extend
from common.engine.chunking import advance, plan_chunks
from common.engine.loader import Engine, load_engine
from common.engine.step_loop import StepLoop
from common.messages import Submit, int32s
from common.request import LogitBias, LogprobArrays, Request, SampledToken, SamplingParams
from decode_node.entry import DecodeStep, RequestKey, StampsOut, TokenOut
from decode_node.scheduler import DecodeScheduler
from tests.model.paged import transformers_greedy
from tests.tiny import VOCAB_SIZE

PAGE, BUDGET, NUM_PAGES, MAX_RUNNING = 4, 16, 200, 8
NUM_TOKENS = 12
GREEDY = {"temperature": 0.0, "ignore_eos": True}
# One of each kind; all at once, and in each other's way.
SAMPLING = (
    SamplingParams(NUM_TOKENS, **GREEDY),
    SamplingParams(NUM_TOKENS, seed=7, ignore_eos=True),
    SamplingParams(NUM_TOKENS, seed=8, top_k=20, top_p=0.9, min_p=0.01, ignore_eos=True),
    SamplingParams(NUM_TOKENS, presence_penalty=1.0, frequency_penalty=0.5, **GREEDY),
    SamplingParams(NUM_TOKENS, repetition_penalty=1.5, seed=9, ignore_eos=True),
    SamplingParams(NUM_TOKENS, num_logprobs=3, **GREEDY),
    SamplingParams(NUM_TOKENS, num_logprobs=0, logit_bias=(LogitBias(5, 50.0),), seed=10, ignore_eos=True),
    SamplingParams(NUM_TOKENS, min_tokens=6, stop_token_ids=tuple(range(0, VOCAB_SIZE, 3)), seed=11),
)


def prompts() -> list[list[int]]:
    draw = random.Random(3)
    lengths = (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 40, 64, 65, 90, 7, 33)
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in lengths]


def load(model: Path) -> Engine:
    config = EngineConfig(
        page_size=PAGE, kv_pages=NUM_PAGES, max_running=MAX_RUNNING, prefill_budget=BUDGET, debug_checks=True
    )
    return load_engine(model, ModelConfig(str(model), dtype="float32"), config)


def run_alone(engine: Engine, prompt: list[int], sampling: SamplingParams) -> list[SampledToken]:
    """Compute the prompt in EXTEND steps, then the answer in DECODE steps, with nobody beside it."""
    pages = tuple(range(1, 1 + engine.layout.pages_for(len(prompt) + NUM_TOKENS)))
    request = Request(int32s(prompt), sampling, len(prompt), row=1, page_ids=pages)
    engine.runner.grant(request)
    answer: list[SampledToken] = []

    def step(batch: ScheduleBatch) -> None:
        record = engine.runner.launch(batch)
        record.copy_done.synchronize()
        answer.extend(record.result())

    while not request.is_prefilled:
        plans = plan_chunks([request], BUDGET, PAGE)
        batch = prepare_for_extend(plans, PAGE)
        advance(plans, 0.0)
        step(batch)
    while sampling.finish_reason(answer[-1].token, len(answer), engine.spec.eos_token_ids) is None:
        batch = prepare_for_decode([request], PAGE)
        request.computed_len += 1
        request.num_sampled += 1
        step(batch)
    return answer


class Node:
    """A scheduler that computes prompts by itself, and its engine."""

    def __init__(self, engine: Engine, *, overlap: bool, num_pages: int = NUM_PAGES) -> None:
        self.engine = engine
        self.scheduler = DecodeScheduler(
            layout=engine.layout,
            num_pages=num_pages,
            num_rows=engine.num_rows,
            max_running=MAX_RUNNING,
            max_queued=100,
            prefill_budget=BUDGET,
            colocated=True,
            vocab_size=VOCAB_SIZE,
            context_length=engine.spec.context_length,
            eos_token_ids=engine.spec.eos_token_ids,
        )
        watch = EventWatch(torch.device("cpu"), "step results")
        self.loop: StepLoop[DecodeStep] = StepLoop(engine.runner, watch, overlap=overlap)
        self.answers: dict[int, list[SampledToken]] = {}
        self.prompt_logprobs: dict[int, list[LogprobArrays | None]] = {}  # one a token
        self.modes: list[ForwardMode] = []
        self.now = 0.0

    def submit(self, number: int, prompt: list[int], sampling: SamplingParams) -> None:
        """Queue a request."""
        key, message = RequestKey(1, number), Submit(number, sampling, int32s(prompt))
        self.scheduler.submit(key, message, self.now, longest_prompt=len(prompt))

    def turn(self) -> bool:
        """Grant, launch, process; False when there was nothing to do. A step takes a second a token."""
        while (grant := self.scheduler.admit(())) is not None:
            self.engine.runner.grant(grant.entry.request)
            self.scheduler.granted(grant, None, self.now)
        parted, self.scheduler.parted = self.scheduler.parted, []
        for request in parted:
            if request.row:
                self.engine.runner.grant(request)
        if (prebuilt := self.scheduler.take_prebuilt()) is not None:
            requests = [entry.request for entry in prebuilt.entries]
            self.engine.runner.seed_first_tokens(prebuilt.batch, requests)
            self.scheduler.process_prebuilt(prebuilt, self.now)
        step = self.scheduler.next_step(self.now)
        if step is not None:
            self.loop.launch(step)
            self.modes.append(step.batch.mode)
            self.now += step.batch.extend_num_tokens
        results = list(self.loop.results(launched=step is not None))
        for result in results:
            self.scheduler.process(result.step, result.tokens, self.now)
        self.scheduler.check_invariants()
        for out in self.scheduler.out:
            if isinstance(out, StampsOut):
                continue
            assert isinstance(out, TokenOut)
            self.answers.setdefault(out.key.request_id, []).append(out.sampled)
            self.prompt_logprobs.setdefault(out.key.request_id, []).append(out.prompt_logprobs)
        self.scheduler.out.clear()
        return step is not None or bool(results)


def assert_same(answer: list[SampledToken], alone: list[SampledToken]) -> None:
    """The same tokens, and the same log probabilities up to the last bits."""
    assert [sampled.token for sampled in answer] == [sampled.token for sampled in alone]
    for ours, theirs in zip(answer, alone, strict=True):
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None and theirs.logprobs is not None:
            assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)
            assert ours.logprobs.top_logprobs == pytest.approx(theirs.logprobs.top_logprobs, abs=1e-4)
            assert ours.logprobs.top_ids == theirs.logprobs.top_ids


@pytest.mark.parametrize("overlap", [False, True])
def test_mixed_equals_extend_and_decode_apart(tiny_model: Path, overlap: bool) -> None:
    node = Node(load(tiny_model), overlap=overlap)
    requests = [(prompt, SAMPLING[i % len(SAMPLING)]) for i, prompt in enumerate(prompts())]
    for number, request in enumerate(requests):
        node.submit(number, *request)
        node.turn()
        node.turn()
    while node.turn():
        pass
    assert node.modes.count(ForwardMode.MIXED) > 30
    assert node.scheduler.ledger().free == NUM_PAGES
    alone = load(tiny_model)
    for number, request in enumerate(requests):
        assert_same(node.answers[number], run_alone(alone, *request))


@pytest.mark.parametrize("overlap", [False, True])
def test_mixed_equals_transformers(tiny_model: Path, overlap: bool) -> None:
    node = Node(load(tiny_model), overlap=overlap)
    asked = prompts()
    for number, prompt in enumerate(asked):
        node.submit(number, prompt, SAMPLING[0])
        node.turn()
    while node.turn():
        pass
    assert ForwardMode.MIXED in node.modes
    expected = transformers_greedy(tiny_model, asked, NUM_TOKENS)
    for number, tokens in enumerate(expected):
        assert [sampled.token for sampled in node.answers[number]] == tokens
