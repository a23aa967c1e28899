"""What an attention backend is: it writes a step's keys and values into the pool and attends over it.

Knows no scheduler and no model; a step arrives as `AttentionInputs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One step of several requests, whose tokens follow each other in the flat token dimension."""

    page_table: Tensor  # [requests, max_pages] i64 page ids; past a request's pages 0, the padding page
    seq_lens: Tensor  # [requests] i64, tokens in KV after this step
    prefix_lens_cpu: tuple[int, ...]  # tokens in KV before this step
    extend_lens_cpu: tuple[int, ...]  # tokens of this step, 1 each when decoding
    out_cache_loc: Tensor  # [tokens] i64, page * page_size + offset where this step's K and V go


class AttentionBackend(Protocol):
    """Causal grouped-query attention over a paged KV pool."""

    def plan(self, inputs: AttentionInputs) -> None:
        """Prepare what all layers share; called once a step, before the first layer."""
        ...

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write `k` and `v` into the pool, then attend.

        Args:
            layer: index of the layer.
            q: [tokens, heads, head_dim], rotated.
            k: [tokens, kv_heads, head_dim], rotated.
            v: [tokens, kv_heads, head_dim].

        Returns:
            [tokens, heads, head_dim].
        """
        ...
