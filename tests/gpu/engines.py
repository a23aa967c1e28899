"""Engines on a GPU for tests: a small model with heads that flashinfer takes, and ways to drive it."""

from __future__ import annotations

import json
import select
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import EngineConfig, ModelConfig
from common.device.watch import EventWatch
from common.engine.batch import (
    ScheduleBatch,
    prepare_for_decode,
    prepare_for_extend,
    prepare_for_mixed,
    prepare_for_prebuilt,
)
from common.engine.chunking import advance, plan_chunks
from common.engine.loader import Duties, Engine, load_engine
from common.engine.step_loop import StepLoop
from common.messages import int32s
from common.request import Request, SampledToken, SamplingParams

VOCAB = 8192
PAGE = 16


def write_config(folder: Path, **settings: Any) -> Path:
    """Write the config.json of a 4-layer model with heads of 128; weights are dummies."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 2048,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "initializer_range": 0.05,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


def load(folder: Path, *, dtype: str = "bfloat16", load_format: str = "dummy", **settings: Any) -> Engine:
    """Load an engine that prefills and decodes, on GPU 0."""
    options: dict[str, Any] = {
        "device": "cuda",
        "page_size": PAGE,
        "kv_pages": 1024,
        "max_running": 16,
        "prefill_budget": 2048,
    }
    model = ModelConfig(str(folder), dtype=dtype, load_format=load_format)
    return load_engine(folder, model, EngineConfig(**(options | settings)), Duties())


@dataclass(frozen=True)
class Step:
    """A batch and whose tokens it brings."""

    batch: ScheduleBatch
    requests: tuple[Request, ...]


class Driver:
    """Runs requests through an engine without a scheduler: rows and pages in order of arrival."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop: StepLoop[Step] = StepLoop(
            engine.runner, EventWatch(engine.streams.device, "test"), overlap=engine.overlap
        )
        self._next_row, self._next_page = 1, 1

    def start(self, prompt: Sequence[int], sampling: SamplingParams) -> Request:
        """Give a prompt a row and pages for all that it may become."""
        num_pages = self.engine.layout.pages_for(len(prompt) + sampling.max_tokens)
        pages = tuple(range(self._next_page, self._next_page + num_pages))
        self._next_page += num_pages
        request = Request(int32s(prompt), sampling, len(prompt), row=self._next_row, page_ids=pages)
        self._next_row += 1
        self.engine.runner.grant(request)
        return request

    def extend(self, requests: Sequence[Request], budget: int) -> dict[int, SampledToken]:
        """Compute prompts in chunks; returns the first token of each, by row."""
        firsts: dict[int, SampledToken] = {}
        while any(not request.is_prefilled for request in requests):
            plans = plan_chunks([r for r in requests if not r.is_prefilled], budget, PAGE)
            step = Step(prepare_for_extend(plans, PAGE), tuple(p.request for p in plans if p.is_last))
            advance(plans, 0.0)
            firsts |= self.run(step)
        return firsts

    def part(self, request: Request, tokens: int) -> None:
        """Compute the first tokens of a prompt alone."""
        plans = plan_chunks([request], tokens, PAGE)
        step = Step(prepare_for_extend(plans, PAGE), ())
        advance(plans, 0.0)
        self.run(step)

    def mixed(self, prompt: Request, running: Sequence[Request]) -> dict[int, SampledToken]:
        """The rest of a prompt, beside a decode step of others."""
        plans = plan_chunks([prompt], prompt.prompt_len, PAGE)
        step = Step(prepare_for_mixed(plans, running, PAGE), (prompt, *running))
        advance(plans, 0.0)
        for request in running:
            request.computed_len += 1
            request.num_sampled += 1
        return self.run(step)

    def decode(self, requests: Sequence[Request]) -> dict[int, SampledToken]:
        """One decode step of all; their last outputs are in the relay."""
        step = Step(prepare_for_decode(requests, PAGE), tuple(requests))
        for request in requests:
            request.computed_len += 1
            request.num_sampled += 1
        return self.run(step)

    def force(self, requests: Sequence[Request]) -> None:
        """Seed the relay with the last output of each, whatever was drawn."""
        batch = prepare_for_prebuilt(requests, PAGE)
        self.engine.runner.seed_first_tokens(batch, requests)

    def run(self, step: Step) -> dict[int, SampledToken]:
        """Launch a step and wait for its tokens, by row."""
        self._loop.launch(step)
        while True:
            for result in self._loop.results(launched=False):
                rows = (request.row for request in result.step.requests)
                return dict(zip(rows, result.tokens, strict=True))
            select.select(self._loop.pollables(), [], [])
            self._loop.wake()
