"""Presence, frequency and repetition penalties, from counts that live on the device, a row a request.

The counts are updated on the forward stream right after sampling, so they are exact with and without
overlap: the host, which lags a step behind, has no part in it. A row is primed when its request is granted
pages; the first token of a hand-over is counted when it is seeded. Rows without penalties cost nothing; on a
CPU nothing is allocated before the first request that has some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.device.packed import PackedBlock
from common.device.pinned import is_pin_memory_available, to_device
from common.engine.batch import SampleRow
from common.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class PenaltyInputs:
    """A step's penalties. A sample without any has row 0, which is nobody's, and neutral values."""

    penalised: Tensor  # [penalised] i64, the samples that have some
    rows: Tensor  # [samples] i64, of the counts
    presence: Tensor  # [samples] f32
    frequency: Tensor  # [samples] f32
    repetition: Tensor  # [samples] f32


def resolve_penalties(
    samples: Sequence[SampleRow], rows: Sequence[int], block: PackedBlock
) -> PenaltyInputs | None:
    """Add a step's penalties to its block, or None when it has none. Part of `resolve_forward_inputs`."""
    chosen = [index for index, sample in enumerate(samples) if sample.sampling.has_penalties]
    if not chosen:
        return None
    count_rows = np.zeros(len(samples), np.int64)
    count_rows[chosen] = [rows[index] for index in chosen]
    params = [sample.sampling for sample in samples]
    return PenaltyInputs(
        penalised=block.add(chosen, np.int64),
        rows=block.add(count_rows, np.int64),
        presence=block.add([p.presence_penalty for p in params], np.float32),
        frequency=block.add([p.frequency_penalty for p in params], np.float32),
        repetition=block.add([p.repetition_penalty for p in params], np.float32),
    )


class PenaltyState:
    """Counts of output tokens and marks of prompt tokens, [rows + 1, vocab]."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_rows + 1, vocab_size)
        self._device = device
        self._counts: Tensor | None = None  # [rows + 1, vocab] i32
        self._in_prompt: Tensor | None = None  # [rows + 1, vocab] bool
        if device.type == "cuda":
            self._allocate()  # not in the middle of serving, where the device would have to be waited for

    def _allocate(self) -> None:
        self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        self._in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)

    def prime(self, request: Request) -> None:
        """Start a row. Only a repetition penalty reads the prompt, as a bitmap.

        Of a request that was retracted all outputs count again, the last of them when it is seeded.
        """
        if not request.sampling.has_penalties:
            return
        if self._counts is None or self._in_prompt is None:
            self._allocate()
        assert self._counts is not None
        assert self._in_prompt is not None
        self._counts[request.row].zero_()
        if request.sampling.repetition_penalty != 1:
            self._in_prompt[request.row] = self._bitmap(request)
        if request.resumed_ids is not None and (again := request.outputs[:-1]):
            rows = to_device([request.row] * len(again), torch.int64, self._device)
            self.count(rows, to_device(again, torch.int64, self._device))

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """Count tokens [n] i64 that were put out in rows [n] i64; row 0 counts for nobody."""
        assert self._counts is not None
        if self._counts.is_cuda:
            from common.kernels.penalties import count_tokens

            count_tokens(self._counts, rows, tokens)
            return
        ones = torch.ones((), dtype=torch.int32)
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

    def apply(self, logits: Tensor, inputs: PenaltyInputs) -> Tensor:
        """Return the logits [samples, vocab] with penalties, as f32, the way vLLM and SGLang have them.

        Repetition divides a positive logit and multiplies a negative one, for every token of prompt or
        output (Keskar et al. 2019, section 4.1); frequency and presence are OpenAI's, over the output.
        f32 logits may be changed.
        """
        assert self._counts is not None
        assert self._in_prompt is not None
        if logits.is_cuda:
            from common.kernels.penalties import penalise

            return penalise(
                logits,
                inputs.rows,
                inputs.presence,
                inputs.frequency,
                inputs.repetition,
                self._counts,
                self._in_prompt,
            )
        logits = logits.float()
        rows, presence, frequency, repetition = (
            column.index_select(0, inputs.penalised)
            for column in (inputs.rows, inputs.presence, inputs.frequency, inputs.repetition)
        )
        counts = self._counts.index_select(0, rows)
        chosen = logits.index_select(0, inputs.penalised)
        seen = (counts > 0) | self._in_prompt.index_select(0, rows)
        again = torch.where(seen, repetition.unsqueeze(-1), 1.0)
        chosen = torch.where(chosen > 0, chosen / again, chosen * again)
        chosen -= frequency.unsqueeze(-1) * counts
        chosen -= presence.unsqueeze(-1) * (counts > 0)
        return logits.index_copy_(0, inputs.penalised, chosen)

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
