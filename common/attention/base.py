"""What an attention backend is: it attends over the pool, into which a step's keys and values were written.

Knows no scheduler and no model; a step arrives as `AttentionInputs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from common.attention.splits import DecodeSplits
from common.device.packed import PackedBlock


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One step of several requests, whose tokens follow each other in the flat token dimension.

    Requests that extend come first, the `num_decode` that decode (one token each) last. A padded CUDA graph
    has more requests on the device than the host's tuples: what is over is row 0.
    """

    rows: Tensor  # [requests] i64, of the page table
    page_table: Tensor  # [rows + 1, width] i64 page ids; past a request's pages 0, the padding page
    seq_lens: Tensor  # [requests] i32, tokens in KV after this step
    positions: Tensor  # [tokens] i64
    out_cache_loc: Tensor  # [tokens] i64, page * page_size + offset where this step's K and V go
    prefix_lens_cpu: tuple[int, ...]  # tokens in KV before this step
    extend_lens_cpu: tuple[int, ...]  # tokens of this step
    num_decode: int = 0
    splits: DecodeSplits | None = None  # of the requests that decode, where the backend wants them


class AttentionBackend(Protocol):
    """Causal grouped-query attention over a paged KV pool."""

    def pack(self, block: PackedBlock, seq_lens: Sequence[int], padded: int) -> DecodeSplits | None:
        """Add what the decoding requests of a step need on the device to its block.

        Args:
            block: the step's host metadata.
            seq_lens: tokens in KV after the step, a request.
            padded: requests on the device.
        """
        ...

    def plan(self, inputs: AttentionInputs) -> None:
        """Prepare what all layers share; called once a step, before the first layer."""
        ...

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend.

        Args:
            layer: index of the layer.
            q: [tokens, heads, head_dim], rotated.
            k: [tokens, kv_heads, head_dim], rotated; in the pool too.
            v: [tokens, kv_heads, head_dim]; in the pool too.

        Returns:
            [tokens, heads, head_dim].
        """
        ...
