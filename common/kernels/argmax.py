"""The likeliest token of each sample, in two short kernels: a row of a vocabulary is cut among programs.

Knows no sampling.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _argmax_parts_kernel(
    logits,  # [samples, vocab]
    best,  # [samples, parts] f32
    best_index,  # [samples, parts] i32
    vocab,
    parts,
    block: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * block + tl.arange(0, block)
    values = tl.load(logits + sample * vocab + column, column < vocab, other=float("-inf")).to(tl.float32)
    value, index = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + sample * parts + part, value)
    tl.store(best_index + sample * parts + part, part * block + index)


@triton.jit
def _argmax_merge_kernel(best, best_index, out, parts, vocab, block: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, block)
    values = tl.load(best + sample * parts + part, part < parts, other=float("-inf"))
    _, winner = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    # Whatever the logits of a broken model are (of NaN, padding may win), a token is one of the vocabulary.
    index = tl.load(best_index + sample * parts + tl.minimum(winner, parts - 1))
    tl.store(out + sample, tl.minimum(tl.maximum(index, 0), vocab - 1).to(tl.int64))


def argmax(logits: Tensor) -> Tensor:
    """Return the index of the largest logit of each row, the first among equals: [samples] i64.

    Args:
        logits: [samples, vocab], contiguous.
    """
    samples, vocab = logits.shape
    parts = triton.cdiv(vocab, _BLOCK)
    best = torch.empty((samples, parts), dtype=torch.float32, device=logits.device)
    best_index = torch.empty((samples, parts), dtype=torch.int32, device=logits.device)
    out = torch.empty(samples, dtype=torch.int64, device=logits.device)
    _argmax_parts_kernel[(samples, parts)](logits, best, best_index, vocab, parts, _BLOCK, num_warps=8)
    _argmax_merge_kernel[(samples,)](
        best, best_index, out, parts, vocab, triton.next_power_of_2(parts), num_warps=1
    )
    return out
