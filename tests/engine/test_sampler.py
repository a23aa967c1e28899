"""Sampling against an independent, slow oracle: one row at a time, plain Python and numpy."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.device.packed import PackedBlock
from common.engine.batch import SampleRow
from common.engine.penalties import PenaltyState
from common.engine.sampler import _mix, resolve_sampling, sample, uniform
from common.request import SamplingParams

CPU = torch.device("cpu")


def draw(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    rows = [
        SampleRow(i, p, position, may_stop=True)
        for i, (p, position) in enumerate(zip(params, positions, strict=True))
    ]
    with torch.inference_mode():
        state = PenaltyState(len(rows), logits.shape[-1], CPU)
        inputs = resolve_sampling(rows, range(1, len(rows) + 1), (), PackedBlock(CPU))
        return sample(logits.clone(), inputs, state).tokens.tolist()


def oracle(logits: np.ndarray, p: SamplingParams, u: float) -> int:
    """Filter by rank in plain Python, then walk the vocabulary until the mass passes u."""
    if p.temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / p.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    if p.top_k:
        order = order[: p.top_k]
    mass = sum(probs[i] for i in order)
    kept, total = [], 0.0
    for i in order:
        if kept and total >= p.top_p * mass:
            break
        kept.append(i)
        total += probs[i]
    kept = [i for i in kept if probs[i] >= p.min_p * probs[order[0]]]
    left = sum(probs[i] for i in kept) * u
    for i in sorted(kept):
        left -= probs[i]
        if left < 0:
            return i
    return max(kept)


@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 20, 1000]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    position=st.integers(0, 10_000),
)
def test_a_draw_is_what_the_oracle_says(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, position: int
) -> None:
    p = SamplingParams(
        max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    logits = torch.randn((1, 50), generator=torch.Generator().manual_seed(seed % 1000)) * 3
    expected = oracle(logits[0].numpy(), p, uniform(seed, 0, position))
    assert draw(logits, [p], [position]) == [expected]


def test_a_draw_does_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((8, 300), generator=generator)
    params = [
        SamplingParams(max_tokens=1, temperature=t, top_k=k, top_p=tp, seed=s)
        for s, (t, k, tp) in enumerate([(0, 0, 1), (1, 0, 1), (1, 5, 1), (2, 0, 0.5)] * 2)
    ]
    positions = list(range(10, 18))
    together = draw(logits, params, positions)
    alone = [draw(logits[i : i + 1], [params[i]], [positions[i]])[0] for i in range(8)]
    assert together == alone


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    n = 4000
    params = [SamplingParams(max_tokens=1, temperature=1.0, seed=42)] * n
    tokens = draw(probs.log().expand(n, 4).contiguous(), params, list(range(n)))
    counts = np.bincount(tokens, minlength=4) / n
    # Five standard deviations of a binomial; the seed is fixed, so this cannot flicker.
    for count, p in zip(counts, probs.tolist(), strict=True):
        assert abs(count - p) < 5 * math.sqrt(p * (1 - p) / n)


def test_uniform_depends_on_each_of_its_parts_and_stays_in_range() -> None:
    values = {uniform(s, c, p) for s in (0, 1, 2**64 - 1) for c in (0, 1) for p in (0, 1, 99)}
    assert len(values) == 18
    assert all(0 <= u < 1 for u in values)


def test_uniform_is_pinned() -> None:
    """The draw of a seed is a promise to clients: it may not change with a version."""
    assert _mix(1234567) == 6457827717110365317  # SplitMix64's published first output for this seed
    assert uniform(1234, 0, 17) == 0.2094093268155176


def test_stop_tokens_are_not_drawn_before_min_tokens() -> None:
    logits = torch.tensor([[9.0, 8.0, 7.0, 1.0]] * 3)
    p = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=2, stop_token_ids=(1,))
    ignoring = SamplingParams(
        max_tokens=9, temperature=0.0, min_tokens=2, stop_token_ids=(1,), ignore_eos=True
    )
    rows = [
        SampleRow(0, p, 5, may_stop=False),
        SampleRow(1, p, 5, may_stop=True),
        SampleRow(2, ignoring, 5, may_stop=False),
    ]
    with torch.inference_mode():
        state = PenaltyState(3, 4, CPU)
        tokens = sample(
            logits, resolve_sampling(rows, (1, 2, 3), (0,), PackedBlock(CPU)), state
        ).tokens.tolist()
    assert tokens == [2, 0, 0]


def test_a_temperature_near_zero_is_greedy_and_no_other_logit_leads_past_the_vocabulary() -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0], [2.0, 2.0, 1.0]])
    cold = [SamplingParams(max_tokens=1, temperature=1e-300, seed=seed) for seed in (1, 2)]
    assert draw(logits, cold, [3, 4])[0] == 1
    broken = torch.full((1, 3), float("nan"))
    (token,) = draw(broken, [SamplingParams(max_tokens=1, temperature=1.0, seed=1)], [0])
    assert 0 <= token < 3
