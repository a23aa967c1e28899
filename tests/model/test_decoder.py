"""The decoder over paged KV equals transformers, token for token in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.attention.base import AttentionInputs
from common.kv.pool import KVPool
from common.model.spec import load_spec
from tests.model.paged import PagedRunner, load_decoder, transformers_greedy
from tests.tiny import VOCAB_SIZE, write_tiny_model

NUM_TOKENS = 64
EMOJI = "Tell me 😀🎉👩‍🚀 a story about 🐈!"
CHINESE = "请用中文介绍一下北京的历史。"


@pytest.fixture(scope="module")
def prompts(tiny_model: Path) -> list[list[int]]:
    draw = random.Random(1)
    lengths = (1, 15, 16, 17, 32, 33, 300)
    ids = [[draw.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in lengths]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    return [*ids, tokenizer.encode(EMOJI), tokenizer.encode(CHINESE)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path, prompts: list[list[int]]) -> list[list[int]]:
    return transformers_greedy(tiny_model, prompts, NUM_TOKENS)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prompts_alone_equal_transformers(
    tiny_model: Path, prompts: list[list[int]], expected: list[list[int]], page_size: int
) -> None:
    runner = PagedRunner(tiny_model, page_size=page_size, num_pages=400 // page_size + 1)
    assert [runner.generate([p], NUM_TOKENS)[0] for p in prompts] == expected


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("budget", [10**9, 48, 23])
def test_ragged_batch_in_chunks_equals_transformers(
    tiny_model: Path, prompts: list[list[int]], expected: list[list[int]], page_size: int, budget: int
) -> None:
    runner = PagedRunner(tiny_model, page_size=page_size, num_pages=1200 // page_size + 20)
    assert runner.generate(prompts, NUM_TOKENS, budget=budget) == expected


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dirt", [float("nan"), float("inf")])
def test_what_a_page_held_before_does_not_matter(
    tiny_model: Path, prompts: list[list[int]], expected: list[list[int]], dirt: float, page_size: int
) -> None:
    runner = PagedRunner(tiny_model, page_size=page_size, num_pages=1200 // page_size + 20, dirt=dirt)
    assert runner.generate(prompts, NUM_TOKENS, budget=64) == expected


def test_tied_embeddings_equal_transformers(tmp_path: Path, prompts: list[list[int]]) -> None:
    folder = write_tiny_model(tmp_path, seed=3, tie_word_embeddings=True)
    runner = PagedRunner(folder, page_size=16, num_pages=100)
    assert runner.generate(prompts, 16) == transformers_greedy(folder, prompts, 16)


def test_bfloat16_logits_are_close_to_transformers(tiny_model: Path, prompts: list[list[int]]) -> None:
    ids = torch.tensor(prompts[4])
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(ids[None]).logits[0].float()
    spec = load_spec(tiny_model)
    pool = KVPool(spec.kv_layout(32, "bfloat16"), 1, torch.device("cpu"))
    positions = torch.arange(32)
    row, ends = torch.tensor([0]), torch.tensor([32])
    inputs = AttentionInputs(row, torch.tensor([[1]]), ends, positions, 32 + positions, (0,), (32,))
    decoder = load_decoder(tiny_model, spec, "bfloat16", pool)
    logits = decoder.forward(ids, inputs, positions).float()
    # Two results in bfloat16 (8 bits of mantissa) of sums in another order: a few units in the last place.
    torch.testing.assert_close(logits, expected, rtol=0.05, atol=0.05)


def test_the_padding_page_stays_zero(tiny_model: Path, prompts: list[list[int]]) -> None:
    runner = PagedRunner(tiny_model, page_size=16, num_pages=80)
    runner.generate(prompts[:3], 4)
    assert not runner.pool.data[:, 0].any()


@pytest.mark.smollm2
def test_smollm2_equals_transformers(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    words = " ".join(f"Sentence {i} says that the river runs to the sea." for i in range(30))
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    texts = ["Hello", EMOJI, CHINESE, words]
    prompts = [chat, *(tokenizer.encode(text) for text in texts), chat[:17]]
    runner = PagedRunner(smollm2, page_size=16, num_pages=100)
    expected = transformers_greedy(smollm2, prompts, NUM_TOKENS)
    assert runner.generate(prompts, NUM_TOKENS, budget=128) == expected
    assert runner.generate(prompts[:1], NUM_TOKENS) == expected[:1]
    assert "Paris" in tokenizer.decode(expected[0])
