"""Log probabilities of prompts' own tokens, beside the step that computes the prompts.

The logits at one token score the next: the last of a chunk scores the first of the next chunk, whose id is
known. [tokens, vocab] may not fit anywhere, so logits are made in slices of tokens, of which only the results
stay. They are the model's own, as the sampler's: before bias, penalties and temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.device.packed import PackedBlock, join_int32
from common.device.pinned import to_host
from common.engine.batch import Int64s, ScheduleBatch, ScoreSpan
from common.engine.sampler import LEAST_LOGPROB

SLICE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class ScoreInputs:
    """What to score, on the device."""

    targets: Tensor  # [tokens] i64: the token behind each
    num_top: int  # most likely tokens that any of the prompts wants


@dataclass(frozen=True, slots=True)
class Scores:
    """A step's log probabilities, of all its spans one after the other."""

    logprobs: Tensor  # [tokens] f32
    top_logprobs: Tensor  # [tokens, num_top] f32
    top_ids: Tensor  # [tokens, num_top] i32

    def to_host(self) -> Scores:
        """Copy on the current stream; valid once an event after it happened."""
        return Scores(to_host(self.logprobs), to_host(self.top_logprobs), to_host(self.top_ids))


def scored_tokens(batch: ScheduleBatch) -> list[Int64s]:
    """Return which of the step's tokens have the logits that score others, an array a span."""
    starts = np.cumsum(batch.extend_lens) - batch.extend_lens
    return [starts[span.index] + np.arange(len(span.targets)) for span in batch.score_spans]


def resolve_scores(batch: ScheduleBatch, block: PackedBlock) -> ScoreInputs | None:
    """Add what is to be scored to a step's block. Part of `resolve_forward_inputs`."""
    if not batch.score_spans:
        return None
    targets = [span.targets for span in batch.score_spans]
    section, there = block.reserve(sum(map(len, targets)), np.int64)
    join_int32(targets, section)
    return ScoreInputs(there, max(span.num_top for span in batch.score_spans))


def score(hidden: Tensor, to_logits: Callable[[Tensor], Tensor], inputs: ScoreInputs | None) -> Scores:
    """Compute log probabilities from the last hidden states [tokens, hidden]; nothing is read back."""
    assert inputs is not None
    slices = zip(hidden.split(SLICE_TOKENS), inputs.targets.split(SLICE_TOKENS), strict=True)
    parts = [_score(to_logits(states), targets, inputs.num_top) for states, targets in slices]
    logprobs, top_logprobs, top_ids = (torch.cat(column) for column in zip(*parts, strict=True))
    return Scores(logprobs, top_logprobs, top_ids)


def deliver(spans: Sequence[ScoreSpan], scores: Scores) -> None:
    """Append a step's scores, which are on the host, to what their requests have."""
    at = 0
    for span in spans:
        rows = slice(at, at + len(span.targets))
        at = rows.stop
        span.into.logprobs.frombytes(scores.logprobs[rows].numpy().tobytes())
        span.into.top_ids.frombytes(scores.top_ids[rows, : span.num_top].numpy().tobytes())
        span.into.top_logprobs.frombytes(scores.top_logprobs[rows, : span.num_top].numpy().tobytes())


def _score(logits: Tensor, targets: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    every = torch.log_softmax(logits.float(), dim=-1)
    top_logprobs, top_ids = every.topk(num_top, dim=-1)
    own = every.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return _finite(own), _finite(top_logprobs), top_ids.int()


def _finite(logprobs: Tensor) -> Tensor:
    return logprobs.nan_to_num(nan=LEAST_LOGPROB).clamp(min=LEAST_LOGPROB)
