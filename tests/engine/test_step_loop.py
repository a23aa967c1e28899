"""Overlap changes when results are processed, never what is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from common.config import EngineConfig, ModelConfig
from common.device.watch import EventWatch
from common.engine.batch import ScheduleBatch, prepare_for_decode, prepare_for_extend
from common.engine.chunking import advance, plan_chunks
from common.engine.loader import Engine, load_engine
from common.engine.step_loop import StepLoop
from common.messages import int32s
from common.request import Request, SamplingParams
from tests.model.paged import transformers_greedy

PROMPT = [5, 17, 99, 200, 3, 42, 42, 8]


WATCH = EventWatch(torch.device("cpu"), "step results")


@dataclass(frozen=True)
class PlainStep:
    batch: ScheduleBatch
    name: str = field(default="")


def load(tiny_model: Path) -> Engine:
    config = EngineConfig(page_size=4, kv_pages=32, max_running=4, debug_checks=True)
    return load_engine(tiny_model, ModelConfig(str(tiny_model), dtype="float32"), config)


def start(engine: Engine, max_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    request = Request(int32s(PROMPT), sampling, len(PROMPT), row=1, page_ids=tuple(range(1, 9)))
    engine.runner.grant(request)
    return request


@pytest.mark.parametrize("overlap", [False, True])
def test_the_relay_carries_tokens_with_and_without_overlap(tiny_model: Path, overlap: bool) -> None:
    engine = load(tiny_model)
    request = start(engine, max_tokens=9)
    loop: StepLoop[PlainStep] = StepLoop(engine.runner, WATCH, overlap=overlap)
    tokens: list[int] = []
    lag = []
    for _ in range(10):
        step = None
        if not request.is_prefilled:
            plans = plan_chunks([request], 4, 4)
            step = PlainStep(prepare_for_extend(plans, 4))
            advance(plans, 0.0)
        elif request.wants_decode:
            step = PlainStep(prepare_for_decode([request], 4))
            request.computed_len += 1
            request.num_sampled += 1
        if step is not None:
            loop.launch(step)
        for result in loop.results(launched=step is not None):
            tokens += [sampled.token for sampled in result.tokens]
        lag.append(request.num_sampled - len(tokens))
    for result in loop.results(launched=False):
        tokens += [sampled.token for sampled in result.tokens]
    assert tokens == transformers_greedy(tiny_model, [PROMPT], 9)[0]
    assert max(lag) == (1 if overlap else 0)
    assert loop.is_idle


def test_with_nothing_to_launch_the_pending_step_is_processed_at_once(tiny_model: Path) -> None:
    engine = load(tiny_model)
    request = start(engine, max_tokens=1)
    loop: StepLoop[PlainStep] = StepLoop(engine.runner, WATCH, overlap=True)
    plans = plan_chunks([request], 8, 4)
    loop.launch(PlainStep(prepare_for_extend(plans, 4), "only"))
    assert list(loop.results(launched=True)) == []
    assert [result.step.name for result in loop.results(launched=False)] == ["only"]
