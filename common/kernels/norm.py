"""RMS norm fused with the residual sum before it: one pass over a token instead of three.

What is added may be a product in parts (skinny.py), whose sum is one more thing done here. Sums are rounded
to the model's type before they go on, as the plain operations do it. Knows no weights' names and no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.ahead import launches_ahead, release_next, wait_for_inputs


@triton.jit
def _rms_norm_kernel(
    x,  # [parts, tokens, width]
    residual,  # [tokens, width]; written where ADD
    weight,  # [width]
    out,  # [tokens, width]
    part_stride,
    eps,
    parts: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    ADD: tl.constexpr,
    AHEAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    mask = columns < width
    scales = tl.load(weight + columns, mask, other=0.0).to(tl.float32)
    release_next(AHEAD)
    wait_for_inputs(AHEAD)
    kind = out.dtype.element_ty
    exact = tl.load(x + token * width + columns, mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts):
        exact += tl.load(x + part * part_stride + token * width + columns, mask, other=0.0)
    exact = exact.to(kind).to(tl.float32)
    if ADD:
        before = tl.load(residual + token * width + columns, mask, other=0.0)
        value = (exact + before.to(tl.float32)).to(kind)
        tl.store(residual + token * width + columns, value, mask)
        exact = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact) / width + eps)
    tl.store(out + token * width + columns, (exact * scale * scales).to(kind), mask)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, add: bool) -> Tensor:
    *several, tokens, width = x.shape
    out = torch.empty((tokens, width), dtype=weight.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    ahead = launches_ahead(x.device)
    _rms_norm_kernel[(tokens,)](
        x,
        residual,
        weight,
        out,
        tokens * width,
        eps,
        several[0] if several else 1,
        width,
        block,
        ADD=add,
        num_warps=min(16, max(1, block // 512)),
        AHEAD=ahead,
        launch_pdl=ahead,
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [tokens, width] normalized and scaled by weight [width] (Zhang, Sennrich 2019)."""
    return _launch(x, x, weight, eps, add=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to `residual` [tokens, width] in place, and return the sum normalized and scaled.

    x is [tokens, width], or [parts, tokens, width] f32, to be summed.
    """
    return _launch(x, residual, weight, eps, add=True)
