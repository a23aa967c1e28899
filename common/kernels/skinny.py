"""Matrix products of a few tokens: as fast as the weights can be read.

A decode step of up to 64 requests reads every weight once and computes little, so what counts is that all
multiprocessors read all the time. cuBLAS has too few programs for the narrow matrices of a layer (12 us for
34 MB, where 8 would do), and a pause of a microsecond between kernels. Here a product is cut along K too, and
its parts are left for the next kernel to sum, which has to read them anyway (norm.py, rotary.py); gate and up
are multiplied and activated in one. Kernels of the chain are launched ahead (programmatic dependent launch):
each waits on the device until the one before it is done (ahead.py).

Measured on an H200, a layer of Llama-3.1-8B without attention: 124 -> 116 us for one token, 127 -> 120 for
16, 133 -> 128 for 64; more tokens are cuBLAS's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.ahead import EARLY_TOKENS, launches_ahead, release_next, wait_for_inputs
from common.kernels.room import shared_bytes

MAX_TOKENS = 64
_LEAST_ROWS = 16  # of a matrix product
_BLOCK_N = 64
_WIDE_K, _NARROW_K = 128, 64  # up to 32 tokens, and more: what fits into shared memory, several times
_MAX_SPLITS = 8
_SHARED_BYTES = 200 << 10  # of the longest pipeline below
_PROGRAMS = 396  # three a multiprocessor of an H100 or H200


@triton.jit
def _product_kernel(
    x,  # [tokens, k]
    weight,  # [n, k]
    out,  # [splits, tokens, n] f32
    tokens,
    n,
    k,
    split_k,
    rows: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    column = tl.program_id(0) * block_n + tl.arange(0, block_n)
    split = tl.program_id(1)
    token = tl.arange(0, rows)
    inner = split * split_k + tl.arange(0, block_k)
    live = (token < tokens)[:, None]
    x_at = x + token[:, None] * k + inner[None, :]
    weight_at = weight + column.to(tl.int64)[:, None] * k + inner[None, :]
    release_next(AHEAD and EARLY)
    wait_for_inputs(AHEAD)
    total = tl.zeros((rows, block_n), tl.float32)
    for _ in range(0, split_k, block_k):
        total = tl.dot(tl.load(x_at, live, other=0.0), tl.trans(tl.load(weight_at)), total)
        x_at += block_k
        weight_at += block_k
    release_next(AHEAD and not EARLY)
    tl.store(out + (split * tokens + token[:, None]) * n + column[None, :], total, live)


@triton.jit
def _gated_kernel(
    x,  # [tokens, k]
    weight,  # [2 * n, k]: gate, then up
    out,  # [tokens, n]
    tokens,
    n,
    k,
    rows: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    column = tl.program_id(0) * block_n + tl.arange(0, block_n)
    token = tl.arange(0, rows)
    inner = tl.arange(0, block_k)
    live = (token < tokens)[:, None]
    x_at = x + token[:, None] * k + inner[None, :]
    gate_at = weight + column.to(tl.int64)[:, None] * k + inner[None, :]
    up_at = gate_at + n.to(tl.int64) * k
    release_next(AHEAD and EARLY)
    wait_for_inputs(AHEAD)
    gate = tl.zeros((rows, block_n), tl.float32)
    up = tl.zeros((rows, block_n), tl.float32)
    for _ in range(0, k, block_k):
        values = tl.load(x_at, live, other=0.0)
        gate = tl.dot(values, tl.trans(tl.load(gate_at)), gate)
        up = tl.dot(values, tl.trans(tl.load(up_at)), up)
        x_at += block_k
        gate_at += block_k
        up_at += block_k
    release_next(AHEAD and not EARLY)
    # Rounded where the plain operations do it.
    kind = out.dtype.element_ty
    exact = gate.to(kind).to(tl.float32)
    activated = (exact * tl.sigmoid(exact)).to(kind) * up.to(kind)
    tl.store(out + token[:, None] * n + column[None, :], activated, live)


def _block_k(tokens: int) -> int:
    return _WIDE_K if tokens <= 32 else _NARROW_K


def can_multiply(tokens: int, weight: Tensor) -> bool:
    """Say whether `product` and `gated` take so many tokens times weight [n, k]."""
    n, k = weight.shape
    # No block is masked. gate and up are [2 * n, k]: each half must fill its blocks.
    fits = n % (2 * _BLOCK_N) == 0 and k % _WIDE_K == 0
    fits &= weight.dtype in (torch.bfloat16, torch.float16) and shared_bytes(weight.device) >= _SHARED_BYTES
    return 0 < tokens <= MAX_TOKENS and fits


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in parts along k that are still to be summed: [splits, tokens, n] f32.

    Args:
        x: [tokens, k], contiguous.
        weight: [n, k].
    """
    tokens, k = x.shape
    n, block_k = weight.shape[0], _block_k(tokens)
    splits = _MAX_SPLITS
    while splits > 1 and (k % (splits * block_k) or n // _BLOCK_N * splits > _PROGRAMS):
        splits //= 2
    out = torch.empty((splits, tokens, n), dtype=torch.float32, device=x.device)
    ahead = launches_ahead(x.device)
    _product_kernel[(n // _BLOCK_N, splits)](
        x,
        weight,
        out,
        tokens,
        n,
        k,
        k // splits,
        max(_LEAST_ROWS, triton.next_power_of_2(tokens)),
        _BLOCK_N,
        block_k,
        num_warps=4,
        num_stages=4 if n > k else 6,
        AHEAD=ahead,
        EARLY=tokens <= EARLY_TOKENS,
        launch_pdl=ahead,
    )
    return out


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """Return silu(x @ gate.T) * (x @ up.T), [tokens, n], of weight [2 * n, k]: gate, then up."""
    tokens, k = x.shape
    n = weight.shape[0] // 2
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    ahead = launches_ahead(x.device)
    _gated_kernel[(n // _BLOCK_N,)](
        x,
        weight,
        out,
        tokens,
        n,
        k,
        max(_LEAST_ROWS, triton.next_power_of_2(tokens)),
        _BLOCK_N,
        _WIDE_K,
        num_warps=4,
        num_stages=6 if tokens <= 32 else 4,
        AHEAD=ahead,
        EARLY=tokens <= EARLY_TOKENS,
        launch_pdl=ahead,
    )
    return out
