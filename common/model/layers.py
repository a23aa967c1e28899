"""The arithmetic of a Llama layer as functions of tensors.

Knows no weights' names, no cache and no batch. The order of operations and the precision of each step are
those of `transformers` (models/llama/modeling_llama.py), which is the oracle of the tests.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale `x` [tokens, hidden] to unit root mean square, in float32, then by `weight`."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * (x32 * scale).to(x.dtype)


def rope_table(head_dim: int, theta: float, positions: int, dtype: torch.dtype) -> Tensor:
    """Return [positions, 2, head_dim]: cosines, and sines with the sign that `rotate` needs.

    Su et al., "RoFormer", 2021, with the halves arranged as in `transformers`.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / theta**exponents
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [tokens, heads, head_dim] by its tokens' angles, `cos` and `sin` [tokens, 1, head_dim]."""
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((second, first), -1), sin)


def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Apply the gated feed-forward network; `gate_up` [2 * intermediate, hidden] is gate, then up."""
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)
