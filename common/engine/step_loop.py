"""The order of launching and processing steps: plain, or overlapped by one.

    plain       launch k · process k · launch k+1 · ...
    overlapped  launch k · process k-1 · launch k+1 · process k · ...

Overlapped, step k is launched before the tokens of step k-1 are read; with nothing to launch, what is pending
is processed as soon as it is there. Nothing here waits: a step whose tokens are not there yet is left for
later, and the loop's pollables say when to come again.

Where step k draws tokens of a grammar, which needs those of step k-1, its forward is launched, and its tokens
are drawn as soon as step k-1 was read:

    overlapped  forward k · read k-1 · sample k · process k-1 · forward k+1 · ...
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.device.streams import Event
from common.device.watch import EventWatch
from common.engine.batch import ScheduleBatch
from common.engine.model_runner import ModelRunner, StepForward, StepRecord
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

    def __init__(self, runner: ModelRunner, watch: EventWatch, *, overlap: bool) -> None:
        self._runner = runner
        self._watch = watch
        self._overlap = overlap
        self._in_flight: deque[tuple[StepT, StepRecord]] = deque()
        self._unsampled: tuple[StepT, StepForward] | None = None  # behind the one in flight
        self._counters: Counter[str] = Counter()

    @property
    def num_launched(self) -> int:
        """Steps launched since start."""
        return self._runner.num_launched

    def counters(self) -> dict[str, int]:
        """Steps since start, their rows and prompt tokens; how many steps had up to 1, 2, 4, 8, ... rows."""
        return {"steps": self.num_launched, **self._counters}

    @property
    def is_idle(self) -> bool:
        """Nothing is in flight."""
        return not self._num_unread

    @property
    def can_launch(self) -> bool:
        """There is room for another step: overlapped, two may be in flight."""
        return self._num_unread < (2 if self._overlap else 1)

    def launch(self, step: StepT) -> Event:
        """Start a step; returns when its forward, and so its KV, is done."""
        num_rows = len(step.batch.req_pool_indices)
        self._counters["step_rows"] += num_rows
        self._counters[f"steps_up_to_{1 << (num_rows - 1).bit_length()}"] += 1
        self._counters["tokens_computed"] += step.batch.extend_num_tokens - step.batch.num_decode
        forward = self._runner.forward(step.batch)
        if self._in_flight and self._runner.waits_for(step.batch, self._in_flight[-1][0].batch):
            self._unsampled = step, forward
        else:
            self._sample(step, forward)
        return forward.forward_done

    def results(self, *, launched: bool) -> Iterator[StepResult[StepT]]:
        """Give what is to be processed now; `launched` says whether a step was launched in this round."""
        keep = 1 if self._overlap and launched else 0
        while self._num_unread > keep and self._in_flight[0][1].copy_done.is_done():
            step, record = self._in_flight.popleft()
            tokens = self._runner.take(record)
            if self._unsampled is not None:  # before anything else: the device may be waiting
                unsampled, self._unsampled = self._unsampled, None
                self._sample(*unsampled)
            yield StepResult(step, tuple(tokens))

    def pollables(self) -> list[int]:
        """What gets readable when there may be results."""
        return self._watch.pollables()

    def close(self) -> None:
        """End the watch."""
        self._watch.close()

    def wake(self) -> None:
        """The loop is awake: what happened until now need not wake it again."""
        self._watch.clear()

    @property
    def _num_unread(self) -> int:
        return len(self._in_flight) + (self._unsampled is not None)

    def _sample(self, step: StepT, forward: StepForward) -> None:
        record = self._runner.sample(forward)
        self._in_flight.append((step, record))
        self._watch.watch(record.copy_done)
