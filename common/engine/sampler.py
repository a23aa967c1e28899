"""Draw tokens: greedy, temperature, top-k, top-p, min-p, seeds, min_tokens. Batched, nothing read back.

Randomness is a counter. Every request has a 64-bit seed, and the uniform number for a token is a hash of
(seed, choice, position), made on the host. So the draw is the same whichever node samples, in whatever
batch, after a retry. The distribution is inverted in *vocabulary* order: in order of probability, two
tokens that are nearly equal would change places with the last bit of a logit, and the draw with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.batch import SampleRow
from common.engine.pinned import to_device

_MASK = 2**64 - 1


def _mix(value: int) -> int:
    """SplitMix64's output function (Steele, Lea, Flood 2014): every input bit moves every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the number in [0, 1) that draws the token at `position` of a request's choice."""
    return (_mix(_mix(_mix(seed) ^ choice) ^ position) >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Sampling parameters on the device, a row a sample; host flags say which work can be left out."""

    all_greedy: bool
    filters: bool  # some row has top-k, top-p or min-p
    temperature: Tensor  # [samples] f32, 0 is greedy
    top_k: Tensor  # [samples] i64, 0 is off
    top_p: Tensor  # [samples] f32
    min_p: Tensor  # [samples] f32
    uniform: Tensor  # [samples] f64 in [0, 1)
    banned_rows: Tensor  # [bans] i64
    banned_ids: Tensor  # [bans] i64: token ids that must not be drawn in the row beside


def resolve_sampling(
    samples: Sequence[SampleRow], eos_token_ids: tuple[int, ...], device: torch.device
) -> SamplingInputs:
    """Put the sampling parameters of a step on the device. Part of `resolve_forward_inputs`."""
    params = [sample.sampling for sample in samples]
    bans = [
        (row, token)
        for row, sample in enumerate(samples)
        if not sample.may_stop
        for token in sample.sampling.stop_ids(eos_token_ids)
    ]
    return SamplingInputs(
        all_greedy=all(p.temperature == 0 for p in params),
        filters=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
        temperature=to_device([p.temperature for p in params], torch.float32, device),
        top_k=to_device([p.top_k for p in params], torch.int64, device),
        top_p=to_device([p.top_p for p in params], torch.float32, device),
        min_p=to_device([p.min_p for p in params], torch.float32, device),
        uniform=to_device([uniform(s.sampling.seed, 0, s.position) for s in samples], torch.float64, device),
        banned_rows=to_device([row for row, _ in bans], torch.int64, device),
        banned_ids=to_device([token for _, token in bans], torch.int64, device),
    )


def _keep(probs: Tensor, inputs: SamplingInputs) -> Tensor:
    """Which tokens top-k, then top-p over what top-k left, then min-p keep: [samples, vocab] bool."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    top_k = torch.where(inputs.top_k > 0, inputs.top_k, probs.shape[-1]).unsqueeze(-1)
    keep = rank < top_k
    ordered = torch.where(keep, ordered, 0.0)
    before = ordered.cumsum(-1) - ordered
    keep &= before < inputs.top_p.unsqueeze(-1) * ordered.sum(-1, keepdim=True)
    keep &= ordered >= inputs.min_p.unsqueeze(-1) * ordered[:, :1]
    keep[:, 0] = True  # top_p = 0 means the likeliest token
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def sample(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Draw a token a row: logits [samples, vocab] f32 -> [samples] i64. Changes `logits`."""
    if inputs.banned_ids.numel():
        logits.index_put_((inputs.banned_rows, inputs.banned_ids), logits.new_full((), float("-inf")))
    greedy = logits.argmax(-1)
    if inputs.all_greedy:
        return greedy
    is_greedy = inputs.temperature == 0
    temperature = torch.where(is_greedy, 1.0, inputs.temperature).unsqueeze(-1)
    # The maximum goes first: divided by a temperature near 0 it would be infinite, and every weight NaN.
    probs = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, dim=-1)
    weights = probs.double()
    if inputs.filters:
        weights = torch.where(_keep(probs, inputs), weights, 0.0)
    cumulative = weights.cumsum(-1)
    target = inputs.uniform.unsqueeze(-1) * cumulative[:, -1:]
    # The first token whose cumulative weight passes the target; it has weight itself.
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    # Only NaN logits (a broken model) get past the end; a token id that is none would end the process.
    drawn.clamp_(max=logits.shape[-1] - 1)
    return torch.where(is_greedy, greedy, drawn)
