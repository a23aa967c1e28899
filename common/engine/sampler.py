"""Draw tokens: greedy, temperature, top-k, top-p, min-p, seeds, bias, min_tokens, and log probabilities.

Batched, nothing read back. Randomness is a counter. Every request has a 64-bit seed, and the uniform number
for a token is a hash of (seed, choice, position), made on the host. So the draw is the same whichever node
samples, in whatever batch, after a retry. The distribution is inverted in *vocabulary* order: in order of
probability, two tokens that are nearly equal would change places with the last bit of a logit, and the draw
with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.device.packed import PackedBlock
from common.engine.batch import SampleRow
from common.engine.grammar import GrammarMasks
from common.engine.penalties import PenaltyInputs, PenaltyState, resolve_penalties

_MASK = 2**64 - 1
LEAST_LOGPROB = -9999.0  # OpenAI's number for "very unlikely"; the wire carries no infinity


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
class RandomInputs:
    """What the samples that are not greedy need, a row a sample; None in its place when all are greedy."""

    temperature: Tensor  # [samples] f32, 0 is greedy
    top_k: Tensor  # [samples] i64, 0 is off
    top_p: Tensor  # [samples] f32
    min_p: Tensor  # [samples] f32
    uniform: Tensor  # [samples] f64 in [0, 1)
    filters: bool  # some row has top-k, top-p or min-p


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """Numbers at (sample, token): added as a bias, or -inf to ban a token."""

    rows: Tensor  # [changes] i64
    ids: Tensor  # [changes] i64
    values: Tensor  # [changes] f32


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """A step's sampling on the device. What no sample needs is None: it costs nothing."""

    random: RandomInputs | None
    bias: LogitChanges | None
    bans: LogitChanges | None
    penalties: PenaltyInputs | None
    logprob_samples: Tensor | None  # [wanted] i64: samples that want log probabilities
    num_top: int  # most likely tokens that any of them wants

    @property
    def is_plain(self) -> bool:
        """Every sample takes the likeliest token of the model's own logits, and nothing else is asked."""
        asked = (self.random, self.bias, self.bans, self.penalties, self.logprob_samples)
        return all(part is None for part in asked)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was drawn."""

    tokens: Tensor  # [samples] i64
    logprobs: Tensor | None  # [wanted] f32
    top_logprobs: Tensor | None  # [wanted, num_top] f32
    top_ids: Tensor | None  # [wanted, num_top] i64


def resolve_sampling(
    samples: Sequence[SampleRow], rows: Sequence[int], eos_token_ids: tuple[int, ...], block: PackedBlock
) -> SamplingInputs:
    """Add the sampling of a step to its block; `rows` are its samples'. Part of `resolve_forward_inputs`."""
    params = [sample.sampling for sample in samples]
    bias = [(i, b.token, b.bias) for i, p in enumerate(params) for b in p.logit_bias]
    bans = [
        (i, token, float("-inf"))
        for i, sample in enumerate(samples)
        if not sample.may_stop
        for token in sample.sampling.stop_ids(eos_token_ids)
    ]
    wanted = [i for i, p in enumerate(params) if p.num_logprobs is not None]
    return SamplingInputs(
        random=_resolve_random(samples, block) if any(p.temperature > 0 for p in params) else None,
        bias=_resolve_changes(bias, block),
        bans=_resolve_changes(bans, block),
        penalties=resolve_penalties(samples, rows, block),
        logprob_samples=block.add(wanted, np.int64) if wanted else None,
        num_top=max((params[i].num_logprobs or 0 for i in wanted), default=0),
    )


def sample(
    logits: Tensor, inputs: SamplingInputs, penalties: PenaltyState, masks: GrammarMasks | None = None
) -> Sampled:
    """Draw a token a row: logits [samples, vocab] of any type. Counts what it draws.

    f32 logits may be changed, and by masks all; narrower ones are copied where something is added to them.

    Order: log probabilities of the model's own logits, then bias, penalties, bans (as vLLM), the masks of
    grammars, temperature, filters, the draw.
    """
    if inputs.is_plain and masks is None:
        return Sampled(_likeliest(logits), None, None, None)
    wanted = None
    if inputs.logprob_samples is not None:
        wanted = torch.log_softmax(logits.index_select(0, inputs.logprob_samples).float(), dim=-1)
        wanted = wanted.nan_to_num(nan=LEAST_LOGPROB).clamp(min=LEAST_LOGPROB)
    if (bias := inputs.bias) is not None:
        logits = logits.float()
        logits.index_put_((bias.rows, bias.ids), bias.values, accumulate=True)
    if inputs.penalties is not None:
        logits = penalties.apply(logits, inputs.penalties)
    if (bans := inputs.bans) is not None:
        logits = logits.float()
        logits.index_put_((bans.rows, bans.ids), bans.values)
    if masks is not None:
        masks.apply(logits)
    tokens = _likeliest(logits)
    if inputs.random is not None:
        tokens = torch.where(inputs.random.temperature == 0, tokens, _draw(logits.float(), inputs.random))
    if inputs.penalties is not None:
        penalties.count(inputs.penalties.rows, tokens)
    if wanted is None or inputs.logprob_samples is None:
        return Sampled(tokens, None, None, None)
    drawn = tokens.index_select(0, inputs.logprob_samples).unsqueeze(-1)
    top_logprobs, top_ids = wanted.topk(min(inputs.num_top, wanted.shape[-1]), dim=-1)
    return Sampled(tokens, wanted.gather(-1, drawn).squeeze(-1), top_logprobs, top_ids)


def _likeliest(logits: Tensor) -> Tensor:
    if logits.is_cuda:
        from common.kernels.argmax import argmax  # Triton is part of torch's CUDA builds alone

        return argmax(logits)
    return logits.float().argmax(-1)


def _resolve_random(samples: Sequence[SampleRow], block: PackedBlock) -> RandomInputs:
    params = [sample.sampling for sample in samples]
    return RandomInputs(
        temperature=block.add([p.temperature for p in params], np.float32),
        top_k=block.add([p.top_k for p in params], np.int64),
        top_p=block.add([p.top_p for p in params], np.float32),
        min_p=block.add([p.min_p for p in params], np.float32),
        uniform=block.add(
            [uniform(s.sampling.seed, s.sampling.choice, s.position) for s in samples], np.float64
        ),
        filters=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
    )


def _resolve_changes(changes: Sequence[tuple[int, int, float]], block: PackedBlock) -> LogitChanges | None:
    if not changes:
        return None
    rows, ids, values = zip(*changes, strict=True)
    return LogitChanges(
        block.add(rows, np.int64),
        block.add(ids, np.int64),
        block.add(values, np.float32),
    )


def _draw(logits: Tensor, inputs: RandomInputs) -> Tensor:
    temperature = torch.where(inputs.temperature == 0, 1.0, inputs.temperature).unsqueeze(-1)
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
    return drawn.clamp_(max=logits.shape[-1] - 1)


def _keep(probs: Tensor, inputs: RandomInputs) -> Tensor:
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
