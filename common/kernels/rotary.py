"""Rotary embedding fused with what surrounds it: norms of queries and keys, and the append to the KV pool.

One program is a token and some of its heads. What is rotated may be a product in parts (skinny.py). Knows no
layer and no request: positions and places in the pool are given.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.ahead import launches_ahead, release_next, wait_for_inputs

_HEADS_PER_PROGRAM = 8


@triton.jit
def _rotate_append_kernel(
    qkv,  # [parts, tokens, heads + 2 * kv_heads, head_dim]
    table,  # [positions, 2, head_dim]: cosines, signed sines
    positions,  # [tokens] i64
    cache_loc,  # [tokens] i64
    pool,  # [pages, 2, page_size, kv_heads, head_dim] of the layer
    q_norm,  # [head_dim]
    k_norm,  # [head_dim]
    q_out,  # [tokens, heads, head_dim]
    k_out,  # [tokens, kv_heads, head_dim]
    eps,
    part_stride,
    parts: tl.constexpr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_dim: tl.constexpr,
    block_heads: tl.constexpr,
    NORM: tl.constexpr,
    KEEP_K: tl.constexpr,
    AHEAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    dim = tl.arange(0, block_dim)
    half: tl.constexpr = head_dim // 2
    partner_dim = tl.where(dim < half, dim + half, dim - half)
    in_head = dim < head_dim
    mask = (head < heads + 2 * kv_heads)[:, None] & in_head[None, :]
    start = qkv + (token * (heads + 2 * kv_heads) + head)[:, None] * head_dim
    release_next(AHEAD)
    wait_for_inputs(AHEAD)
    x = tl.load(start + dim[None, :], mask, other=0.0)
    partner = tl.load(start + partner_dim[None, :], mask, other=0.0)
    for part in tl.static_range(1, parts):
        x += tl.load(start + part * part_stride + dim[None, :], mask, other=0.0)
        partner += tl.load(start + part * part_stride + partner_dim[None, :], mask, other=0.0)
    x = x.to(q_out.dtype.element_ty)
    partner = partner.to(q_out.dtype.element_ty)
    is_q = head < heads
    is_k = (head >= heads) & (head < heads + kv_heads)
    if NORM:
        exact = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(exact * exact, 1) / head_dim + eps)[:, None]
        wq = tl.load(q_norm + dim, in_head, other=0.0).to(tl.float32)[None, :]
        wk = tl.load(k_norm + dim, in_head, other=0.0).to(tl.float32)[None, :]
        wq_partner = tl.load(q_norm + partner_dim, in_head, other=0.0).to(tl.float32)[None, :]
        wk_partner = tl.load(k_norm + partner_dim, in_head, other=0.0).to(tl.float32)[None, :]
        w = tl.where(is_q[:, None], wq, wk)
        w_partner = tl.where(is_q[:, None], wq_partner, wk_partner)
        raw = x
        x = (exact * scale * w).to(raw.dtype)
        partner = (partner.to(tl.float32) * scale * w_partner).to(raw.dtype)
        x = tl.where((is_q | is_k)[:, None], x, raw)
    position = tl.load(positions + token)
    cos = tl.load(table + position * 2 * head_dim + dim, in_head, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(table + (position * 2 + 1) * head_dim + dim, in_head, other=0.0).to(tl.float32)[None, :]
    # Rounded between product and sum, as the plain operations do it.
    turned = (x.to(tl.float32) * cos).to(x.dtype).to(tl.float32) + partner.to(tl.float32) * sin
    value = tl.where((is_q | is_k)[:, None], turned.to(x.dtype), x)
    tl.store(q_out + (token * heads + head)[:, None] * head_dim + dim[None, :], value, mask & is_q[:, None])
    if KEEP_K:
        k_start = k_out + (token * kv_heads + head - heads)[:, None] * head_dim
        tl.store(k_start + dim[None, :], value, mask & is_k[:, None])
    loc = tl.load(cache_loc + token)
    # K of a page, then its V: [pages, 2, page_size, kv_heads, head_dim].
    kv_head = tl.where(is_k, head - heads, head - heads - kv_heads)
    half_page = (loc // page_size) * 2 + tl.where(is_k, 0, 1)
    place = (half_page * page_size + loc % page_size) * kv_heads + kv_head
    tl.store(pool + place[:, None] * head_dim + dim[None, :], value, mask & (head >= heads)[:, None])


def rotate_append(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    cache_loc: Tensor,
    pool: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    heads: int,
    *,
    keep_k: bool,
) -> tuple[Tensor, Tensor | None]:
    """Normalize and rotate queries and keys; write keys and values into the pool.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim], contiguous, or in parts to be summed, as f32.
        table: [positions, 2, head_dim] of `rope_table`.
        positions: [tokens] i64.
        cache_loc: [tokens] i64, page * page_size + offset.
        pool: [pages, 2, page_size, kv_heads, head_dim], the layer's pages, contiguous.
        norms: weights [head_dim] for queries and for keys, or None.
        eps: of the norms.
        heads: query heads.
        keep_k: return the rotated keys too.

    Returns:
        Queries [tokens, heads, head_dim] and, where asked for, keys [tokens, kv_heads, head_dim].
    """
    *several, tokens, width = qkv.shape
    page_size, kv_heads, head_dim = pool.shape[2:]
    all_heads = heads + 2 * kv_heads
    q_out = torch.empty((tokens, heads, head_dim), dtype=pool.dtype, device=qkv.device)
    k_out = (
        torch.empty((tokens, kv_heads, head_dim), dtype=pool.dtype, device=qkv.device) if keep_k else q_out
    )
    ahead = launches_ahead(qkv.device)
    q_norm, k_norm = (table, table) if norms is None else norms
    _rotate_append_kernel[(tokens, triton.cdiv(all_heads, _HEADS_PER_PROGRAM))](
        qkv,
        table,
        positions,
        cache_loc,
        pool,
        q_norm,
        k_norm,
        q_out,
        k_out,
        eps,
        tokens * width,
        several[0] if several else 1,
        heads,
        kv_heads,
        head_dim,
        page_size,
        triton.next_power_of_2(head_dim),
        _HEADS_PER_PROGRAM,
        NORM=norms is not None,
        KEEP_K=keep_k,
        num_warps=4,
        AHEAD=ahead,
        launch_pdl=ahead,
    )
    return q_out, k_out if keep_k else None
