"""The life of a request on a decode node. Pure: no clock, no socket, no tensor.

    QUEUED ──pages──► TRANSFERRING ──pages and first token in──► ARRIVED ──PREBUILT──► RUNNING ──► ENDED
       ├────pages───► PREFILLING (this node computes it) ──last chunk launched───────────▲ │
       └◄──────────────────── retracted: no page was left for the oldest ──────────────────┘

1. `submit` checks a request and queues it (with a grammar, `compiled` does); `admit` gives pages for its
   prompt, a row, and, unless this node computes it, a prefill node.
2. `transfer_done` brings the first token. It goes out at once; if it ends the request, nothing is decoded. Of
   several choices each is a request of its own from here on; before, one entry stands for all (choices.py).
3. `take_prebuilt` makes a PREBUILT batch of those that arrived, as many as may run; `process_prebuilt` puts
   them into the running batch once their first tokens are seeded.
4. `next_step` plans a DECODE step of all that runs and has a page for its next token (running.py), an EXTEND
   step of local prompts (local_prompts.py), or a MIXED step of both. Where nobody can go on, the youngest is
   retracted: it is computed again from its tokens, here, once there is room.
5. `process` takes a step's tokens. Requests that ended meanwhile are passed over.
6. Whatever ends a request, in whatever phase: pages and row come back once (holdings.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from common.engine.batch import prepare_for_decode, prepare_for_extend, prepare_for_mixed
from common.engine.chunking import note_done
from common.errors import InvariantError
from common.kv.allocator import PageUse
from common.kv.layout import KVLayout
from common.messages import Begun, Choice, Commit, Granted, PageLedger, Submit
from common.remembered import EarlyAborts
from common.request import FinishReason, Grammar, PrefillStamps, Request, SampledToken
from decode_node.admission import AdmissionQueue, PrefillLoad, choose_prefill_node, may_enter
from decode_node.checks import RETRY_AFTER_S, are_tokens, check_prefill, check_request, node_is_draining
from decode_node.choices import Drawing, part
from decode_node.deadlines import Deadlines
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
    StampsOut,
    TokenOut,
)
from decode_node.holdings import Holdings
from decode_node.local_prompts import LocalPrompts
from decode_node.running import Grown, RunningBatch

MAX_ATTEMPTS = 3


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
    requests_expired: int = 0
    is_draining: bool = False
    num_retracted: int = 0
    num_retried: int = 0  # transfers
    parted: list[Request] = field(default_factory=list)  # choices that have rows, not yet mirrored
    _holdings: Holdings = field(init=False)
    _queue: AdmissionQueue[RequestKey, Entry] = field(init=False)
    _compiling: dict[RequestKey, Entry] = field(default_factory=dict)
    _entries: dict[RequestKey, Entry] = field(default_factory=dict)
    _deadlines: Deadlines[RequestKey] = field(default_factory=Deadlines)
    _of_transfer: dict[int, Entry] = field(default_factory=dict)
    _prefilling: LocalPrompts = field(init=False)
    _drawing: Drawing = field(default_factory=Drawing)
    _running: RunningBatch = field(init=False)
    _early_aborts: EarlyAborts[RequestKey] = field(default_factory=EarlyAborts)
    _num_submitted: int = 0
    _refused_at: tuple[Entry, int] | None = None  # who was not let in, and at which change of the holdings

    def __post_init__(self) -> None:
        """Make what depends on the sizes."""
        self._holdings = Holdings(self.num_pages, self.num_rows)
        self._queue = AdmissionQueue(self.max_queued)
        self._prefilling = LocalPrompts(self.layout.page_size, self.prefill_budget)
        self._running = RunningBatch(self.max_running, self.layout.page_size)

    # Coming in ----------------------------------------------------------------------------------------------

    def submit(self, key: RequestKey, submit: Submit, now: float, *, longest_prompt: int | None) -> None:
        """Queue a request, or refuse it.

        `longest_prompt`: tokens that somebody can compute, None when nobody is there.
        """
        request = Request(submit.prompt_ids, submit.sampling, len(submit.prompt_ids))
        entry = Entry(key, request, now, age=self._num_submitted + 1)
        if any(each in self._entries for each in entry.keys):
            return  # said twice, or ids that are taken
        entry.keys = [each for each in entry.keys if not self._early_aborts.take(each)]
        if not entry.keys:
            return
        if self.is_draining:
            self.out.extend(node_is_draining(each) for each in entry.keys)
            return
        most = min(self.context_length, self.num_pages * self.layout.page_size)
        refusal = check_request(
            key, request, vocab_size=self.vocab_size, most_tokens=most, most_choices=self.num_rows
        )
        if refusal is None:
            refusal = check_prefill(key, request, longest_prompt)
        self._num_submitted += request.sampling.num_choices
        if refusal is None:
            refusal = self._enqueue(entry)
        if refusal is not None:
            self.out.extend(replace(refusal, key=each) for each in entry.keys)
            return
        self._entries.update(dict.fromkeys(entry.all_keys(), entry))
        if submit.timeout_ms is not None:
            for each in entry.keys:
                self._deadlines.set(each, now + submit.timeout_ms / 1000)

    def compiling(self) -> list[tuple[RequestKey, Grammar]]:
        """Requests whose grammars are to be compiled."""
        grammars = ((key, entry.request.sampling.grammar) for key, entry in self._compiling.items())
        return [(key, grammar) for key, grammar in grammars if grammar is not None]

    def compiled(self, key: RequestKey, grammar: Any) -> None:
        """Queue a request whose grammar is compiled."""
        entry = self._compiling.pop(key)
        entry.request.compiled_grammar = grammar
        entry.phase = Phase.QUEUED
        if (refusal := self._enqueue(entry)) is not None:
            self._refuse(entry, refusal)

    def not_compiled(self, key: RequestKey, status: int, reason: str) -> None:
        """Refuse a request whose grammar is none."""
        code, retry_after_s = ("invalid_grammar", None) if status == 400 else (None, RETRY_AFTER_S)
        refusal = RefusedOut(key, status, reason, code, retry_after_s=retry_after_s)
        self._refuse(self._compiling[key], refusal)

    def drain(self) -> None:
        """Take no new requests, and hand back those that hold nothing here and have no token yet."""
        self.is_draining = True
        for entry in list(self._entries.values()):
            if entry.phase in (Phase.COMPILING, Phase.QUEUED) and not entry.was_retracted:
                self._hand_back(entry)

    @property
    def is_idle(self) -> bool:
        """There is no request here."""
        return not self._entries

    def admit(self, prefill_nodes: Sequence[PrefillLoad]) -> Grant | None:
        """Give the first in the queue what it needs, if that is there; to be called until it says None."""
        entry = self._queue.first()
        if entry is None:
            return None
        node_id = None
        local = self.colocated or entry.was_retracted
        if not local and (node_id := choose_prefill_node(prefill_nodes, entry.request.prompt_len)) is None:
            return None
        if not self._has_room_for(entry):
            return None
        self._queue.remove(entry.key)
        need = self.layout.pages_for(entry.request.fill_len)
        if local:
            self._holdings.lease(entry, need, PageUse.ACTIVE)
            entry.phase = Phase.PREFILLING
            self._prefilling.append(entry)
        else:
            self._holdings.lease(entry, need, PageUse.INCOMING)
            entry.phase = Phase.TRANSFERRING
            entry.attempts += 1
        return Grant(entry, node_id)

    def granted(self, grant: Grant, transfer_id: int | None, now: float) -> None:
        """A prefill node was asked, and the transfer's id names the request from now on; None: nobody was."""
        entry = grant.entry
        if transfer_id is not None:
            entry.transfer_id = transfer_id
            self._of_transfer[transfer_id] = entry
        if not entry.was_retracted:
            request_ids = tuple(key.request_id for key in entry.keys)
            entry.granted = Granted(request_ids, grant.node_id, entry.submitted_s, now)
            self.out.append(StampsOut(entry.key, entry.granted))

    # Arriving -----------------------------------------------------------------------------------------------

    def transfer_done(self, transfer_id: int, commit: Commit, now: float) -> None:
        """Pages and first token are in. The token goes out now, not a decode step later."""
        entry = self._of_transfer.pop(transfer_id, None)
        if entry is None:
            return
        entry.transfer_id = None
        most = max(choice.first_token for choice in commit.choices)
        if most >= self.vocab_size:  # the next step would read past the embeddings
            self._fail(entry, 500, f"the prefill node sent {most}, which is no token")
            return
        if not are_tokens(commit.prompt_top_ids, self.vocab_size):
            self._fail(entry, 500, "the prefill node sent log probabilities of what is no token")
            return
        if entry.request.prompt_logprobs is not None:
            entry.request.prompt_logprobs = commit.logprob_arrays()
        assert entry.lease is not None
        entry.lease.use = PageUse.ACTIVE
        self._note_begun(entry, commit.stamps, now)
        self._hand_over(entry, commit.choices)

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
            self._queue.append_again(entry.key, entry, entry.rank)
            self.num_retried += 1
        elif retryable and self.is_draining:
            self._hand_back(entry)
        else:
            self._fail(entry, status, reason)

    def transfer_released(self, transfer_id: int) -> None:
        """Nobody writes the pages of a transfer any more that was given up, or gave out."""
        self._holdings.release_quarantined(transfer_id)

    def prefill_lost(self, longest_prompt: int | None = None) -> None:
        """Who waits for a prefill node that is gone ends with an error, and can come back.

        `longest_prompt`: tokens that one of those left can compute, None when nobody is left.
        """
        for entry in self._queue.items():
            too_long = longest_prompt is None or entry.request.prompt_len > longest_prompt
            if too_long and not entry.was_retracted:
                self._fail(entry, 503, "no prefill node for it is ready")

    def take_prebuilt(self) -> Prebuilt | None:
        """Batch what arrived, as far as it may run; the metadata alone is read."""
        return self._running.take_prebuilt(self._prefilling.num_resuming)

    def process_prebuilt(self, prebuilt: Prebuilt, now: float) -> None:
        """The first tokens are seeded: the requests decode with everyone else."""
        self._running.merge(prebuilt, now)

    # Steps --------------------------------------------------------------------------------------------------

    def next_step(self, now: float) -> DecodeStep | None:
        """Plan a step, which must then be launched: chunks of local prompts, then all that can decode."""
        grown = self._grow()
        requests = [entry.request for entry in grown.ready]
        plans = self._prefilling.plan(room=self._running.room, num_decode=len(requests))
        if plans and requests:
            batch = prepare_for_mixed(plans, requests, self.layout.page_size)
        elif plans:
            batch = prepare_for_extend(plans, self.layout.page_size)
        elif requests:
            batch = prepare_for_decode(requests, self.layout.page_size)
        else:
            return None
        if grown.new_pages:
            batch = replace(batch, new_pages=grown.new_pages, page_copies=grown.copies)
        prefilled = self._prefilling.launch(plans, batch.mode, now)
        for entry in prefilled:
            if entry.request.sampling.num_choices == 1:
                self._running.start(entry)
            else:
                self._drawing.append(entry)
        for request in requests:
            request.computed_len += 1
            request.num_sampled += 1
        sampled = (entry for entry in prefilled for _ in range(entry.num_samples))
        return DecodeStep(self._holdings.launch(), batch, (*sampled, *grown.ready), plans, now)

    def process(self, step: DecodeStep, tokens: Sequence[SampledToken], now: float) -> None:
        """Take a step's tokens."""
        self._holdings.process(step.step_id)
        self._prefilling.learn(step, now)
        note_done(step.plans, now)
        for entry, sampled in zip(step.entries, tokens, strict=True):
            if entry.phase is Phase.ENDED:
                continue  # it ended while the step was in flight
            if not entry.request.outputs:
                if entry.phase is Phase.PREFILLING:  # one of several choices
                    if (first := self._drawing.take(entry, sampled, self.eos_token_ids)) is not None:
                        self._note_begun(entry, entry.request.prefill, now)
                        self._hand_over(entry, first)
                    continue
                self._note_begun(entry, entry.request.prefill, now)
            elif len(entry.request.outputs) == 1:
                entry.second_token_s = now
            if sampled.error is not None:
                self._fail(entry, 500, sampled.error)
                continue
            count = len(entry.request.outputs) + 1
            finish = entry.request.sampling.finish_reason(sampled.token, count, self.eos_token_ids)
            self._take_token(entry, sampled, finish)
        self._holdings.pass_fence(step.step_id)

    # Going out ----------------------------------------------------------------------------------------------

    def abort(self, key: RequestKey) -> int | None:
        """End a request in whatever phase it is; returns a transfer that must be given up too."""
        entry = self._entries.get(key)
        if entry is None:
            self._early_aborts.remember(key)
            return None
        self._deadlines.discard(key)
        entry.keys = [each for each in entry.keys if each != key]
        if entry.keys:
            return None  # other choices of its prompt are wanted
        transfer_id = entry.transfer_id
        self._end(entry)
        return transfer_id

    def expire(self, now: float) -> list[int]:
        """End what is overdue, in whatever phase; returns the transfers that must be given up too.

        To be called every turn, whether or not anything can be scheduled: this may free the pages for it.
        """
        transfers = []
        for key in self._deadlines.take_overdue(now):
            entry = self._entries.get(key)
            if entry is None:
                continue  # it ended with another choice of its prompt
            if entry.transfer_id is not None:
                transfers.append(entry.transfer_id)
            self.requests_expired += 1
            took_s, where = now - entry.submitted_s, entry.phase.name.lower()
            self._fail(entry, 504, f"the request did not end in time: {where} after {took_s:.3g} s")
        return transfers

    def deadline(self) -> float | None:
        """When `expire` has something to do."""
        return self._deadlines.next_s()

    def keys_of(self, epoch: int) -> list[RequestKey]:
        """All requests of a gateway."""
        return [key for key, entry in self._entries.items() if key.epoch == epoch and key in entry.keys]

    @property
    def num_queued(self) -> int:
        """Requests that wait for pages."""
        return len(self._queue)

    @property
    def is_out_of_pages(self) -> bool:
        """The request whose turn it is waits for pages, or for a row, and not for a prefill node."""
        entry = self._queue.first()
        return entry is not None and self._refused_at == (entry, self._holdings.num_changes)

    @property
    def num_running(self) -> int:
        """Requests that this node has to make steps for (not those that a prefill node computes)."""
        return len(self._prefilling) + len(self._drawing) + len(self._running)

    def ledger(self) -> PageLedger:
        """Pages by state."""
        return self._holdings.ledger()

    def check_invariants(self) -> None:
        """Check the pools and the phases.

        Raises:
            InvariantError: they contradict themselves.
        """
        entries = set(self._entries.values())
        self._holdings.check_invariants(entries)
        waiting = len(self._queue.items())
        placed = len(self._compiling) + waiting + len(self._of_transfer) + self.num_running
        if placed != len(entries):
            raise InvariantError(f"{placed} requests in the phases, {len(entries)} in all")

    # --------------------------------------------------------------------------------------------------------

    def _enqueue(self, entry: Entry) -> RefusedOut | None:
        request = entry.request
        if request.sampling.grammar is not None and request.compiled_grammar is None:
            if len(self._compiling) < self.max_queued:
                entry.phase = Phase.COMPILING
                self._compiling[entry.key] = entry
                return None
        elif self._queue.try_append(entry.key, entry, request.sampling.num_choices):
            return None
        text = f"{self.max_queued} requests are waiting already"
        return RefusedOut(entry.key, 429, text, retry_after_s=RETRY_AFTER_S)

    def _has_room_for(self, entry: Entry) -> bool:
        """Ask `may_enter`, but not again while nothing came free: what runs only takes."""
        asked = entry, self._holdings.num_changes
        if asked == self._refused_at:
            return False
        holders = (e.request for e in set(self._entries.values()) if e.lease is not None)
        free_pages, page_size = self._holdings.num_free_pages, self.layout.page_size
        has_rows = self._holdings.num_free_rows >= len(entry.keys)
        if has_rows and may_enter(entry.request, holders, free_pages, page_size):
            return True
        self._refused_at = asked
        return False

    def _grow(self) -> Grown:
        """Find pages for the next tokens; retract the youngest as long as nobody can go on."""
        while True:
            grown = self._running.grow(self._holdings)
            # A step in flight may end somebody; chunks get on without new pages.
            chunks = len(self._prefilling) > 0 and self._running.room > 0
            if grown.ready or not grown.num_blocked or chunks or self._holdings.has_step_in_flight:
                return grown
            entry = self._running.youngest()
            if entry is None:
                return grown  # alone, and others' pages are on their way back
            self._retract(entry)

    def _retract(self, entry: Entry) -> None:
        """Take a request's pages. No step of it is in flight: its outputs are all known."""
        self._running.discard(entry.key)
        self._holdings.release(entry)
        entry.request.retract()
        entry.phase = Phase.QUEUED
        self._queue.append_again(entry.key, entry, entry.rank)
        self.num_retracted += 1

    def _hand_over(self, entry: Entry, first_tokens: Sequence[Choice]) -> None:
        """The first tokens are in: each choice that goes on arrives, as a request of its own."""
        for key in entry.all_keys():
            del self._entries[key]
        for choice, first in part(entry, first_tokens, self._holdings, self.layout.page_size):
            self._entries[choice.key] = choice
            if choice is not entry:
                self.parted.append(choice.request)
            choice.request.num_sampled = 1
            self._running.arrive(choice)
            self._take_token(choice, SampledToken(first.first_token, first.logprobs), first.finish)

    def _note_begun(self, entry: Entry, prefill: PrefillStamps, now: float) -> None:
        """The first tokens are here, whoever computed them."""
        assert entry.granted is not None
        self.out.append(StampsOut(entry.key, Begun(entry.granted, prefill, now)))

    def _take_token(self, entry: Entry, sampled: SampledToken, finish: FinishReason | None) -> None:
        request = entry.request
        scores, request.prompt_logprobs = request.prompt_logprobs, None
        self.out.append(TokenOut(entry.key, len(request.outputs), sampled, finish, entry, scores))
        request.outputs.append(sampled.token)
        self.tokens_sampled += 1
        if finish is not None:
            self._end(entry)

    def _hand_back(self, entry: Entry) -> None:
        """Give a request without a token to the gateway again, for another decode node."""
        self.out.extend(node_is_draining(key) for key in entry.keys)
        self._end(entry)

    def _refuse(self, entry: Entry, refusal: RefusedOut) -> None:
        self.out.extend(replace(refusal, key=key) for key in entry.keys)
        self._end(entry)

    def _fail(self, entry: Entry, status: int, reason: str) -> None:
        retry_after_s = RETRY_AFTER_S if status == 503 else None
        self.out.extend(FailedOut(key, status, reason, retry_after_s) for key in entry.keys)
        self._end(entry)

    def _end(self, entry: Entry) -> None:
        for key in entry.all_keys():
            del self._entries[key]
            self._deadlines.discard(key)
        self._drawing.discard(entry.key)
        self._compiling.pop(entry.key, None)
        self._queue.remove(entry.key)
        self._prefilling.discard(entry.key)
        self._running.discard(entry.key)
        if entry.transfer_id is not None:
            self._of_transfer.pop(entry.transfer_id, None)
            self._holdings.quarantine(entry, entry.transfer_id)
        self._holdings.release(entry)
        entry.phase = Phase.ENDED
