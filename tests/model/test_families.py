"""Every family that is served equals transformers, paged and in chunks: tokens exactly, logits to 1e-4."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.model.paged import PagedRunner, PagedSequence, transformers_greedy
from tests.tiny import VOCAB_SIZE, write_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama3 rope": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama with biases": (LlamaConfig, {"attention_bias": True}),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 32}),
    "mistral within its window": (MistralConfig, {"sliding_window": 512}),
    "qwen2": (Qwen2Config, {"sliding_window": 32, "tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
}


@pytest.fixture(params=FAMILIES, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config_type, settings = FAMILIES[request.param]
    return write_tiny_model(tmp_path_factory.mktemp("family"), config_type=config_type, **settings)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(2)
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (1, 17, 200)]


def test_tokens_equal_transformers(folder: Path, prompts: list[list[int]]) -> None:
    runner = PagedRunner(folder, page_size=16, num_pages=40)
    assert runner.generate(prompts, 40, budget=48) == transformers_greedy(folder, prompts, 40)


def test_logits_equal_transformers(folder: Path, prompts: list[list[int]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    runner = PagedRunner(folder, page_size=16, num_pages=40)
    sequence = PagedSequence(prompts[2])
    with torch.no_grad():
        expected = model(torch.tensor([prompts[2]])).logits[0].log_softmax(-1)
    for n in (80, 48, 71, 1):
        logprobs = runner.step([(sequence, n)])[0].log_softmax(-1)
        torch.testing.assert_close(logprobs, expected[sequence.cached - 1], rtol=0, atol=1e-4)
