"""The gated activation of the feed-forward network in one pass: silu(gate) * up.

Knows no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.ahead import launches_ahead, release_next, wait_for_inputs

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(
    gate_up,
    out,
    width: tl.constexpr,
    block: tl.constexpr,
    AHEAD: tl.constexpr,
):
    release_next(AHEAD)
    wait_for_inputs(AHEAD)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    mask = columns < width
    gate = tl.load(gate_up + token * 2 * width + columns, mask, other=0.0)
    up = tl.load(gate_up + token * 2 * width + width + columns, mask, other=0.0)
    exact = gate.to(tl.float32)
    # Rounded between the two, as the plain operations do it.
    activated = (exact * tl.sigmoid(exact)).to(gate.dtype)
    tl.store(out + token * width + columns, activated * up, mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [tokens, width], of gate_up [tokens, 2 * width]: gate, then up."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    ahead = launches_ahead(gate_up.device)
    _silu_mul_kernel[(tokens, triton.cdiv(width, _BLOCK))](
        gate_up, out, width, _BLOCK, num_warps=4, AHEAD=ahead, launch_pdl=ahead
    )
    return out
