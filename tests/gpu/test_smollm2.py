"""The default model in float32 on a GPU: 64 greedy tokens of each prompt are those of transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.system.client import Client, greedy
from tests.system.server import running

pytestmark = [pytest.mark.system, pytest.mark.smollm2]

NUM_TOKENS = 64
LENGTHS = (1, 15, 16, 17, 33, 100, 257, 600)
SET_UPS = {
    "cuda-ipc": ("--transfer", "cuda-ipc"),
    "frames": ("--transfer", "frames"),
    "colocated": ("--colocated",),
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(1000, 40_000) for _ in range(n)] for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(smollm2: Path, gpu: torch.device, prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).to(gpu)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=gpu)
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NUM_TOKENS)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("how", SET_UPS)
def test_float32_equals_transformers(
    smollm2: Path, prompts: list[list[int]], expected: list[list[int]], how: str
) -> None:
    args = ("--device", "cuda", "--dtype", "float32", "--kv-pages", "512", "--prefill-budget", "256")
    with running(smollm2, *args, *SET_UPS[how]) as server:
        client = Client(server.url, server.model)
        outcomes = client.ask_all([greedy(prompt, NUM_TOKENS) for prompt in prompts])
        assert [outcome.token_ids for outcome in outcomes] == expected
        assert client.ask(greedy(prompts[-1], NUM_TOKENS)).token_ids == expected[-1]
        client.assert_ledger_clean()
