"""Scaled dot-product attention over gathered pages, in plain matrix products: the reference on every device.

Knows no scheduler. Host lengths decide shapes, so that nothing is read back from the device.

The pool keeps K and V of a page side by side; seen as halves, a layer is

    half    0       1       2       3       4       5
          [K of 0][V of 0][K of 1][V of 1][K of 2][V of 2] ...       (page 0 is padding)

1. One gather of halves 2p, then 2p + 1, copies whole pages: [K and V, request, token, KV head].
2. One copy out of that (it is in the cache now) puts each head's tokens side by side.
3. Two matrix products with a softmax between. The query heads that share a KV head stand beside the query
   tokens, so no K or V is repeated. In bfloat16 on a CPU this is three times as fast as torch's fused kernel,
   which multiplies at the speed of float32; in float32 a fifth slower with long prompts.

What a masked key holds must not matter: another request may have left a NaN there, which no mask would hide.
So pages past a request's tokens are read from page 0, and the rest of its last page is cleared after step 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from common.attention.base import AttentionInputs, StepPlan
from common.device.packed import PackedBlock
from common.device.pinned import to_device
from common.kv.pool import KVPool

# A group of decoding requests is one attention, padded to its longest. Another group costs as much as this
# many padded keys (measured on a CPU); more keys in one than MAX_GROUP_KEYS fall out of its caches.
_GROUP_KEYS = 1024
_MAX_GROUP_KEYS = 16384
# Scores of a block of query tokens, all heads: small enough for a CPU's caches, and bounded for any prompt.
_MAX_BLOCK_SCORES = 2**21
_MIN_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Gather:
    """How keys and values of some requests come out of the pool."""

    halves: Tensor  # [2 * requests * pages] i64
    pages: Tensor  # [2 * requests * pages, half's size], where they are copied to
    tails: Tensor | None  # [n] i64, which of the tokens in `pages` to clear
    tokens: Tensor  # [2 * requests * pages * page_size, kv_heads * head_dim], `pages` by token
    by_token: Tensor  # [2, requests, kv_heads, keys, head_dim], `pages` without what is behind the keys
    by_head: Tensor  # the same shape, contiguous: where they are copied to next


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests with one token each, attended to together."""

    members: Tensor | None  # [requests] i64 in the flat token dimension; None: all of it, in order
    gather: _Gather
    mask: Tensor | None  # [requests, 1, keys] of the pool's dtype, 0 or -inf; None: nothing is padded


@dataclass(frozen=True, slots=True)
class _Span:
    """One request's tokens, `start` to `end` in the flat token dimension."""

    start: int
    end: int
    prefix: int  # tokens before them
    gather: _Gather


def group_by_length(lens: Sequence[int]) -> list[list[int]]:
    """Split requests (indices of `lens`) so that padding each to its group's longest costs little."""
    groups: list[list[int]] = []
    padded = longest = 0
    for index in sorted(range(len(lens)), key=lambda i: -lens[i]):
        padded += longest - lens[index]
        if not groups or padded > _GROUP_KEYS or (len(groups[-1]) + 1) * longest > _MAX_GROUP_KEYS:
            groups.append([])
            padded, longest = 0, lens[index]
        groups[-1].append(index)
    return groups


