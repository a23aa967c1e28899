"""A decode node's scheduler, engine and outbox in this process, without sockets, with a clock at each part.

The same objects in the same order as `DecodeNode.turn` and `DecodeNode._prebuild`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.attention.base import AttentionInputs
from common.codec import Envelope
from common.engine.model_runner import ModelRunner
from common.engine.step_loop import StepLoop
from common.kv.pool import KVPool
from common.messages import CODEC, Choice, Commit, Submit, int32s
from common.model.decoder import Decoder, load_decoder
from common.model.spec import load_spec, resolve_dtype
from common.request import SamplingParams
from decode_node.admission import PrefillLoad
from decode_node.entry import DecodeStep, RequestKey
from decode_node.outbox import messages_of
from decode_node.scheduler import DecodeScheduler

PAGE_SIZE = 16
_EPOCH = 1
_EVERY_TOKEN = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds that the parts of one turn took, which follow each other."""

    plan_s: float  # scheduler.next_step: choose requests, make the batch
    inputs_s: float  # launch, without the model's forward: inputs, sampling, relay, copy to the host
    forward_s: float
    process_s: float  # results to tokens, finish decisions, pages
    outbox_s: float  # tokens to messages, and those to bytes

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.plan_s + self.inputs_s + self.forward_s + self.process_s + self.outbox_s

    @property
    def host_s(self) -> float:
        """All of it without the model's forward."""
        return self.total_s - self.forward_s


class _TimedDecoder(Decoder):
    """The decoder, with a clock around its forward."""

    def __init__(self, inner: Decoder) -> None:
        self.spec = inner.spec
        self._inner = inner
        self.forward_s = 0.0

    def forward(
        self, input_ids: Tensor, positions: Tensor, inputs: AttentionInputs, logits_indices: Tensor
    ) -> Tensor:
        """See Decoder."""
        started_s = time.perf_counter()
        logits = self._inner.forward(input_ids, positions, inputs, logits_indices)
        self.forward_s = time.perf_counter() - started_s
        return logits


class LocalNode:
    """A model that serves requests in this process, one turn after the other.

    Args:
        num_requests: how many there are at once.
        max_len: tokens of prompt and answer of the longest of them.
        colocated: prompts are computed here; otherwise `hand_over` says that they were elsewhere.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        *,
        num_requests: int,
        max_len: int,
        colocated: bool = True,
        prefill_budget: int = 512,
    ) -> None:
        spec = load_spec(folder)
        dtype = resolve_dtype(dtype, spec)
        layout = spec.kv_layout(PAGE_SIZE, dtype)
        device = torch.device("cpu")
        num_pages = num_requests * layout.pages_for(max_len)
        self._pool = KVPool(layout, num_pages, device)
        self._decoder = _TimedDecoder(load_decoder(folder, spec, dtype, self._pool))
        self._runner = ModelRunner(
            self._decoder,
            spec.eos_token_ids,
            num_rows=num_requests,
            max_pages=layout.pages_for(max_len),
            device=device,
        )
        self._scheduler = DecodeScheduler(
            layout=layout,
            num_pages=num_pages,
            num_rows=num_requests,
            max_running=num_requests,
            max_queued=num_requests,
            prefill_budget=prefill_budget,
            colocated=colocated,
            vocab_size=spec.vocab_size,
            context_length=spec.context_length,
            eos_token_ids=spec.eos_token_ids,
        )
        self._loop: StepLoop[DecodeStep] = StepLoop(self._runner, overlap=False)
        self._next_id = 1
        self.vocab_size = spec.vocab_size

    def submit(self, prompt: Sequence[int], sampling: SamplingParams) -> RequestKey:
        """Take a request in, and give it what it needs."""
        key = RequestKey(_EPOCH, self._next_id)
        self._next_id += 1
        submit = Submit(key.request_id, sampling, int32s(prompt))
        self._scheduler.submit(key, submit, time.monotonic(), longest_prompt=_EVERY_TOKEN)
        assert not self._scheduler.out, self._scheduler.out  # refused
        nodes = [PrefillLoad("elsewhere", 0, _EVERY_TOKEN, _EVERY_TOKEN)]
        while (grant := self._scheduler.admit(nodes)) is not None:
            self._runner.grant(grant.entry.request)
            if grant.node_id is not None:
                self._scheduler.granted(grant.entry, key.request_id, time.monotonic())
        return key

    def hand_over(self, key: RequestKey, first_token: int = 3) -> float:
        """Say that a prefill node is done with a request; returns the seconds of PREBUILT."""
        commit = Commit(key.request_id, 1, 0.0, 0.0, (Choice(first_token, None),))
        self._scheduler.transfer_done(key.request_id, commit, time.monotonic())
        started_s = time.perf_counter()
        prebuilt = self._scheduler.take_prebuilt()
        assert prebuilt is not None
        self._runner.seed_first_tokens(prebuilt.batch, [entry.request for entry in prebuilt.entries])
        self._scheduler.process_prebuilt(prebuilt)
        elapsed_s = time.perf_counter() - started_s
        self._flush()
        return elapsed_s

    def turn(self) -> Turn | None:
        """Make one step; None when there is nothing to do."""
        started_s = time.perf_counter()
        step = self._scheduler.next_step(started_s)
        if step is None:
            return None
        planned_s = time.perf_counter()
        self._loop.launch(step)
        launched_s = time.perf_counter()
        for result in self._loop.results(launched=True):
            self._scheduler.process(result.step, result.tokens, time.monotonic())
        processed_s = time.perf_counter()
        self._flush()
        return Turn(
            plan_s=planned_s - started_s,
            inputs_s=launched_s - planned_s - self._decoder.forward_s,
            forward_s=self._decoder.forward_s,
            process_s=processed_s - launched_s,
            outbox_s=time.perf_counter() - processed_s,
        )

    def end(self, keys: Sequence[RequestKey]) -> None:
        """End requests, whatever they are at."""
        for key in keys:
            self._scheduler.abort(key)

    def _flush(self) -> None:
        outs, self._scheduler.out = self._scheduler.out, []
        for seq, (epoch, message, _) in enumerate(messages_of(outs), 1):
            CODEC.encode(Envelope(epoch, seq, message))
