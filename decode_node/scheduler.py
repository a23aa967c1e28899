"""The life of a request on a decode node. Pure: no clock, no socket, no tensor.

    QUEUED ──pages──► TRANSFERRING ──pages and first token in──► ARRIVED ──PREBUILT──► RUNNING ──► ENDED
       └────pages───► PREFILLING (this node prefills by itself) ──last chunk launched────▲

1. `submit` checks a request and queues it; `admit` gives pages for prompt + max_tokens, a row, and, unless
   this node prefills by itself, a prefill node.
2. `transfer_done` brings the first token. It goes out at once; if it ends the request, nothing is decoded.
3. `take_prebuilt` makes a PREBUILT batch of those that arrived, as many as may run; `process_prebuilt` puts
   them into the running batch once their first tokens are seeded.
4. `next_step` plans a DECODE step of all that runs, an EXTEND step of local prompts (local_prompts.py), or a
   MIXED step of both.
5. `process` takes a step's tokens. Requests that ended meanwhile are passed over.
6. Whatever ends a request, in whatever phase: pages and row come back once (holdings.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.engine.batch import (
    prepare_for_decode,
    prepare_for_extend,
    prepare_for_mixed,
    prepare_for_prebuilt,
)
from common.errors import InvariantError
from common.kv.allocator import PageUse
from common.kv.layout import KVLayout
from common.messages import Commit, PageLedger, Submit, Timings
from common.request import FinishReason, Request, SampledToken
from decode_node.admission import AdmissionQueue, PrefillLoad, choose_prefill_node
from decode_node.checks import RETRY_AFTER_S, check_prefill, check_request
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
from decode_node.holdings import Holdings
from decode_node.local_prompts import LocalPrompts

MAX_ATTEMPTS = 3
REMEMBERED_ABORTS = 4096


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
    out: list[Out] = field(default_factory=list)
    tokens_sampled: int = 0
    _holdings: Holdings = field(init=False)
    _queue: AdmissionQueue[RequestKey, Entry] = field(init=False)
    _entries: dict[RequestKey, Entry] = field(default_factory=dict)
    _of_transfer: dict[int, Entry] = field(default_factory=dict)
    _prefilling: LocalPrompts = field(init=False)
    _arrived: OrderedDict[RequestKey, Entry] = field(default_factory=OrderedDict)
    _running: OrderedDict[RequestKey, Entry] = field(default_factory=OrderedDict)
    _early_aborts: OrderedDict[RequestKey, None] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        """Make what depends on the sizes."""
        self._holdings = Holdings(self.num_pages, self.num_rows)
        self._queue = AdmissionQueue(self.max_queued)
        self._prefilling = LocalPrompts(self.layout.page_size, self.prefill_budget)

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
        most = min(self.context_length, self.num_pages * self.layout.page_size)
        refusal = check_request(key, request, vocab_size=self.vocab_size, most_tokens=most)
        if refusal is None:
            refusal = check_prefill(key, request, longest_prompt)
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
        if not self._holdings.has_room_for(need):
            return None
        node_id = None
        if not self.colocated:
            node_id = choose_prefill_node(prefill_nodes, entry.request.prompt_len)
            if node_id is None:
                return None
        self._queue.remove(entry.key)
        if self.colocated:
            self._holdings.lease(entry, need, PageUse.ACTIVE)
            entry.phase = Phase.PREFILLING
            self._prefilling.append(entry)
        else:
            self._holdings.lease(entry, need, PageUse.INCOMING)
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
        self._holdings.quarantine(entry, transfer_id)
        if retryable and can_prefill and entry.attempts < MAX_ATTEMPTS:
            entry.phase = Phase.QUEUED
            self._queue.append_again(entry.key, entry)
            return
        self._fail(entry, status, reason)

    def transfer_released(self, transfer_id: int) -> None:
        """Nobody writes the pages of a transfer any more that was given up, or gave out."""
        self._holdings.release_quarantined(transfer_id)

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
        room = self.max_running - len(self._running)
        plans = self._prefilling.plan(room=room, num_decode=len(decode))
        if plans and decode:
            batch = prepare_for_mixed(plans, requests, self.layout.page_size)
        elif plans:
            batch = prepare_for_extend(plans, self.layout.page_size)
        elif decode:
            batch = prepare_for_decode(requests, self.layout.page_size)
        else:
            return None
        prefilled = self._prefilling.launch(plans, batch.mode, now)
        for entry in prefilled:
            entry.phase = Phase.RUNNING
            self._running[entry.key] = entry
        for request in requests:
            request.computed_len += 1
            request.num_sampled += 1
        return DecodeStep(self._holdings.launch(), batch, (*prefilled, *decode), now)

    def process(self, step: DecodeStep, tokens: Sequence[SampledToken], now: float) -> None:
        """Take a step's tokens."""
        self._holdings.process(step.step_id)
        self._prefilling.learn(step, now)
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
        self._holdings.pass_fence(step.step_id)

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
        return self._holdings.ledger()

    def check_invariants(self) -> None:
        """Check the pools and the phases.

        Raises:
            InvariantError: they contradict themselves.
        """
        self._holdings.check_invariants(self._entries.values())
        placed = (
            len(self._queue)
            + len(self._of_transfer)
            + len(self._prefilling)
            + len(self._arrived)
            + len(self._running)
        )
        if placed != len(self._entries):
            raise InvariantError(f"{placed} requests in the phases, {len(self._entries)} in all")

    # --------------------------------------------------------------------------------------------------------

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
        self._prefilling.discard(entry.key)
        for phase in (self._arrived, self._running):
            phase.pop(entry.key, None)
        if entry.transfer_id is not None:
            self._of_transfer.pop(entry.transfer_id, None)
            self._holdings.quarantine(entry, entry.transfer_id)
        self._holdings.release(entry)
        entry.phase = Phase.ENDED
