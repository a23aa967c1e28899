"""Rotary embedding: its frequencies, its table, and the rotation itself.

Knows no weights' names, no cache and no batch. The order of operations and the precision of each step are
those of `transformers` (models/llama/modeling_llama.py), which is the oracle of the tests.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from common.model.spec import RopeScaling


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return [head_dim / 2] f32, radians a token (Su et al., "RoFormer", 2021; scaled as Llama 3.1)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    # How often a rotation fits into the context that the model was first trained with: above
    # high_freq_factor it is kept, below low_freq_factor stretched, a blend of the two between.
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    kept = ((scaling.original_context_length / wavelengths - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rope_table(frequencies: Tensor, positions: int, dtype: torch.dtype) -> Tensor:
    """Return [positions, 2, head_dim]: cosines, and sines with the sign that `rotate` needs.

    The halves of a head are arranged as in `transformers`.
    """
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [tokens, heads, head_dim] by its tokens' angles, `cos` and `sin` [tokens, 1, head_dim]."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
