"""What a node on a GPU takes of its memory, in numbers of bytes: on large cards and on small ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import EngineConfig
from common.engine.sizing import (
    GIB,
    StepSizes,
    activation_bytes,
    gpu_num_pages,
    gpu_prefill_budget,
    step_bytes,
    weight_bytes,
)
from common.errors import ConfigError
from common.model.spec import ModelSpec, load_spec

LLAMA_8B = Path(__file__).parents[2] / "benchmarks" / "llama-3.1-8b"
H200, A10 = 140 * GIB, 22 * GIB
DEFAULT_BUDGET, MAX_RUNNING = 16384, 256


@pytest.fixture
def llama() -> ModelSpec:
    return load_spec(LLAMA_8B, "dummy")


def pages(spec: ModelSpec, total_bytes: int, fraction: float, **options: int) -> int:
    """Pages of a prefill node with the defaults, on a card that it finds free."""
    config = EngineConfig(gpu_memory_fraction=fraction, **options)
    budget = gpu_prefill_budget(spec, "bfloat16", DEFAULT_BUDGET, int(total_bytes * fraction), 16)
    sizes = StepSizes(tokens=budget, samples=MAX_RUNNING, rows=MAX_RUNNING)
    weights = weight_bytes(spec, "bfloat16")
    return gpu_num_pages(
        config,
        spec.kv_layout(16, "bfloat16"),
        total_bytes=total_bytes,
        free_bytes=total_bytes - weights,
        weight_bytes=weights,
        beside_bytes=step_bytes(spec, "bfloat16", sizes, 16),
    )


def test_weights_are_those_of_the_model(llama: ModelSpec) -> None:
    assert weight_bytes(llama, "bfloat16") == 2 * 8_030_261_248  # parameters, by its model card


def test_a_large_card_takes_the_whole_budget_and_a_small_one_what_it_can_afford(llama: ModelSpec) -> None:
    for total_bytes, fraction, expected in ((H200, 0.9, 16384), (H200, 0.45, 16384), (A10, 0.9, 8192)):
        part_bytes = int(total_bytes * fraction)
        budget = gpu_prefill_budget(llama, "bfloat16", DEFAULT_BUDGET, part_bytes, 16)
        assert budget == expected
        assert activation_bytes(llama, "bfloat16", budget) <= part_bytes / 16
    assert gpu_prefill_budget(llama, "bfloat16", DEFAULT_BUDGET, 1, 16) == 2048, "no prompt would get on"
    assert gpu_prefill_budget(llama, "bfloat16", DEFAULT_BUDGET, 1, 4096) == 4096, "a chunk holds a page"


def test_the_pool_is_what_is_left_and_small_cards_start(llama: ModelSpec) -> None:
    assert 50_000 < pages(llama, H200, 0.9) < 60_000
    assert pages(llama, A10, 0.98) * 16 > 4096
    assert pages(llama, H200, 0.9, kv_pages=100) == 100


def test_too_little_memory_says_how_much_is_needed(llama: ModelSpec) -> None:
    with pytest.raises(ConfigError, match=r"does not fit on the GPU: weights 14\.96, steps .* need .* GiB"):
        pages(llama, A10, 0.5)
    with pytest.raises(ConfigError, match=r"a KV pool of 100000 pages does not fit"):
        pages(llama, H200, 0.9, kv_pages=100_000)
