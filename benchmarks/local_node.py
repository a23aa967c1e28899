"""A decode node's scheduler, engine and outbox in this process, without sockets, with a clock at each part.

The same objects in the same order as `DecodeNode.turn` and `DecodeNode._prebuild`, overlapped as the engine
says. What waits for the device waits for the loop's pollables, as `run_loop` does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.device_clock import DeviceClock
from common.codec import Envelope, IntArray
from common.config import EngineConfig, ModelConfig
from common.device.watch import EventWatch
from common.engine.loader import Engine, load_engine
from common.engine.step_loop import StepLoop
from common.errors import LocalError
from common.messages import CODEC, Choice, Commit, Submit, int32s
from common.request import PrefillStamps, SamplingParams
from common.sockets import wait
from decode_node.admission import PrefillLoad
from decode_node.entry import DecodeStep, RefusedOut, RequestKey
from decode_node.outbox import messages_of
from decode_node.scheduler import DecodeScheduler

PAGE_SIZE = 16
_EPOCH = 1
_EVERY_TOKEN = 2**31 - 1
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds that the parts of one turn took, which follow each other."""

    plan_s: float  # scheduler.next_step: choose requests, make the batch
    inputs_s: float  # launch: inputs, sampling, relay, copy to the host; on a CPU without the model's forward
    forward_s: float  # on a CPU; a GPU computes it meanwhile
    process_s: float  # results to tokens, finish decisions, pages
    outbox_s: float  # tokens to messages, and those to bytes
    launched: bool
    results_at_s: tuple[float, ...]  # when each result of the turn was processed (`time.perf_counter`)

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.plan_s + self.inputs_s + self.forward_s + self.process_s + self.outbox_s

    @property
    def host_s(self) -> float:
        """All of it without the model's forward."""
        return self.total_s - self.forward_s


def load_local(
    folder: Path, dtype: str, *, num_requests: int, max_len: int, prefill_budget: int = 512
) -> Engine:
    """Load a model on the CPU, for so many requests at once of `max_len` tokens (prompt and answer) at most.

    Raises:
        ConfigError: the model or a setting does not work here.
    """
    config = EngineConfig(
        device="cpu",
        page_size=PAGE_SIZE,
        kv_pages=num_requests * -(-max_len // PAGE_SIZE),
        max_running=num_requests,
        prefill_budget=prefill_budget,
    )
    return load_engine(folder, ModelConfig(dtype=dtype), config)


class LocalNode:
    """An engine that serves requests in this process, one turn after the other. Close it.

    Args:
        colocated: prompts are computed here; otherwise `arrive` says that they were elsewhere.
    """

    def __init__(self, engine: Engine, *, colocated: bool = False) -> None:
        self._engine = engine
        self._scheduler = DecodeScheduler(
            layout=engine.layout,
            num_pages=engine.pool.num_pages,
            num_rows=engine.num_rows,
            max_running=engine.max_running,
            max_queued=engine.num_rows,
            prefill_budget=engine.prefill_budget,
            colocated=colocated,
            vocab_size=engine.spec.vocab_size,
            context_length=engine.spec.context_length,
            eos_token_ids=engine.spec.eos_token_ids,
        )
        watch = EventWatch(engine.streams.device, "step results")
        self._loop: StepLoop[DecodeStep] = StepLoop(engine.runner, watch, overlap=engine.overlap)
        self.clock = DeviceClock(engine)
        self._next_id = 1

    def submit(self, prompt: Sequence[int] | IntArray, sampling: SamplingParams) -> RequestKey:
        """Take a request in, and give it what it needs.

        Raises:
            LocalError: it is refused.
        """
        key = RequestKey(_EPOCH, self._next_id)
        self._next_id += 1
        submit = Submit(key.request_id, sampling, int32s(prompt))
        self._scheduler.submit(key, submit, time.monotonic(), longest_prompt=_EVERY_TOKEN)
        if refused := [out for out in self._scheduler.out if isinstance(out, RefusedOut)]:
            raise LocalError(f"a request is refused: {refused}")
        nodes = [PrefillLoad("elsewhere", 0, _EVERY_TOKEN, _EVERY_TOKEN)]
        while (grant := self._scheduler.admit(nodes)) is not None:
            self._engine.runner.grant(grant.entry.request)
            transfer_id = None if grant.node_id is None else key.request_id
            self._scheduler.granted(grant, transfer_id, time.monotonic())
        return key

    def arrive(self, keys: Sequence[RequestKey]) -> float:
        """Say that a prefill node is done with requests; returns the seconds of their PREBUILT batch."""
        for index, key in enumerate(keys):
            first_token = 3 + index % (self._engine.spec.vocab_size - 3)
            commit = Commit(key.request_id, 1, PrefillStamps(), (Choice(first_token, None),))
            self._scheduler.transfer_done(key.request_id, commit, time.monotonic())
        started_s = time.perf_counter()
        prebuilt = self._scheduler.take_prebuilt()
        if prebuilt is None:
            raise LocalError("nothing arrived, or nothing more may run")
        self._engine.runner.seed_first_tokens(prebuilt.batch, [entry.request for entry in prebuilt.entries])
        self._scheduler.process_prebuilt(prebuilt, time.monotonic())
        elapsed_s = time.perf_counter() - started_s
        self._flush()
        return elapsed_s

    def turn(self) -> Turn | None:
        """Launch, process, or both, and wait for the device before it if need be; None: nothing is left."""
        while True:
            self._loop.wake()
            turn = self._turn()
            if turn.launched or turn.results_at_s:
                return turn
            if self._loop.is_idle:
                return None
            waited_from_s = time.perf_counter()
            wait(self._loop.pollables(), _PATIENCE_S)
            if time.perf_counter() - waited_from_s >= _PATIENCE_S:
                raise LocalError("the device does not end a step")

    def _turn(self) -> Turn:
        started_s = time.perf_counter()
        step = self._scheduler.next_step(time.monotonic()) if self._loop.can_launch else None
        planned_s = time.perf_counter()
        forward_s = 0.0
        if step is not None:
            with self.clock.step():
                self._loop.launch(step)
            forward_s = self.clock.host_forward_s
        launched_s = time.perf_counter()
        results_at_s = []
        for result in self._loop.results(launched=step is not None):
            self._scheduler.process(result.step, result.tokens, time.monotonic())
            results_at_s.append(time.perf_counter())
        processed_s = time.perf_counter()
        self._flush()
        return Turn(
            plan_s=planned_s - started_s,
            inputs_s=launched_s - planned_s - forward_s,
            forward_s=forward_s,
            process_s=processed_s - launched_s,
            outbox_s=time.perf_counter() - processed_s,
            launched=step is not None,
            results_at_s=tuple(results_at_s),
        )

    def run(self, num_results: int) -> list[Turn]:
        """Make turns until so many steps were processed, or nothing is left."""
        turns: list[Turn] = []
        while num_results > 0 and (turn := self.turn()) is not None:
            turns.append(turn)
            num_results -= len(turn.results_at_s)
        return turns

    def end(self, keys: Sequence[RequestKey]) -> None:
        """End requests, whatever they are at."""
        for key in keys:
            self._scheduler.abort(key)

    def close(self) -> None:
        """End all requests, and process what is in flight."""
        self.end(self._scheduler.keys_of(_EPOCH))
        while self.turn() is not None:
            pass
        self._loop.close()
        self.clock.close()

    def _flush(self) -> None:
        outs, self._scheduler.out = self._scheduler.out, []
        for seq, (epoch, message, _) in enumerate(messages_of(outs), 1):
            CODEC.encode(Envelope(epoch, seq, message))
