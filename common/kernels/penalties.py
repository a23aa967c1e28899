"""Presence, frequency and repetition penalties in one pass over the logits.

Knows no request: which sample has which penalties and counts is given. `common/engine/penalties.py` has the
same in plain operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _penalise_kernel(
    logits,  # [samples, vocab]
    out,  # [samples, vocab] f32
    rows,  # [samples] i64, of the counts; 0: no penalties
    presence,  # [samples] f32
    frequency,  # [samples] f32
    repetition,  # [samples] f32
    counts,  # [rows, vocab] i32
    in_prompt,  # [rows, vocab] bool
    vocab,
    block: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < vocab
    value = tl.load(logits + sample * vocab + column, mask, other=0.0).to(tl.float32)
    row = tl.load(rows + sample)
    if row != 0:
        count = tl.load(counts + row * vocab + column, mask, other=0)
        prompt = tl.load(in_prompt + row * vocab + column, mask, other=0)
        again = tl.load(repetition + sample)
        repeated = tl.where(value > 0, value / again, value * again)
        value = tl.where((count > 0) | (prompt != 0), repeated, value)
        value -= tl.load(frequency + sample) * count
        value -= tl.where(count > 0, tl.load(presence + sample), 0.0)
    tl.store(out + sample * vocab + column, value, mask)


def penalise(
    logits: Tensor,
    rows: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    counts: Tensor,
    in_prompt: Tensor,
) -> Tensor:
    """Return the logits with penalties, [samples, vocab] f32; those of samples without are copied.

    Args:
        logits: [samples, vocab], contiguous.
        rows: [samples] i64, each sample's row of the counts, 0 for none.
        presence: [samples] f32.
        frequency: [samples] f32.
        repetition: [samples] f32.
        counts: [rows, vocab] i32, of output tokens.
        in_prompt: [rows, vocab] bool.
    """
    samples, vocab = logits.shape
    out = torch.empty((samples, vocab), dtype=torch.float32, device=logits.device)
    _penalise_kernel[(samples, triton.cdiv(vocab, _BLOCK))](
        logits,
        out,
        rows,
        presence,
        frequency,
        repetition,
        counts,
        in_prompt.view(torch.uint8),
        vocab,
        _BLOCK,
        num_warps=4,
    )
    return out


@triton.jit
def _count_kernel(counts, rows, tokens, vocab):
    sample = tl.program_id(0)
    # Atomic: the samples without penalties share row 0, which nobody reads.
    tl.atomic_add(counts + tl.load(rows + sample) * vocab + tl.load(tokens + sample), 1)


def count_tokens(counts: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Add one to counts [rows, vocab] i32 at each row and token: rows [n] i64, tokens [n] i64."""
    _count_kernel[(len(rows),)](counts, rows, tokens, counts.shape[1], num_warps=1)
