"""What a prefill node computes next. Pure: no clock, no socket, no tensor; prompts are transfers here.

1. A transfer waits in order. It starts when pages for its whole prompt, and a row, are free: two prompts
   that each hold half the pool would never end.
2. A step is one chunk of as many started prompts as the token budget holds. What is to be sent after a chunk
   is part of its plan.
3. Its pages are held, as outgoing, until the transfer is over; behind the fence, when a step in flight
   still writes them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

from common.engine.batch import ScheduleBatch, prepare_for_extend
from common.engine.chunking import ChunkPlan, advance, note_done, plan_chunks
from common.kv.allocator import Lease, PageAllocator, PageUse
from common.kv.faulty_allocator import page_allocator
from common.kv.fence import FencedFreeList, StepFence
from common.kv.layout import KVLayout
from common.messages import Choice, PageLedger, Prefill
from common.request import MAX_PROMPT_LOGPROBS, Grammar, Request, SampledToken
from transfer.sender import FirstToken, Reject

K = TypeVar("K", bound=Hashable)  # the owner's name for a transfer


@dataclass(eq=False, slots=True)
class PrefillJob(Generic[K]):
    """A transfer's prompt on its way."""

    key: K
    request: Request
    lease: Lease | None = None
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class JobChunk(Generic[K]):
    """A chunk and the transfer that it belongs to."""

    job: PrefillJob[K]
    plan: ChunkPlan


@dataclass(frozen=True, slots=True)
class PrefillStep(Generic[K]):
    """One EXTEND step."""

    step_id: int
    batch: ScheduleBatch
    chunks: tuple[JobChunk[K], ...]


