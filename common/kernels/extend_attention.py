"""Causal attention of prompts' chunks over the paged pool: short ones, and what flashinfer does not take.

A program is a block of a request's query tokens and a KV head; the query heads that share it stand beside
each other, so that keys and values are read once for all of them (the layout of FlashAttention-2, Dao 2023,
over pages). Keys and values of the chunk itself are in the pool already. Which program does what is the
host's plan (`common/attention/blocks.py`); nothing here reads a host value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.room import pipeline_stages

_LOG2_E = 1.4426950408889634
_LEAST_DIM = 16  # of a matrix product
_ROWS = 64  # query tokens times heads of a group, of a program
_BLOCK_BYTES = 128  # keys at once, times the bytes of a number: 64 in bfloat16, 32 in float32


@triton.jit(do_not_specialize=["rows", "block_requests", "block_starts", "token_starts", "prefix_lens"])
def _attend_extend_kernel(
    q,  # [tokens, heads, head_dim]
    pool,  # [pages, 2, page_size, kv_heads, head_dim] of the layer
    page_table,  # [rows, table_width]
    rows,  # [requests]
    block_requests,  # [blocks]
    block_starts,  # [blocks], token of the request's chunk
    token_starts,  # [requests + 1], where each request's chunk begins among the tokens
    prefix_lens,  # [requests]
    out,  # [tokens, heads, head_dim]
    table_width,
    scale,  # of the scores, times log2(e)
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_dim: tl.constexpr,
    group_rows: tl.constexpr,  # heads of a group, padded to a power of two
    block_queries: tl.constexpr,
    block_tokens: tl.constexpr,
    precision: tl.constexpr,
):
    kv_head = tl.program_id(0)
    block = tl.program_id(1)
    request = tl.load(block_requests + block)
    first_token = tl.load(token_starts + request)
    num_queries = tl.load(token_starts + request + 1) - first_token
    prefix = tl.load(prefix_lens + request)
    start = tl.load(block_starts + block)
    group: tl.constexpr = heads // kv_heads
    row = tl.arange(0, block_queries * group_rows)
    query = start + row // group_rows
    member = row % group_rows
    dim = tl.arange(0, block_dim)
    in_head = dim < head_dim
    live_row = (query < num_queries) & (member < group)
    mask = live_row[:, None] & in_head[None, :]
    place = (first_token + query).to(tl.int64) * heads + kv_head * group + member
    queries = tl.load(q + place[:, None] * head_dim + dim[None, :], mask, other=0.0)
    best = tl.full((block_queries * group_rows,), float("-inf"), tl.float32)
    total = tl.zeros((block_queries * group_rows,), tl.float32)
    found = tl.zeros((block_queries * group_rows, block_dim), tl.float32)
    pages = page_table + tl.load(rows + request) * table_width
    position = prefix + query
    # A block that begins behind the chunk is one of a captured step, and has nothing to do.
    end = tl.where(start < num_queries, prefix + tl.minimum(start + block_queries, num_queries), 0)
    v_pool = pool + page_size * kv_heads * head_dim
    for first in range(0, end, block_tokens):
        token = first + tl.arange(0, block_tokens)
        live = token < end
        page = tl.load(pages + token // page_size, live, other=0).to(tl.int64)
        slot = page * (2 * page_size) + token % page_size
        kv = (slot * kv_heads + kv_head) * head_dim
        kv_mask = live[:, None] & in_head[None, :]
        keys = tl.load(pool + kv[:, None] + dim[None, :], kv_mask, other=0.0)
        values = tl.load(v_pool + kv[:, None] + dim[None, :], kv_mask, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=precision) * scale
        # A row that is padding sees the first token, so that no row is without any.
        seen = (token[None, :] <= position[:, None]) & live[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        keep = tl.exp2(best - new_best)
        total = total * keep + tl.sum(weights, 1)
        found = tl.dot(weights.to(values.dtype), values, found * keep[:, None], input_precision=precision)
        best = new_best
    result = (found / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * head_dim + dim[None, :], result, mask)


def queries_per_block(heads: int, kv_heads: int) -> int:
    """Return how many query tokens a program takes."""
    group_rows: int = triton.next_power_of_2(heads // kv_heads)
    return max(1, _ROWS // group_rows)


def attend_extend(
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    rows: Tensor,
    blocks: tuple[Tensor, Tensor, Tensor, Tensor],
) -> Tensor:
    """Attend with chunks of prompts; their own keys and values are in the pool.

    Args:
        q: [tokens, heads, head_dim], rotated, contiguous.
        pool: [pages, 2, page_size, kv_heads, head_dim], the layer's pages.
        page_table: [rows, width] page ids.
        rows: [requests], rows of the page table.
        blocks: requests, starts, token starts and prefix lengths of `ExtendBlocks`.

    Returns:
        [tokens, heads, head_dim].
    """
    _, heads, head_dim = q.shape
    page_size, kv_heads = pool.shape[2], pool.shape[3]
    block_requests, block_starts, token_starts, prefix_lens = blocks
    group_rows = triton.next_power_of_2(heads // kv_heads)
    block_dim = max(_LEAST_DIM, triton.next_power_of_2(head_dim))
    out = torch.empty_like(q)
    _attend_extend_kernel[(kv_heads, len(block_requests))](
        q,
        pool,
        page_table,
        rows,
        block_requests,
        block_starts,
        token_starts,
        prefix_lens,
        out,
        page_table.stride(0),
        head_dim**-0.5 * _LOG2_E,
        heads,
        kv_heads,
        head_dim,
        page_size,
        block_dim,
        group_rows,
        queries_per_block(heads, kv_heads),
        _BLOCK_BYTES // q.element_size(),
        # Single precision is not to become TF32.
        "ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=pipeline_stages(q.device, 2 * _BLOCK_BYTES * block_dim, 2),
    )
    return out
