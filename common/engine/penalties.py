"""Presence, frequency and repetition penalties, from counts that live on the device, a row a request.

The counts are updated on the forward stream right after sampling, so they are exact with and without
overlap: the host, which lags a step behind, has no part in it. A row is primed when its request is granted
pages; the first token of a hand-over is counted when it is seeded. Rows without penalties cost nothing, and
nothing is allocated before the first request that has some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.engine.batch import SampleRow
from common.engine.pinned import is_pin_memory_available, to_device
from common.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class PenaltyInputs:
    """The samples of a step that have penalties. `samples` index the step's samples, `rows` the counts."""

    samples: Tensor  # [penalised] i64
    rows: Tensor  # [penalised] i64
    presence: Tensor  # [penalised, 1] f32
    frequency: Tensor  # [penalised, 1] f32
    repetition: Tensor  # [penalised, 1] f32


def resolve_penalties(
    samples: Sequence[SampleRow], rows: Sequence[int], device: torch.device
) -> PenaltyInputs | None:
    """Put a step's penalties on the device, or None when it has none. Part of `resolve_forward_inputs`."""
    chosen = [index for index, sample in enumerate(samples) if sample.sampling.has_penalties]
    if not chosen:
        return None
    params = [samples[index].sampling for index in chosen]

    def column(values: list[float]) -> Tensor:
        return to_device(values, torch.float32, device).unsqueeze(-1)

    return PenaltyInputs(
        samples=to_device(chosen, torch.int64, device),
        rows=to_device([rows[index] for index in chosen], torch.int64, device),
        presence=column([p.presence_penalty for p in params]),
        frequency=column([p.frequency_penalty for p in params]),
        repetition=column([p.repetition_penalty for p in params]),
    )


class PenaltyState:
    """Counts of output tokens and marks of prompt tokens, [rows + 1, vocab]."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_rows + 1, vocab_size)
        self._device = device
        self._counts: Tensor | None = None  # [rows + 1, vocab] i32
        self._in_prompt: Tensor | None = None  # [rows + 1, vocab] bool

    def prime(self, request: Request) -> None:
        """Start a row: no output yet. Only a repetition penalty reads the prompt, as a bitmap."""
        if not request.sampling.has_penalties:
            return
        if self._counts is None or self._in_prompt is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._counts[request.row].zero_()
        if request.sampling.repetition_penalty != 1:
            self._in_prompt[request.row] = self._bitmap(request)

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """Count tokens [n] that were put out in rows [n]."""
        assert self._counts is not None
        ones = torch.ones((), dtype=torch.int32, device=self._device)
        self._counts.index_put_((rows, tokens), ones, accumulate=True)

    def count_seeded(
        self, rows: Sequence[int], tokens: Sequence[int], sampling: Sequence[SamplingParams]
    ) -> None:
        """Count first tokens that another node drew, for the rows that have penalties."""
        chosen = [index for index, params in enumerate(sampling) if params.has_penalties]
        if chosen:
            self.count(
                to_device([rows[index] for index in chosen], torch.int64, self._device),
                to_device([tokens[index] for index in chosen], torch.int64, self._device),
            )

    def apply(self, logits: Tensor, inputs: PenaltyInputs) -> None:
        """Change the logits [samples, vocab] f32 of the penalised samples, as vLLM and SGLang do.

        Repetition divides a positive logit and multiplies a negative one, for every token of prompt or
        output (Keskar et al. 2019, section 4.1); frequency and presence are OpenAI's, over the output.
        """
        assert self._counts is not None
        assert self._in_prompt is not None
        counts = self._counts.index_select(0, inputs.rows)
        chosen = logits.index_select(0, inputs.samples)
        seen = (counts > 0) | self._in_prompt.index_select(0, inputs.rows)
        repetition = torch.where(seen, inputs.repetition, 1.0)
        chosen = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
        chosen -= inputs.frequency * counts
        chosen -= inputs.presence * (counts > 0)
        logits.index_copy_(0, inputs.samples, chosen)

    def _bitmap(self, request: Request) -> Tensor:
        """Mark the prompt's tokens, [vocab] bool; vocabulary / 8 bytes go to the device."""
        marks = np.zeros(self._shape[1], dtype=np.bool_)
        marks[np.frombuffer(request.prompt_ids, dtype=np.int32)] = True
        packed = torch.from_numpy(np.packbits(marks, bitorder="little"))
        if is_pin_memory_available(self._device):
            packed = packed.pin_memory()
        bits = torch.arange(8, dtype=torch.uint8, device=self._device)
        unpacked = (packed.to(self._device, non_blocking=True).unsqueeze(-1) >> bits) & 1
        return unpacked.view(-1)[: self._shape[1]].bool()
