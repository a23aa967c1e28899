"""Grammars of the rows of a node: which tokens each may draw next.

A row's matcher is made when its request is granted the row, and has accepted each token of the answer once:
those of before a retraction then, the first token of a hand-over when it is seeded, each other when its
step's result is read. So a step's masks need the results of the steps before (step_loop.py waits with
sampling for them), and are made on the host while the forward runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.device.pinned import is_pin_memory_available, to_device
from common.engine.batch import SampleRow, ScheduleBatch
from common.errors import LocalError
from common.request import Request, SampledToken

# CPU time of a row's grammar, which holds up everybody: a token brings TOKEN_S; up to MAX_STEP_S is saved.
TOKEN_S, MAX_STEP_S = 0.01, 0.5


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """The tokens that a step's samples may draw, for those that have a grammar."""

    samples: Tensor  # [masked] i64
    bits: Tensor  # [masked, ceil(vocab / 32)] i32, token 0 is the lowest bit of the first number

    def apply(self, logits: Tensor) -> None:
        """Take all other tokens' logits [samples, vocab] away."""
        shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
        allowed = (self.bits.view(torch.uint8).unsqueeze(-1) >> shifts) & 1
        forbidden = allowed.view(len(self.bits), -1)[:, : logits.shape[-1]] == 0
        masked = logits.index_select(0, self.samples).masked_fill_(forbidden, float("-inf"))
        logits.index_copy_(0, self.samples, masked)


@dataclass(eq=False, slots=True)
class _State:
    """A row's grammar."""

    grammar: Any  # xgrammar.CompiledGrammar
    matcher: Any  # xgrammar.GrammarMatcher, of it
    error: str | None = None  # it says nothing any more: its request ends
    left_s: float = MAX_STEP_S

    def accept(self, token: int) -> None:
        # A step that was launched before the end was known draws one token more, which is nobody's.
        if self.error is not None or self.matcher.is_terminated():
            return
        started_s = time.thread_time()
        is_accepted = self.matcher.accept_token(token)
        self._spend(time.thread_time() - started_s - TOKEN_S)
        if not is_accepted:
            self.error = f"token {token} is not in the grammar"

    def fill(self, masks: NDArray[np.int32], index: int) -> None:
        if self.error is not None or self.matcher.is_terminated():
            masks[index] = -1  # what is drawn is dropped
            return
        started_s = time.thread_time()
        self.matcher.fill_next_token_bitmask(masks, index)
        self._spend(time.thread_time() - started_s)

    def _spend(self, took_s: float) -> None:
        self.left_s = min(MAX_STEP_S, self.left_s - took_s)
        if self.left_s < 0:
            self.error = "the grammar is too ambiguous: what may come next takes too long to find out"


class GrammarStates:
    """The matchers of all rows."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words = -(-vocab_size // 32)
        self._device = device
        self._states: dict[int, _State] = {}

    def start(self, request: Request) -> None:
        """A request was granted its row. One that was retracted goes on behind all outputs but the last.

        Raises:
            LocalError: its grammar was not compiled.
        """
        self._states.pop(request.row, None)
        if request.sampling.grammar is None:
            return
        if request.compiled_grammar is None:
            raise LocalError(f"row {request.row} has a grammar that was not compiled")
        from xgrammar import GrammarMatcher

        state = self._states[request.row] = _State(
            request.compiled_grammar, GrammarMatcher(request.compiled_grammar)
        )
        if request.resumed_ids is not None:
            for token in request.outputs[:-1]:
                state.accept(token)

    def seed(self, rows: Iterable[int], tokens: Iterable[int]) -> None:
        """Accept tokens that were drawn before the row was here."""
        for row, token in zip(rows, tokens, strict=True):
            if (state := self._states.get(row)) is not None:
                state.accept(token)

    def rows_of(self, batch: ScheduleBatch) -> set[int]:
        """Return the rows that draw a token of a grammar in a step."""
        return {row for row, _ in self._masked(batch).values()}

    def masks(self, batch: ScheduleBatch) -> GrammarMasks | None:
        """Make a step's masks, on their way to the device; None where nobody has a grammar."""
        masked = self._masked(batch)
        if not masked:
            return None
        pinned = is_pin_memory_available(self._device)
        bits = torch.empty((len(masked), self._words), dtype=torch.int32, pin_memory=pinned)
        host, filled = bits.numpy(), dict[int, int]()
        too_dear: dict[int, str] = {}
        for index, (row, sample) in enumerate(masked.values()):
            if row in filled:  # another choice of the same prompt
                host[index] = host[filled[row]]
                continue
            state = self._states[row]
            # All choices of a prompt may get there at once. (Of first tokens nobody hears the error.)
            if state.error is None and batch.num_decode and sample.sampling.num_choices == 1:
                state.error = too_dear.get(id(state.grammar))
            state.fill(host, index)
            filled[row] = index
            if state.error is not None and state.left_s < 0:
                too_dear[id(state.grammar)] = state.error
        samples = to_device(list(masked), torch.int64, self._device)
        return GrammarMasks(samples, bits.to(self._device, non_blocking=True))

    def accept(self, batch: ScheduleBatch, tokens: Sequence[SampledToken]) -> list[SampledToken]:
        """Take a step's tokens, once; returns them, those with an error whose grammar does not go on."""
        taken = list(tokens)
        for index, (row, sample) in self._masked(batch).items():
            if sample.sampling.num_choices > 1:
                continue  # first tokens: each choice gets a row of its own, where its token is seeded
            state = self._states[row]
            state.accept(taken[index].token)
            if state.error is not None:
                taken[index] = replace(taken[index], error=state.error)
        return taken

    def _masked(self, batch: ScheduleBatch) -> dict[int, tuple[int, SampleRow]]:
        """Samples that have a grammar, with their rows."""
        if not self._states:  # no row ever had one: nothing is looked at
            return {}
        return {
            index: (batch.req_pool_indices[sample.index], sample)
            for index, sample in enumerate(batch.sample_rows)
            if sample.sampling.grammar is not None
        }
