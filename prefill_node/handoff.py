"""Between transfers and prompts: what arrives is scheduled, what is computed is sent, what ends is freed.

The only place that knows both the scheduler and the endpoint of a prefill node.
"""

from __future__ import annotations

import logging

from common.clock import Clock
from common.device.streams import Event
from common.device.watch import EventWatch
from common.engine.grammar_compiler import GrammarRefusal
from common.engine.loader import Engine
from common.engine.step_loop import StepLoop
from prefill_node.scheduler import PrefillScheduler, PrefillStep
from transfer.sender_endpoint import (
    SenderEndpoint,
    SenderOutput,
    TransferArrived,
    TransferEnded,
    TransferKey,
    TransferStopped,
)

log = logging.getLogger("baton.prefill")


class Handoff:
    """Moves prompts from the endpoint through the model and back."""

    def __init__(
        self,
        engine: Engine,
        scheduler: PrefillScheduler[TransferKey],
        endpoint: SenderEndpoint,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._endpoint = endpoint
        self._clock = clock
        watch = EventWatch(engine.streams.device, "step results")
        self.loop: StepLoop[PrefillStep[TransferKey]] = StepLoop(engine.runner, watch, overlap=engine.overlap)

    def take(self, outputs: list[SenderOutput]) -> None:
        """What the endpoint reports."""
        for output in outputs:
            match output:
                case TransferArrived(key, prefill):
                    rejection = self._scheduler.submit(key, prefill)
                    if rejection is not None:
                        log.warning("transfer %d: %s", key.transfer_id, rejection.reason)
                        self._endpoint.reject(key, rejection.status, rejection.reason)
                case TransferStopped(key):
                    self._scheduler.stop(key)
                case TransferEnded(key):
                    self._scheduler.end(key)

    def step(self) -> bool:
        """Launch the next chunks and send them behind the forward; True when something was done."""
        self.loop.wake()
        self._compile()
        for request in self._scheduler.admit():
            self._engine.runner.grant(request)
        step = self._scheduler.next_step(self._clock()) if self.loop.can_launch else None
        if step is not None:
            self._send(step, after=self.loop.launch(step))
        done = step is not None
        for result in self.loop.results(launched=step is not None):
            done = True
            for key, token in self._scheduler.process(result.step, result.tokens, self._clock()):
                self._endpoint.first_token(key, token)
        return done

    def _compile(self) -> None:
        """Queue those whose grammar is compiled, and have the others' compiled."""
        for key, answer in self._engine.grammars.answers(self._scheduler.compiling()):
            if isinstance(answer, GrammarRefusal):
                self._scheduler.stop(key)
                self._endpoint.reject(key, answer.status, answer.reason)
            else:
                self._scheduler.compiled(key, answer)

    def _send(self, step: PrefillStep[TransferKey], after: Event) -> None:
        for chunk in step.chunks:
            if chunk.plan.start == 0:
                self._endpoint.start(chunk.job.key)
            self._endpoint.chunk(
                chunk.job.key,
                chunk.plan.first_page,
                chunk.plan.page_ids,
                is_last=chunk.plan.is_last,
                after=after,
            )
