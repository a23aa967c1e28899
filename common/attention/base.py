"""What an attention backend is: it attends over the pool, into which a step's keys and values were written.

Knows no scheduler and no model; a step arrives as `AttentionInputs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from common.attention.blocks import ExtendBlocks
from common.attention.splits import DecodeSplits
from common.device.packed import PackedBlock

# Steps of so many prompt tokens at most, none after more, are short: the host takes longer to launch one than
# the device to compute it. Where attention allows it they are captured as CUDA graphs.
SHORT_TOKENS = 1024


def is_short(seq_lens: Sequence[int], tokens: int) -> bool:
    """Say whether a step of so many prompt tokens, with requests of these lengths after it, is short."""
    return tokens <= SHORT_TOKENS and max(seq_lens, default=0) <= SHORT_TOKENS


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How a step's attention is cut into programs; None where a backend has no use for it."""

    splits: DecodeSplits | None  # of the requests that decode
    blocks: ExtendBlocks | None  # of those that extend


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One step of several requests, whose tokens follow each other in the flat token dimension.

    Requests that extend come first, the `num_decode` that decode (one token each) last. A padded DECODE step
    has more requests on the device than the host's tuples: what is over is row 0. (In a padded EXTEND step
    the tuples have it, too.)
    """

    rows: Tensor  # [requests] i64, of the page table
    page_table: Tensor  # [rows + 1, width] i64 page ids; past a request's pages 0, the padding page
    seq_lens: Tensor  # [requests] i32, tokens in KV after this step
    positions: Tensor  # [tokens] i64
    out_cache_loc: Tensor  # [tokens] i64, page * page_size + offset where this step's K and V go
    prefix_lens_cpu: tuple[int, ...]  # tokens in KV before this step
    extend_lens_cpu: tuple[int, ...]  # tokens of this step
    num_decode: int = 0
    plan: StepPlan | None = None

    @property
    def num_extend_tokens(self) -> int:
        """Tokens of the requests that extend, the first of the step."""
        return sum(self.extend_lens_cpu) - self.num_decode


class AttentionBackend(Protocol):
    """Causal grouped-query attention over a paged KV pool."""

    def pack(
        self,
        block: PackedBlock,
        prefix_lens: Sequence[int],
        extend_lens: Sequence[int],
        num_decode: int,
        pad: int,
    ) -> StepPlan | None:
        """Add what a step needs on the device to its block.

        Args:
            block: the step's host metadata.
            prefix_lens: tokens in KV before the step, a request.
            extend_lens: tokens of the step, a request.
            num_decode: requests that decode, the last.
            pad: requests of row 0 behind them, on the device.
        """
        ...

    def can_capture(self, seq_lens: Sequence[int], tokens: int) -> bool:
        """Say whether the programs of a step of prompts follow from its numbers of tokens and requests alone.

        Args:
            seq_lens: tokens in KV after the step, a request.
            tokens: of the step.
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
