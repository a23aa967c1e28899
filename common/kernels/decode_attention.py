"""Attention of decode steps over the paged pool: one query token a request, keys and values cut into splits.

A decode step reads every key and value once, so it is as fast as the memory where every multiprocessor has
the same share of the reading. The splits (`common/attention/splits.py`) see to that, whatever the lengths. A
program is a split and a KV head; the query heads that share it stand beside each other, padded to 16 for the
matrix units. Whoever is the last of a request's splits puts together what they found, by their weights (Dao
et al., "Flash-Decoding", 2023). Nothing here reads a host value, so a step can be captured as a CUDA graph:
programs without a split end at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.kernels.ahead import EARLY_TOKENS, launches_ahead, release_next, wait_for_inputs
from common.kernels.room import pipeline_stages

_LEAST_ROWS = _LEAST_DIM = 16  # of a matrix product
_LOG2_E = 1.4426950408889634


# Where in a step's block rows and lengths of the decoding requests begin depends on the prompts before them:
# a build of its own for each alignment would be made in the middle of serving.
@triton.jit(do_not_specialize=["rows", "seq_lens"])
def _attend_splits_kernel(
    q,  # [requests, heads, head_dim]
    pool,  # [pages, 2, page_size, kv_heads, head_dim] of the layer
    page_table,  # [rows, table_width]
    rows,  # [requests]
    seq_lens,  # [requests]
    split_requests,  # [splits], -1: none
    split_starts,  # [splits], token
    split_tokens,  # [1], tokens of every split but a request's last
    split_indptr,  # [requests + 1]
    partial,  # [splits, heads, head_dim] f32
    partial_lse,  # [splits, heads] f32, base 2
    arrived,  # [requests, kv_heads] i32, zero before and after
    out,  # [requests, heads, head_dim]
    table_width,
    scale,  # of the scores, times log2(e)
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    block_dim: tl.constexpr,
    block_rows: tl.constexpr,
    block_tokens: tl.constexpr,
    precision: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.load(split_requests + split)
    if request < 0:
        return
    start = tl.load(split_starts + split)
    end = tl.minimum(start + tl.load(split_tokens), tl.load(seq_lens + request))
    group: tl.constexpr = heads // kv_heads
    row = tl.arange(0, block_rows)
    dim = tl.arange(0, block_dim)
    in_head = dim < head_dim
    head = kv_head * group + row
    mask = (row < group)[:, None] & in_head[None, :]
    place = (request.to(tl.int64) * heads + head)[:, None] * head_dim + dim[None, :]
    pages = page_table + tl.load(rows + request) * table_width
    release_next(AHEAD and EARLY)
    wait_for_inputs(AHEAD)
    queries = tl.load(q + place, mask, other=0.0)
    best = tl.full((block_rows,), float("-inf"), tl.float32)
    total = tl.zeros((block_rows,), tl.float32)
    found = tl.zeros((block_rows, block_dim), tl.float32)
    for first in range(start, end, block_tokens):
        token = first + tl.arange(0, block_tokens)
        # What lies behind `end` is another request's, or NaN: it is not even read.
        live = token < end
        if block_tokens % page_size == 0:
            index = tl.arange(0, block_tokens // page_size)
            page = tl.load(pages + first // page_size + index, first + index * page_size < end, other=0)
            slot = page.to(tl.int64)[:, None] * (2 * page_size) + tl.arange(0, page_size)[None, :]
            slot = slot.reshape((block_tokens,))
        else:
            page = tl.load(pages + token // page_size, live, other=0)
            slot = page.to(tl.int64) * (2 * page_size) + token % page_size
        kv = (slot * kv_heads + kv_head) * head_dim
        kv_mask = live[:, None] & in_head[None, :]
        keys = tl.load(pool + kv[:, None] + dim[None, :], kv_mask, other=0.0)
        v_pool = pool + page_size * kv_heads * head_dim
        values = tl.load(v_pool + kv[:, None] + dim[None, :], kv_mask, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=precision) * scale
        scores = tl.where(live[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        keep = tl.exp2(best - new_best)
        total = total * keep + tl.sum(weights, 1)
        found = tl.dot(weights.to(values.dtype), values, found * keep[:, None], input_precision=precision)
        best = new_best
    first_split = tl.load(split_indptr + request)
    num_splits = tl.load(split_indptr + request + 1) - first_split
    if num_splits == 1:
        tl.store(out + place, (found / total[:, None]).to(out.dtype.element_ty), mask)
        return
    release_next(AHEAD and not EARLY)
    partial_place = (split * heads + head)[:, None] * head_dim + dim[None, :]
    tl.store(partial + partial_place, found / total[:, None], mask)
    tl.store(partial_lse + split * heads + head, best + tl.log2(total), row < group)
    # Every thread's stores come before the count that says that they are there.
    tl.debug_barrier()
    counter = arrived + request * kv_heads + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1 < num_splits:
        return
    tl.store(counter, 0)
    best = tl.full((block_rows,), float("-inf"), tl.float32)
    total = tl.zeros((block_rows,), tl.float32)
    found = tl.zeros((block_rows, block_dim), tl.float32)
    for one in range(first_split, first_split + num_splits):
        lse = tl.load(partial_lse + one * heads + head, row < group, other=0.0, cache_modifier=".cg")
        part_place = (one * heads + head)[:, None] * head_dim + dim[None, :]
        part = tl.load(partial + part_place, mask, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, lse)
        keep, weight = tl.exp2(best - new_best), tl.exp2(lse - new_best)
        found = found * keep[:, None] + part * weight[:, None]
        total = total * keep + weight
        best = new_best
    tl.store(out + place, (found / total[:, None]).to(out.dtype.element_ty), mask)


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """What splits leave for each other; used by one layer after the other."""

    partial: Tensor  # [splits, heads, head_dim] f32
    partial_lse: Tensor  # [splits, heads] f32
    arrived: Tensor  # [requests, kv_heads] i32, zero between launches

    @classmethod
    def of(
        cls, splits: int, requests: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> DecodeWorkspace:
        """Allocate for so many splits and requests at the most."""
        return cls(
            partial=torch.empty((splits, heads, head_dim), dtype=torch.float32, device=device),
            partial_lse=torch.empty((splits, heads), dtype=torch.float32, device=device),
            arrived=torch.zeros((requests, kv_heads), dtype=torch.int32, device=device),
        )


def attend_decode(
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    splits: tuple[Tensor, Tensor, Tensor, Tensor],
    workspace: DecodeWorkspace,
    block_tokens: int,
) -> Tensor:
    """Attend with one token a request; its own key and value are in the pool.

    Args:
        q: [requests, heads, head_dim], rotated, contiguous.
        pool: [pages, 2, page_size, kv_heads, head_dim], the layer's pages.
        page_table: [rows, width] page ids.
        rows: [requests], rows of the page table.
        seq_lens: [requests] tokens in the pool.
        splits: requests, starts, tokens and indptr of `DecodeSplits`.
        workspace: for at least as many splits and requests.
        block_tokens: tokens read at once; a split starts at a multiple of it.

    Returns:
        [requests, heads, head_dim]; what belongs to no split is undefined.
    """
    _, heads, head_dim = q.shape
    page_size, kv_heads = pool.shape[2], pool.shape[3]
    split_requests, split_starts, split_tokens, split_indptr = splits
    block_dim = max(_LEAST_DIM, triton.next_power_of_2(head_dim))
    out = torch.empty_like(q)
    ahead = launches_ahead(q.device)
    _attend_splits_kernel[(kv_heads, len(split_requests))](
        q,
        pool,
        page_table,
        rows,
        seq_lens,
        split_requests,
        split_starts,
        split_tokens,
        split_indptr,
        workspace.partial,
        workspace.partial_lse,
        workspace.arrived,
        out,
        page_table.stride(0),
        head_dim**-0.5 * _LOG2_E,
        heads,
        kv_heads,
        head_dim,
        page_size,
        block_dim,
        max(_LEAST_ROWS, triton.next_power_of_2(heads // kv_heads)),
        block_tokens,
        # Single precision is the tests' reference: it is not to become TF32.
        "ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=pipeline_stages(q.device, 2 * block_tokens * block_dim * q.element_size(), 3),
        AHEAD=ahead,
        EARLY=len(q) <= EARLY_TOKENS,
        launch_pdl=ahead,
    )
    return out
