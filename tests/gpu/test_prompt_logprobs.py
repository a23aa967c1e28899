"""Log probabilities of prompts on a GPU: transformers' in float32, and in bfloat16 beside captured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common.engine.loader import Engine
from common.request import LogprobArrays, TokenLogprobs
from tests.engine.test_prompt_logprobs import LENGTHS, WISHES, Scored, check, oracle, prompt_of
from tests.gpu.engines import Driver, load, write_config
from tests.gpu.test_engine import GREEDY, prompts_of

__all__ = ["oracle"]


def arrays_of(
    engine: Engine, prompts: Sequence[list[int]], wishes: Sequence[int | None], budget: int
) -> list[LogprobArrays | None]:
    """Compute all prompts together."""
    driver = Driver(engine)
    requests = [
        driver.start(prompt, replace(GREEDY, num_prompt_logprobs=num_top))
        for prompt, num_top in zip(prompts, wishes, strict=True)
    ]
    driver.extend(requests, budget)
    return [request.prompt_logprobs for request in requests]


@pytest.mark.parametrize("budget", [64, 2048])
def test_float32_equals_transformers(tiny_model: Path, oracle: dict[int, Scored], budget: int) -> None:
    engine = load(tiny_model, dtype="float32", load_format="auto")
    told = arrays_of(engine, [prompt_of(length) for length in LENGTHS], WISHES, budget)
    for arrays, length, num_top in zip(told, LENGTHS, WISHES, strict=True):
        check(arrays, length, num_top, oracle)


def test_chunks_equal_the_whole(tmp_path: Path, gpu: torch.device) -> None:
    """Nor does it matter that steps without such prompts are captured."""
    folder = write_config(tmp_path / "model")
    prompts = prompts_of([700, 40, 33])
    wishes = (3, None, 5)
    whole = arrays_of(load(folder, cuda_graphs="off"), prompts, wishes, 2048)
    parts = arrays_of(load(folder), prompts, wishes, 256)
    for ours, theirs, prompt, num_top in zip(parts, whole, prompts, wishes, strict=True):
        if num_top is None:
            assert ours is None
            continue
        assert ours is not None
        assert theirs is not None
        assert ours.fits(len(prompt) - 1, num_top)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=0.1)
        np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, rtol=0, atol=0.1)
        rows: list[TokenLogprobs] = list(ours.rows(0, len(prompt)))
        assert all(list(row.top_logprobs) == sorted(row.top_logprobs, reverse=True) for row in rows)
        assert all(row.logprob <= row.top_logprobs[0] for row in rows)