class SdpaAttention:
    """An AttentionBackend over any torch device."""

    def __init__(self, pool: KVPool, num_heads: int) -> None:
        layout = pool.layout
        self._page_size = layout.page_size
        self._kv_heads = layout.kv_heads
        self._head_dim = layout.head_dim
        self._heads = num_heads
        self._group = num_heads // layout.kv_heads
        self._scale = layout.head_dim**-0.5
        self._dtype = pool.data.dtype
        self._device = pool.device
        self._halves = pool.data.view(layout.layers, 2 * (pool.num_pages + 1), -1).unbind(0)
        # What steps 1 and 2 fill, in turn for every part of every layer; grows to what is needed.
        self._workspace = torch.empty((2, 0), dtype=self._dtype, device=self._device)
        self._step: list[_Group | _Span] = []

    def pack(
        self,
        block: PackedBlock,
        prefix_lens: Sequence[int],
        extend_lens: Sequence[int],
        num_decode: int,
        pad: int,
    ) -> StepPlan | None:
        """See AttentionBackend; lengths are taken from the host."""
        return None

    def can_capture(self, seq_lens: Sequence[int], tokens: int) -> bool:
        """See AttentionBackend: a step has shapes of its own each time."""
        return False

    def plan(self, inputs: AttentionInputs) -> None:
        """Make gather indices and masks, which all layers share."""
        lens = [p + n for p, n in zip(inputs.prefix_lens_cpu, inputs.extend_lens_cpu, strict=True)]
        table = inputs.page_table[:, : self._pages_for(max(lens))].index_select(0, inputs.rows)
        inputs = replace(inputs, page_table=table)  # from here on, a row is a request
        single = [i for i, n in enumerate(inputs.extend_lens_cpu) if n == 1]
        groups = [[single[i] for i in group] for group in group_by_length([lens[i] for i in single])]
        spans = [[i] for i, n in enumerate(inputs.extend_lens_cpu) if n > 1]
        self._reserve(max(len(part) * self._pages_for(max(lens[i] for i in part)) for part in groups + spans))
        starts = (0, *accumulate(inputs.extend_lens_cpu))
        self._step = [self._plan_span(inputs, i, starts[i]) for (i,) in spans]
        self._step += [self._plan_members(inputs, lens, group, starts) for group in groups]

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See AttentionBackend. Keys and values are read from the pool, the step's own too."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in self._step:
            keys, values = self._fetch(layer, part.gather)
            match part:
                case _Span(start, end, prefix):
                    self._attend_span(q[start:end], keys, values, prefix, out[start:end])
                case _Group(members=None, mask=mask):
                    return self._attend_group(q, keys, values, mask)
                case _Group(members=Tensor() as members, mask=mask):
                    out.index_copy_(
                        0, members, self._attend_group(q.index_select(0, members), keys, values, mask)
                    )
        return out

    def _plan_members(
        self, inputs: AttentionInputs, lens: Sequence[int], group: Sequence[int], starts: Sequence[int]
    ) -> _Group:
        """Plan for the requests `group` of the batch."""
        if len(group) == len(lens):
            return self._plan_group(lens, inputs.page_table, inputs.seq_lens, None)
        requests, members = (
            to_device(ids, torch.int64, self._device) for ids in (group, [starts[i] for i in group])
        )
        pages, seq_lens = inputs.page_table[requests], inputs.seq_lens[requests]
        return self._plan_group([lens[i] for i in group], pages, seq_lens, members)

    def _plan_group(
        self, lens: Sequence[int], page_table: Tensor, seq_lens: Tensor, members: Tensor | None
    ) -> _Group:
        longest = max(lens)
        if min(lens) == longest:
            return _Group(members, self._plan_gather(page_table, longest, None), None)
        # Host lengths say which tokens lie behind a request's own in its last page.
        width = self._pages_for(longest) * self._page_size
        tails = [
            i * width + position
            for i, length in enumerate(lens)
            for position in range(length, self._pages_for(length) * self._page_size)
        ]
        tails += [len(lens) * width + tail for tail in tails]  # of K, and of V
        first_page_tokens = torch.arange(0, width, self._page_size, device=self._device)
        page_table = page_table[:, : width // self._page_size].masked_fill(
            first_page_tokens >= seq_lens.unsqueeze(1), 0
        )
        padding = torch.arange(longest, device=self._device) >= seq_lens.unsqueeze(1)
        mask = torch.zeros(padding.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(padding, -torch.inf)
        tails_there = to_device(tails, torch.int64, self._device) if tails else None
        return _Group(members, self._plan_gather(page_table, longest, tails_there), mask.unsqueeze(1))

    def _plan_span(self, inputs: AttentionInputs, index: int, start: int) -> _Span:
        prefix, extend = inputs.prefix_lens_cpu[index], inputs.extend_lens_cpu[index]
        gather = self._plan_gather(inputs.page_table[index : index + 1], prefix + extend, None)
        return _Span(start, start + extend, prefix, gather)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def _reserve(self, num_pages: int) -> None:
        """Make the workspace hold that many pages, twice."""
        size = 2 * num_pages * self._page_size * self._kv_heads * self._head_dim
        if size > self._workspace.shape[1]:
            self._workspace = torch.empty((2, size), dtype=self._dtype, device=self._device)

    def _plan_gather(self, page_table: Tensor, num_keys: int, tails: Tensor | None) -> _Gather:
        """Plan for the first `num_keys` tokens of requests, whose pages are the rows of `page_table`."""
        k_halves = 2 * page_table[:, : self._pages_for(num_keys)].reshape(-1)
        halves = torch.cat((k_halves, k_halves + 1))
        head = (self._kv_heads, self._head_dim)
        pages = self._workspace[0, : len(halves) * self._page_size * self._kv_heads * self._head_dim]
        by_token = pages.view(2, len(page_table), -1, *head)[:, :, :num_keys].transpose(2, 3)
        return _Gather(
            halves=halves,
            pages=pages.view(len(halves), -1),
            tails=tails,
            tokens=pages.view(-1, self._kv_heads * self._head_dim),
            by_token=by_token,
            by_head=self._workspace[1, : by_token.numel()].view(by_token.shape),
        )

    def _fetch(self, layer: int, gather: _Gather) -> tuple[Tensor, Tensor]:
        """Return keys and values, [requests * kv_heads, keys, head_dim], valid until the next fetch."""
        torch.index_select(self._halves[layer], 0, gather.halves, out=gather.pages)
        if gather.tails is not None:
            gather.tokens.index_fill_(0, gather.tails, 0)
        keys, values = gather.by_head.copy_(gather.by_token).flatten(1, 2).unbind(0)
        return keys, values

    def _attend_group(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        scores = torch.bmm(q.reshape(len(keys), -1, self._head_dim) * self._scale, keys.transpose(1, 2))
        if mask is not None:
            scores.view(len(q), -1, scores.shape[-1]).add_(mask)
        return torch.bmm(scores.softmax(-1), values).view(q.shape)

    def _attend_span(self, q: Tensor, keys: Tensor, values: Tensor, prefix: int, out: Tensor) -> None:
        by_head = (len(q), self._kv_heads, self._group, self._head_dim)
        q, out = q.view(by_head).permute(1, 2, 0, 3), out.view(by_head).permute(1, 2, 0, 3)
        tokens = q.shape[2]
        block = max(_MIN_BLOCK_TOKENS, _MAX_BLOCK_SCORES // (self._heads * keys.shape[1]))
        for start in range(0, tokens, block):
            end = min(start + block, tokens)
            # No key past the block's last token, so that only the block's own square is masked.
            k, v = (t[:, : prefix + end].contiguous() for t in (keys, values))
            part = (q[:, :, start:end] * self._scale).reshape(self._kv_heads, -1, self._head_dim)
            scores = torch.bmm(part, k.transpose(1, 2))
            if end - start > 1:
                square = torch.full((end - start,) * 2, -torch.inf, dtype=q.dtype, device=q.device).triu_(1)
                scores.view(-1, end - start, k.shape[1])[..., prefix + start :].add_(square)
            out[:, :, start:end] = torch.bmm(scores.softmax(-1), v).view(out[:, :, start:end].shape)
