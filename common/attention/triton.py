"""Attention on GPUs by kernels of our own: for every shape, with nothing to install or to build first.

Decode steps are as fast as the memory. Long prompts are slower than with flashinfer, which takes over there
where it can (flashinfer.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.attention.base import AttentionInputs, StepPlan
from common.attention.blocks import pack_blocks
from common.attention.splits import SPLIT_UNIT_TOKENS, DecodeSplits, pack_splits
from common.device.packed import PackedBlock
from common.kernels.decode_attention import DecodeWorkspace, attend_decode
from common.kernels.extend_attention import attend_extend, queries_per_block
from common.kv.pool import KVPool

# Reads under way keep a multiprocessor busy when it has about four programs.
_PROGRAMS_PER_SM = 4


class TritonAttention:
    """An AttentionBackend for one GPU.

    Args:
        pool: on that GPU.
        num_heads: query heads.
        max_requests: of a step, padding included.
    """

    def __init__(self, pool: KVPool, num_heads: int, max_requests: int) -> None:
        layout, device = pool.layout, pool.device
        self._pages = pool.data.unbind(0)
        self._queries = queries_per_block(num_heads, layout.kv_heads)
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._spare = -(-_PROGRAMS_PER_SM * multiprocessors // layout.kv_heads)
        self._workspace = DecodeWorkspace.of(
            max_requests + self._spare, max_requests, num_heads, layout.kv_heads, layout.head_dim, device
        )
        self._inputs: AttentionInputs | None = None

    def pack(
        self,
        block: PackedBlock,
        prefix_lens: Sequence[int],
        extend_lens: Sequence[int],
        num_decode: int,
        pad: int,
    ) -> StepPlan:
        """See AttentionBackend."""
        splits = self.pack_decode(block, prefix_lens, num_decode, pad)
        num_extend = len(extend_lens) - num_decode
        if not num_extend:
            return StepPlan(splits, None)
        blocks = pack_blocks(block, prefix_lens[:num_extend], extend_lens[:num_extend], self._queries)
        return StepPlan(splits, blocks)

    def can_capture(self, seq_lens: Sequence[int], tokens: int) -> bool:
        """See AttentionBackend."""
        return True

    def pack_decode(
        self, block: PackedBlock, prefix_lens: Sequence[int], num_decode: int, pad: int
    ) -> DecodeSplits | None:
        """Add what the decoding requests need alone."""
        if not num_decode:
            return None
        seq_lens = [length + 1 for length in prefix_lens[len(prefix_lens) - num_decode :]]
        return pack_splits(block, seq_lens, num_decode + pad, self._spare)

    def plan(self, inputs: AttentionInputs) -> None:
        """See AttentionBackend."""
        self._inputs = inputs

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See AttentionBackend; keys and values are read from the pool, the step's own too."""
        inputs = self._inputs
        assert inputs is not None
        assert inputs.plan is not None
        if (blocks := inputs.plan.blocks) is None:
            return self.decode(layer, q, inputs)
        split = inputs.num_extend_tokens
        extended = attend_extend(
            q[:split].contiguous(),
            self._pages[layer],
            inputs.page_table,
            inputs.rows,
            (blocks.requests, blocks.starts, blocks.token_starts, blocks.prefix_lens),
        )
        if not inputs.num_decode:
            return extended
        return torch.cat((extended, self.decode(layer, q[split:], inputs)))

    def decode(self, layer: int, q: Tensor, inputs: AttentionInputs) -> Tensor:
        """Attend with the step's decoding requests, the last of it: q [requests, heads, head_dim]."""
        assert inputs.plan is not None
        splits = inputs.plan.splits
        assert splits is not None
        return attend_decode(
            q.contiguous(),
            self._pages[layer],
            inputs.page_table,
            inputs.rows[-len(q) :],
            inputs.seq_lens[-len(q) :],
            (splits.requests, splits.starts, splits.tokens, splits.indptr),
            self._workspace,
            SPLIT_UNIT_TOKENS,
        )