@dataclass(eq=False)
class PrefillScheduler(Generic[K]):
    """Owns the jobs, the pages and the rows of a prefill node.

    `budget` (tokens a step) is at least the page size; `vocab_size` and `context_length` bound a prompt.
    """

    layout: KVLayout
    num_pages: int
    num_rows: int
    budget: int
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    pages: PageAllocator = field(init=False)
    _rows: FencedFreeList = field(init=False)
    _fence: StepFence = field(default_factory=StepFence)
    _compiling: dict[K, PrefillJob[K]] = field(default_factory=dict)
    _queued: OrderedDict[K, PrefillJob[K]] = field(default_factory=OrderedDict)
    _started: OrderedDict[K, PrefillJob[K]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        """Make the pools."""
        self.pages = page_allocator(self.num_pages, allocations=True)
        self._rows = FencedFreeList(range(1, self.num_rows + 1))

    @property
    def num_queued(self) -> int:
        """Transfers that wait for pages; those that wait for their grammar can have no step yet."""
        return len(self._queued)

    @property
    def num_computing(self) -> int:
        """Transfers that steps are still to be made for."""
        return self.num_queued + sum(self._computes(job) for job in self._started.values())

    def submit(self, key: K, prefill: Prefill) -> Reject | None:
        """Queue a transfer, or say why it can never be taken."""
        prompt_len = len(prefill.prompt_ids)
        num_pages = self.layout.pages_for(prompt_len)
        if not 0 < prompt_len <= self.context_length:
            return Reject(400, f"a prompt of {prompt_len} tokens; the model takes {self.context_length}")
        if min(prefill.prompt_ids) < 0 or max(prefill.prompt_ids) >= self.vocab_size:
            return Reject(400, f"a token id is not below the vocabulary size, {self.vocab_size}")
        if max(prefill.sampling.stop_token_ids, default=0) >= self.vocab_size:
            return Reject(400, f"a stop token id is not below the vocabulary size, {self.vocab_size}")
        if (prefill.sampling.num_prompt_logprobs or 0) > self.vocab_size:
            return Reject(400, f"the vocabulary has {self.vocab_size} tokens")
        if prompt_len * prefill.sampling.num_prompt_numbers > MAX_PROMPT_LOGPROBS:
            return Reject(400, f"more than {MAX_PROMPT_LOGPROBS} log probabilities of a prompt")
        if num_pages > self.num_pages:
            return Reject(400, f"a prompt of {num_pages} pages; the prefill node has {self.num_pages}")
        if len(prefill.page_ids) != num_pages:
            return Reject(500, f"{len(prefill.page_ids)} pages granted for a prompt of {num_pages}")
        request = Request(prefill.prompt_ids, prefill.sampling, prompt_len)
        waiting = self._queued if prefill.sampling.grammar is None else self._compiling
        waiting[key] = PrefillJob(key, request)
        return None

    def compiling(self) -> list[tuple[K, Grammar]]:
        """Transfers whose grammars are to be compiled."""
        grammars = ((key, job.request.sampling.grammar) for key, job in self._compiling.items())
        return [(key, grammar) for key, grammar in grammars if grammar is not None]

    def compiled(self, key: K, grammar: Any) -> None:
        """Queue a transfer whose grammar is compiled."""
        job = self._queued[key] = self._compiling.pop(key)
        job.request.compiled_grammar = grammar

    def admit(self) -> list[Request]:
        """Give pages and a row to the transfers at the head of the queue; returns those that got them."""
        admitted = []
        while self._queued:
            job = next(iter(self._queued.values()))
            need = self.layout.pages_for(job.request.prompt_len)
            if self.pages.num_free < need or self._rows.num_free < 1:
                break
            job.lease = self.pages.allocate(need, PageUse.OUTGOING)
            row = self._rows.take(1)
            assert job.lease is not None
            assert row is not None
            job.request.page_ids, job.request.row = job.lease.pages, row[0]
            self._started[job.key] = self._queued.pop(job.key)
            admitted.append(job.request)
        return admitted

    def next_step(self, now: float) -> PrefillStep[K] | None:
        """Plan the next chunks; what is returned must be launched."""
        jobs = [job for job in self._started.values() if self._computes(job)]
        requests = (job.request for job in jobs)
        plans = plan_chunks(requests, self.budget, self.layout.page_size, max_samples=self.num_rows)
        if not plans:
            return None
        batch = prepare_for_extend(plans, self.layout.page_size)
        advance(plans, now)
        chunks = tuple(JobChunk(job, plan) for job, plan in zip(jobs, plans, strict=False))
        return PrefillStep(self._fence.launch(), batch, chunks)

    def process(
        self, step: PrefillStep[K], tokens: Sequence[SampledToken], now: float
    ) -> list[tuple[K, FirstToken]]:
        """Take a step's result: the first tokens of the prompts that it ended, one for each choice."""
        self._fence.process(step.step_id)
        note_done((chunk.plan for chunk in step.chunks), now)
        ready: list[tuple[K, FirstToken]] = []
        ended = [chunk.job for chunk in step.chunks if chunk.plan.is_last]
        left = iter(tokens)
        for job in ended:
            request, sampling = job.request, job.request.sampling
            drawn = tuple(islice(left, sampling.num_choices))
            if job.stopped:
                continue
            choices = tuple(
                Choice(s.token, sampling.finish_reason(s.token, 1, self.eos_token_ids), s.logprobs)
                for s in drawn
            )
            ready.append((job.key, FirstToken(choices, request.prefill, request.prompt_logprobs)))
        self._pass_fence(step.step_id)
        return ready

    def stop(self, key: K) -> None:
        """Compute no more of a transfer. Its pages stay until `end`."""
        self._compiling.pop(key, None)
        self._queued.pop(key, None)
        if (job := self._started.get(key)) is not None:
            job.stopped = True

    def end(self, key: K) -> None:
        """A transfer is over: its pages and its row come back, behind the fence of a step in flight."""
        self._compiling.pop(key, None)
        self._queued.pop(key, None)
        job = self._started.pop(key, None)
        if job is None:
            return
        job.stopped = True
        assert job.lease is not None
        self.pages.release(job.lease, fence=self._fence.current)
        self._rows.give_back((job.request.row,), self._fence.current)

    def ledger(self) -> PageLedger:
        """Pages by state."""
        return self.pages.ledger()

    def check_invariants(self) -> None:
        """Check the pools; raises InvariantError."""
        self.pages.check_invariants()

    def _pass_fence(self, step_id: int) -> None:
        self.pages.pass_fence(step_id)
        self._rows.pass_fence(step_id)

    @staticmethod
    def _computes(job: PrefillJob[K]) -> bool:
        return not job.stopped and not job.request.is_prefilled
