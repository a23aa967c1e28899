"""The life of a request on a decode node. Pure: no clock, no socket, no tensor.

    QUEUED ──pages──► TRANSFERRING ──pages and first token in──► ARRIVED ──PREBUILT──► RUNNING ──► ENDED
       └────pages───► PREFILLING (this node prefills by itself) ──last chunk launched────▲

1. `submit` checks a request and queues it; `admit` gives pages for prompt + max_tokens, a row, and, unless
   this node prefills by itself, a prefill node.
2. `transfer_done` brings the first token. It goes out at once; if it ends the request, nothing is decoded.
3. `take_prebuilt` makes a PREBUILT batch of those that arrived, as many as may run; `process_prebuilt` puts
   them into the running batch once their first tokens are seeded.
4. `next_step` plans a DECODE step of all that runs, an EXTEND step of local prompts, or a MIXED step of both,
   in which the prompts get as many tokens as mixing.py allows.
5. `process` takes a step's tokens. Requests that ended meanwhile are passed over.
6. Whatever ends a request, in whatever phase: pages and row come back once, behind the fence of the step
   that may still touch them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.engine.batch import (
    ForwardMode,
    prepare_for_decode,
    prepare_for_extend,
    prepare_for_mixed,
    prepare_for_prebuilt,
)
from common.engine.chunking import ChunkPlan, advance, plan_chunks
from common.errors import InvariantError
from common.kv.allocator import Lease, PageAllocator, PageUse
from common.kv.fence import FencedFreeList, StepFence
from common.kv.layout import KVLayout
from common.messages import Commit, PageLedger, Submit, Timings
from common.request import FinishReason, Request, SampledToken
from decode_node.admission import AdmissionQueue, PrefillLoad, choose_prefill_node
from decode_node.entry import (
    DecodeStep,
    Entry,
    FailedOut,
    Grant,
    Out,
    Phase,
    Prebuilt,
    RefusedOut,
    RequestKey,
    TokenOut,
)
from decode_node.mixing import MixingBudget

MAX_ATTEMPTS = 3
REMEMBERED_ABORTS = 4096
RETRY_AFTER_S = 1


@dataclass(eq=False)
class DecodeScheduler:
    """Owns the requests, the pages and the rows of a decode node."""

    layout: KVLayout
    num_pages: int
    num_rows: int
    max_running: int
    max_queued: int
    prefill_budget: int
    colocated: bool
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    pages: PageAllocator = field(init=False)
    out: list[Out] = field(default_factory=list)
    tokens_sampled: int = 0
    _rows: FencedFreeList = field(init=False)
    _queue: AdmissionQueue[RequestKey, Entry] = field(init=False)
    _fence: StepFence = field(default_factory=StepFence)
    _entries: dict[RequestKey, Entry] = field(default_factory=dict)
    _of_transfer: dict[int, Entry] = field(default_factory=dict)
    _prefilling: OrderedDict[RequestKey, Entry] = field(default_factory=OrderedDict)
    _arrived: OrderedDict[RequestKey, Entry] = field(default_factory=OrderedDict)
    _running: OrderedDict[RequestKey, Entry] = field(default_factory=OrderedDict)
    _quarantined: dict[int, Lease] = field(default_factory=dict)
    _early_aborts: OrderedDict[RequestKey, None] = field(default_factory=OrderedDict)
    _mixing: MixingBudget = field(init=False)
    _planned_last: ForwardMode | None = None
    _processed_s: float = 0.0

    def __post_init__(self) -> None:
        """Make the pools."""
        self._mixing = MixingBudget(self.layout.page_size, self.prefill_budget)
        self.pages = PageAllocator(self.num_pages)
        self._rows = FencedFreeList(range(1, self.num_rows + 1))
        self._queue = AdmissionQueue(self.max_queued)

    # Coming in ----------------------------------------------------------------------------------------------

    def submit(self, key: RequestKey, submit: Submit, now: float, *, longest_prompt: int | None) -> None:
        """Queue a request, or refuse it.

        `longest_prompt`: tokens that somebody can compute, None when nobody is there.
        """
        if key in self._early_aborts:
            del self._early_aborts[key]
            return
        if key in self._entries:
            return
        request = Request(submit.prompt_ids, submit.sampling, len(submit.prompt_ids))
        refusal = self._check(key, request)
        if refusal is None:
            refusal = self._check_prefill(key, request, longest_prompt)
        entry = Entry(key, request, now)
        if refusal is None and not self._queue.try_append(key, entry):
            refusal = RefusedOut(
                key, 429, f"{self.max_queued} requests are waiting already", retry_after_s=RETRY_AFTER_S
            )
        if refusal is not None:
            self.out.append(refusal)
            return
        self._entries[key] = entry

    def admit(self, prefill_nodes: Sequence[PrefillLoad]) -> Grant | None:
        """Give the first in the queue what it needs, if that is there; to be called until it says None."""
        entry = self._queue.first()
        if entry is None:
            return None
        need = self.layout.pages_for(entry.request.max_len)
        if self.pages.num_free < need or self._rows.num_free < 1:
            return None
        node_id = None
        if not self.colocated:
            node_id = choose_prefill_node(prefill_nodes, entry.request.prompt_len)
            if node_id is None:
                return None
        self._queue.remove(entry.key)
        self._lease(entry, need)
        if self.colocated:
            entry.phase = Phase.PREFILLING
            self._prefilling[entry.key] = entry
        else:
            entry.phase = Phase.TRANSFERRING
            entry.attempts += 1
        return Grant(entry, node_id)

    def granted(self, entry: Entry, transfer_id: int, now: float) -> None:
        """The prefill node was asked; the transfer's id names the request from now on."""
        entry.transfer_id = transfer_id
        entry.granted_s = now
        self._of_transfer[transfer_id] = entry

    # Arriving -----------------------------------------------------------------------------------------------

    def transfer_done(self, transfer_id: int, commit: Commit, now: float) -> None:
        """Pages and first token are in. The token goes out now, not a decode step later."""
        entry = self._of_transfer.pop(transfer_id, None)
        if entry is None:
            return
        entry.transfer_id = None
        choice = commit.choices[0]
        if choice.first_token >= self.vocab_size:  # the next step would read past the embeddings
            self._fail(entry, 500, f"the prefill node sent {choice.first_token}, which is no token")
            return
        entry.arrived_s = now
        remote_ms = commit.queue_ms + commit.prefill_ms
        entry.timings = Timings(
            queue_ms=(entry.granted_s - entry.submitted_s) * 1000 + commit.queue_ms,
            prefill_ms=commit.prefill_ms,
            transfer_ms=max(0.0, (now - entry.granted_s) * 1000 - remote_ms),
        )
        entry.request.num_sampled = 1
        entry.phase = Phase.ARRIVED
        self._arrived[entry.key] = entry
        assert entry.lease is not None
        entry.lease.use = PageUse.ACTIVE
        self._take_token(entry, SampledToken(choice.first_token, choice.logprobs), choice.finish)

    def transfer_gave_out(
        self, transfer_id: int, status: int, reason: str, *, retryable: bool, can_prefill: bool
    ) -> None:
        """A transfer failed: try again, unseen by the client, or end the request with an error."""
        entry = self._of_transfer.pop(transfer_id, None)
        if entry is None:
            return
        self._quarantine(entry, transfer_id)
        if retryable and can_prefill and entry.attempts < MAX_ATTEMPTS:
            entry.phase = Phase.QUEUED
            self._queue.append_again(entry.key, entry)
            return
        self._fail(entry, status, reason)

    def transfer_released(self, transfer_id: int) -> None:
        """Nobody writes the pages of a transfer any more that was given up, or gave out."""
        lease = self._quarantined.pop(transfer_id, None)
        if lease is not None:
            self.pages.release(lease)

    def prefill_lost(self, longest_prompt: int | None = None) -> None:
        """Who waits for a prefill node that is gone ends with an error, and can come back.

        `longest_prompt`: tokens that one of those left can compute, None when nobody is left. A longer one at
        the head of the queue would block all behind it.
        """
        while (entry := self._queue.first()) is not None and (
            longest_prompt is None or entry.request.prompt_len > longest_prompt
        ):
            self._fail(entry, 503, "no prefill node for it is ready")

    def take_prebuilt(self) -> Prebuilt | None:
        """Batch what arrived, as far as it may run; the metadata alone is read."""
        room = self.max_running - len(self._running)
        entries = tuple(self._arrived.values())[: max(0, room)]
        if not entries:
            return None
        batch = prepare_for_prebuilt([entry.request for entry in entries], self.layout.page_size)
        return Prebuilt(batch, entries)

    def process_prebuilt(self, prebuilt: Prebuilt) -> None:
        """The first tokens are seeded: the requests decode with everyone else."""
        for entry, seq_len in zip(prebuilt.entries, prebuilt.batch.seq_lens, strict=True):
            entry.request.computed_len = seq_len
            entry.phase = Phase.RUNNING
            self._running[entry.key] = self._arrived.pop(entry.key)

    # Steps --------------------------------------------------------------------------------------------------

    def next_step(self, now: float) -> DecodeStep | None:
        """Plan a step, which must then be launched: chunks of local prompts, then all that decode."""
        decode = [entry for entry in self._running.values() if entry.request.wants_decode]
        requests = [entry.request for entry in decode]
        plans = self._plan_chunks(num_decode=len(decode))
        if plans and decode:
            batch = prepare_for_mixed(plans, requests, self.layout.page_size)
        elif plans:
            batch = prepare_for_extend(plans, self.layout.page_size)
        elif decode:
            batch = prepare_for_decode(requests, self.layout.page_size)
        else:
            return None
        prefilled = self._advance_prompts(plans, now)
        for request in requests:
            request.computed_len += 1
            request.num_sampled += 1
        self._planned_last = batch.mode
        return DecodeStep(self._fence.launch(), batch, (*prefilled, *decode), now)

    def process(self, step: DecodeStep, tokens: Sequence[SampledToken], now: float) -> None:
        """Take a step's tokens."""
        self._fence.process(step.step_id)
        self._learn(step, now)
        for entry, sampled in zip(step.entries, tokens, strict=True):
            if entry.phase is Phase.ENDED:
                continue  # it ended while the step was in flight
            if not entry.request.outputs:
                self._note_local_prefill(entry, now)
            elif len(entry.request.outputs) == 1:
                timings = entry.timings
                entry.timings = Timings(
                    timings.queue_ms,
                    timings.prefill_ms,
                    timings.transfer_ms,
                    first_decode_ms=(now - entry.arrived_s) * 1000,
                )
            count = len(entry.request.outputs) + 1
            finish = entry.request.sampling.finish_reason(sampled.token, count, self.eos_token_ids)
            self._take_token(entry, sampled, finish)
        self.pages.pass_fence(step.step_id)
        self._rows.pass_fence(step.step_id)

    # Going out ----------------------------------------------------------------------------------------------

    def abort(self, key: RequestKey) -> int | None:
        """End a request in whatever phase it is; returns a transfer that must be given up too."""
        entry = self._entries.get(key)
        if entry is None:
            self._early_aborts[key] = None
            while len(self._early_aborts) > REMEMBERED_ABORTS:
                self._early_aborts.popitem(last=False)
            return None
        transfer_id = entry.transfer_id
        self._end(entry)
        return transfer_id

    def keys_of(self, epoch: int) -> list[RequestKey]:
        """All requests of a gateway."""
        return [key for key in self._entries if key.epoch == epoch]

    @property
    def num_queued(self) -> int:
        """Requests that wait for pages."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests that this node has to make steps for (not those that a prefill node computes)."""
        return len(self._prefilling) + len(self._arrived) + len(self._running)

    def ledger(self) -> PageLedger:
        """Pages by state."""
        return self.pages.ledger()

    def check_invariants(self) -> None:
        """Check the pools and the phases.

        Raises:
            InvariantError: they contradict themselves.
        """
        self.pages.check_invariants()
        placed = (
            len(self._queue)
            + len(self._of_transfer)
            + len(self._prefilling)
            + len(self._arrived)
            + len(self._running)
        )
        if placed != len(self._entries):
            raise InvariantError(f"{placed} requests in the phases, {len(self._entries)} in all")
        rows = sum(entry.lease is not None for entry in self._entries.values())
        if rows + self._rows.num_free + self._rows.num_resting != self.num_rows:
            raise InvariantError("rows do not add up")

    # --------------------------------------------------------------------------------------------------------

    def _check(self, key: RequestKey, request: Request) -> RefusedOut | None:
        """The gateway checks all this too; a node does not trust it."""
        most = min(self.context_length, self.num_pages * self.layout.page_size)
        if request.prompt_len < 1:
            return RefusedOut(key, 400, "the prompt is empty", param="prompt")
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self.vocab_size:
            return RefusedOut(key, 400, f"token ids go from 0 to {self.vocab_size - 1}", param="prompt")
        if max(request.sampling.stop_token_ids, default=0) >= self.vocab_size:
            return RefusedOut(
                key, 400, f"token ids go from 0 to {self.vocab_size - 1}", param="stop_token_ids"
            )
        if request.max_len > most:
            return RefusedOut(
                key,
                400,
                f"{request.prompt_len} prompt tokens and max_tokens {request.sampling.max_tokens} "
                f"are more than {most}",
                code="context_length_exceeded",
                param="max_tokens",
            )
        return None

    @staticmethod
    def _check_prefill(key: RequestKey, request: Request, longest_prompt: int | None) -> RefusedOut | None:
        if longest_prompt is None:
            return RefusedOut(key, 503, "no prefill node is ready", retry_after_s=RETRY_AFTER_S)
        if request.prompt_len > longest_prompt:
            return RefusedOut(
                key,
                400,
                f"a prompt of {request.prompt_len} tokens; the prefill nodes hold {longest_prompt}",
                code="context_length_exceeded",
                param="prompt",
            )
        return None

    def _lease(self, entry: Entry, num_pages: int) -> None:
        use = PageUse.ACTIVE if self.colocated else PageUse.INCOMING
        entry.lease = self.pages.allocate(num_pages, use)
        row = self._rows.take(1)
        if entry.lease is None or row is None:
            raise InvariantError("pages or a row were free a moment ago")
        entry.request.page_ids, entry.request.row = entry.lease.pages, row[0]

    def _plan_chunks(self, *, num_decode: int) -> tuple[ChunkPlan, ...]:
        """Cut local prompts, no more of them than may run, for a step in which `num_decode` others decode."""
        entries = list(self._prefilling.values())[: max(0, self.max_running - len(self._running))]
        if not entries:
            return ()
        budget = self._mixing.next_chunk() if num_decode else self.prefill_budget
        return plan_chunks((entry.request for entry in entries), budget, self.layout.page_size)

    def _advance_prompts(self, plans: Sequence[ChunkPlan], now: float) -> list[Entry]:
        """Count what was planned; return those whose prompt ends, which run from now on."""
        advance(plans)
        prefilled = []
        for entry, plan in zip(list(self._prefilling.values()), plans, strict=False):
            if plan.start == 0:
                entry.granted_s = now
            if plan.is_last:
                # Its token is in the relay for the next step, whether or not the host has seen it by then.
                self._running[entry.key] = self._prefilling.pop(entry.key)
                entry.phase = Phase.RUNNING
                prefilled.append(entry)
        return prefilled

    def _learn(self, step: DecodeStep, now: float) -> None:
        """Tell the mixing what a step took: since the last result, or since its launch if that was later."""
        took_s = now - max(step.planned_s, self._processed_s)
        self._processed_s = now
        if self._planned_last is not step.batch.mode:
            # Overlapped where a launch waits for the forward, as on a CPU, that was the next step's time.
            return
        match step.batch.mode:
            case ForwardMode.DECODE:
                self._mixing.observe_decode(took_s)
            case ForwardMode.MIXED:
                self._mixing.observe_mixed(took_s, step.batch.extend_num_tokens - step.batch.num_decode)

    def _note_local_prefill(self, entry: Entry, now: float) -> None:
        entry.arrived_s = now
        entry.timings = Timings(
            queue_ms=(entry.granted_s - entry.submitted_s) * 1000,
            prefill_ms=(now - entry.granted_s) * 1000,
        )

    def _take_token(self, entry: Entry, sampled: SampledToken, finish: FinishReason | None) -> None:
        self.out.append(TokenOut(entry.key, len(entry.request.outputs), sampled, finish, entry.timings))
        entry.request.outputs.append(sampled.token)
        self.tokens_sampled += 1
        if finish is not None:
            self._end(entry)

    def _fail(self, entry: Entry, status: int, reason: str) -> None:
        retry_after_s = RETRY_AFTER_S if status == 503 else None
        self.out.append(FailedOut(entry.key, status, reason, retry_after_s))
        self._end(entry)

    def _end(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._queue.remove(entry.key)
        for phase in (self._prefilling, self._arrived, self._running):
            phase.pop(entry.key, None)
        if entry.transfer_id is not None:
            self._of_transfer.pop(entry.transfer_id, None)
            self._quarantine(entry, entry.transfer_id)
        self._release(entry)
        entry.phase = Phase.ENDED

    def _quarantine(self, entry: Entry, transfer_id: int) -> None:
        """Part a request from a transfer that did not end well: its pages rest until they are released."""
        assert entry.lease is not None
        entry.transfer_id = None
        entry.lease.use = PageUse.QUARANTINED
        self._quarantined[transfer_id] = entry.lease
        self._give_back_row(entry)

    def _give_back_row(self, entry: Entry) -> None:
        self._rows.give_back((entry.request.row,), self._fence.current)
        entry.lease = None
        entry.request.page_ids, entry.request.row = (), 0

    def _release(self, entry: Entry) -> None:
        if entry.lease is not None:
            self.pages.release(entry.lease, fence=self._fence.current)
            self._give_back_row(entry)
