"""Attention by torch's scaled_dot_product_attention over gathered pages: the reference on every device.

Knows no scheduler. Host lengths decide shapes, so that nothing is read back from the device.

The pool keeps K and V of a page side by side; seen as halves, a layer is

    half    0       1       2       3       4       5
          [K of 0][V of 0][K of 1][V of 1][K of 2][V of 2] ...       (page 0 is padding)

so that one gather of halves 2p and 2p + 1 gives all K, then all V, each contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from common.attention.base import AttentionInputs
from common.kv.pool import KVPool


@dataclass(frozen=True, slots=True)
class _Batched:
    """Every request has one token: one attention for all, padded to the longest."""

    halves: Tensor  # [2 * requests * pages] i64
    num_keys: int
    mask: Tensor | None  # [requests, 1, 1, keys] of the pool's dtype, 0 or -inf; None: nothing is padded


@dataclass(frozen=True, slots=True)
class _Span:
    """One request's tokens, `start` to `end` in the flat token dimension."""

    start: int
    end: int
    halves: Tensor  # [2 * pages] i64
    num_keys: int
    mask: (
        Tensor | None
    )  # [tokens, keys] of the pool's dtype, 0 or -inf; None: causal from key 0, or one token


class SdpaAttention:
    """An AttentionBackend over any torch device."""

    def __init__(self, pool: KVPool, num_heads: int) -> None:
        layout = pool.layout
        self._page_size = layout.page_size
        self._kv_heads = layout.kv_heads
        self._head_dim = layout.head_dim
        self._group = num_heads // layout.kv_heads
        self._dtype = pool.data.dtype
        self._device = pool.device
        num_halves = 2 * (pool.num_pages + 1)
        self._halves = pool.data.view(layout.layers, num_halves, -1).unbind(0)
        token_shape = (num_halves * layout.page_size, layout.kv_heads, layout.head_dim)
        self._tokens = pool.data.view(layout.layers, *token_shape).unbind(0)
        self._rows = torch.empty(0)
        self._step: _Batched | tuple[_Span, ...] = ()

    def plan(self, inputs: AttentionInputs) -> None:
        """Make gather indices and masks, which all layers share."""
        loc = inputs.out_cache_loc
        k_rows = loc + loc // self._page_size * self._page_size
        self._rows = torch.cat((k_rows, k_rows + self._page_size))
        if all(n == 1 for n in inputs.extend_lens_cpu):
            self._step = self._plan_batched(inputs)
        else:
            self._step = self._plan_spans(inputs)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See AttentionBackend."""
        self._tokens[layer].index_copy_(0, self._rows, torch.cat((k, v)))
        match self._step:
            case _Batched() as step:
                return self._attend_batched(layer, q, step)
            case spans:
                return torch.cat([self._attend_span(layer, q[s.start : s.end], s) for s in spans])

    def _plan_batched(self, inputs: AttentionInputs) -> _Batched:
        lens = [prefix + 1 for prefix in inputs.prefix_lens_cpu]
        num_keys = max(lens)
        mask = None
        if min(lens) < num_keys:
            keys = torch.arange(num_keys, device=self._device)
            padding = keys >= inputs.seq_lens.unsqueeze(1)
            mask = torch.zeros(padding.shape, dtype=self._dtype, device=self._device)
            mask = mask.masked_fill_(padding, -torch.inf)[:, None, None]
        return _Batched(self._halves_of(inputs.page_table, num_keys), num_keys, mask)

    def _plan_spans(self, inputs: AttentionInputs) -> tuple[_Span, ...]:
        spans: list[_Span] = []
        start = 0
        for i, (prefix, extend) in enumerate(
            zip(inputs.prefix_lens_cpu, inputs.extend_lens_cpu, strict=True)
        ):
            num_keys = prefix + extend
            mask = None
            if prefix and extend > 1:
                mask = torch.full(
                    (extend, num_keys), -torch.inf, dtype=self._dtype, device=self._device
                ).triu_(prefix + 1)
            halves = self._halves_of(inputs.page_table[i : i + 1], num_keys)
            spans.append(_Span(start, start + extend, halves, num_keys, mask))
            start += extend
        return tuple(spans)

    def _halves_of(self, page_table: Tensor, num_keys: int) -> Tensor:
        """Return the halves that hold the first `num_keys` tokens: all of K, then all of V."""
        k_halves = 2 * page_table[:, : -(-num_keys // self._page_size)].reshape(-1)
        return torch.cat((k_halves, k_halves + 1))

    def _keys_values(self, layer: int, halves: Tensor, requests: int, num_keys: int) -> Tensor:
        """Gather K and V: [2, requests, keys, kv_heads, head_dim]."""
        gathered = self._halves[layer].index_select(0, halves)
        return gathered.view(2, requests, -1, self._kv_heads, self._head_dim)[:, :, :num_keys]

    def _attend_batched(self, layer: int, q: Tensor, step: _Batched) -> Tensor:
        # With one token a request, the query heads that share a KV head can stand where SDPA has query
        # positions: no K or V is repeated, and the mask (over keys alone) fits all of them.
        requests = q.shape[0]
        k, v = self._keys_values(layer, step.halves, requests, step.num_keys).transpose(2, 3).unbind(0)
        grouped = q.reshape(requests, self._kv_heads, self._group, self._head_dim)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=step.mask)
        return out.reshape(q.shape)

    def _attend_span(self, layer: int, q: Tensor, span: _Span) -> Tensor:
        # KV heads stand where SDPA has the batch, and the query heads that share one where it has heads:
        # K and V are expanded without a copy.
        tokens = q.shape[0]
        kv = self._keys_values(layer, span.halves, 1, span.num_keys)[:, 0].transpose(1, 2)
        k, v = kv.unsqueeze(2).expand(-1, -1, self._group, -1, -1).unbind(0)
        grouped = q.reshape(tokens, self._kv_heads, self._group, self._head_dim).permute(1, 2, 0, 3)
        causal = span.mask is None and tokens > 1
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=span.mask, is_causal=causal)
        return out.permute(2, 0, 1, 3).reshape(q.shape)
