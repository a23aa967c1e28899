"""The order of launching and processing steps: plain, or overlapped by one.

    plain       launch k · process k · launch k+1 · ...
    overlapped  launch k · process k-1 · launch k+1 · process k · ...

Overlapped, the host waits once a step, for the copy of the step *before* the one that it has just launched.
With nothing to launch, what is pending is processed at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.engine.batch import ScheduleBatch
from common.engine.model_runner import ModelRunner, StepRecord
from common.request import SampledToken


class Step(Protocol):
    """What a scheduler plans: a batch, and what it needs to know again when the result is there."""

    @property
    def batch(self) -> ScheduleBatch:
        """The step's batch."""


StepT = TypeVar("StepT", bound=Step)


@dataclass(frozen=True, slots=True)
class StepResult(Generic[StepT]):
    """A step whose tokens are on the host: one for each of the batch's sample rows."""

    step: StepT
    tokens: tuple[SampledToken, ...]


class StepLoop(Generic[StepT]):
    """Launches steps and gives their results, at most one step behind."""

    def __init__(self, runner: ModelRunner, *, overlap: bool) -> None:
        self._runner = runner
        self._overlap = overlap
        self._in_flight: deque[tuple[StepT, StepRecord]] = deque()

    @property
    def num_launched(self) -> int:
        """Steps launched since start."""
        return self._runner.num_launched

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight."""
        return not self._in_flight

    def launch(self, step: StepT) -> None:
        """Start a step."""
        self._in_flight.append((step, self._runner.launch(step.batch)))

    def results(self, *, launched: bool) -> Iterator[StepResult[StepT]]:
        """Give what is to be processed now; `launched` says whether a step was launched in this round."""
        keep = 1 if self._overlap and launched else 0
        while len(self._in_flight) > keep:
            step, record = self._in_flight.popleft()
            yield StepResult(step, tuple(record.result()))
