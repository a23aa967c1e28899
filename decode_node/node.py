"""The process of `baton decode`: owns requests from submission to the last token.

A turn of its loop: read everything; send first tokens and refusals; grant, and mirror that on the device;
PREBUILT; launch a step; process the one that is due; send. It waits for the device only where it waits for
its sockets: in the poll between two turns.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from pathlib import Path

from common.clock import Clock
from common.config import DecodeConfig, DrainConfig, EngineConfig, ModelConfig, NodeConfig, TransferConfig
from common.context import open_context
from common.device.watch import EventWatch
from common.engine.grammar_compiler import GrammarRefusal
from common.engine.loader import Duties, Engine, load_engine
from common.engine.step_loop import StepLoop
from common.keys import load_keys
from common.messages import Abort, PageLedger, Peers, Role, SharedPool, Status, Submit
from common.node import join_gateways, make_hello, run_loop
from common.peer import Peer, PeerDown, PeerMessage, PeerUp
from common.request import Request
from common.sockets import Pollable
from common.supervision.lifeline import Lifeline
from decode_node.admission import PrefillLoad
from decode_node.entry import DecodeStep, RequestKey
from decode_node.faulty_scheduler import scheduler_class
from decode_node.gateways import Gateway, Gateways
from decode_node.outbox import messages_of
from transfer.faulty_endpoints import receiver_class
from transfer.planes.cuda_ipc import cuda_pool
from transfer.receiver_endpoint import TransferDone, TransferGaveOut, TransferReleased

log = logging.getLogger("baton.decode")


class DecodeNode:
    """Runs the scheduler's plans; alone talks to the gateway about a request.

    `clock` is the one that `turn` is given the time of.
    """

    def __init__(
        self,
        engine: Engine,
        transfer: TransferConfig,
        decode: DecodeConfig,
        node: NodeConfig,
        *,
        max_running: int,
        debug_checks: bool,
        clock: Clock = time.monotonic,
    ) -> None:
        self._engine = engine
        self._colocated = decode.colocated
        self._debug_checks = debug_checks
        self._clock = clock
        self._context = open_context(load_keys(node.keys))
        hello, epoch = make_hello(
            Role.DECODE,
            node,
            model=engine.spec.fingerprint,
            layout=engine.layout,
            capacity_tokens=engine.pool.num_pages * engine.layout.page_size,
            prefill_budget_tokens=0,
            transfer=transfer,
            device_type=engine.pool.device.type,
            shm=None if engine.pool.fd is None else SharedPool(engine.pool.fd, engine.pool.num_pages),
            cuda=None if decode.colocated else cuda_pool(engine.pool),
        )
        self._endpoint = receiver_class()(
            self._context, engine.pool, transfer, hello, epoch, streams=engine.streams, clock=clock
        )
        self._scheduler = scheduler_class()(
            layout=engine.layout,
            num_pages=engine.pool.num_pages,
            num_rows=engine.num_rows,
            max_running=max_running,
            max_queued=decode.max_queued,
            prefill_budget=engine.prefill_budget,
            colocated=decode.colocated,
            vocab_size=engine.spec.vocab_size,
            context_length=engine.spec.context_length,
            eos_token_ids=engine.spec.eos_token_ids,
        )
        watch = EventWatch(engine.streams.device, "step results")
        self._loop: StepLoop[DecodeStep] = StepLoop(engine.runner, watch, overlap=engine.overlap)
        self._counters: Counter[str] = Counter()
        self._granted: list[Request] = []  # in this turn, and not yet mirrored on the device
        self._gateways = Gateways(
            join_gateways(
                self._context,
                node.join,
                hello,
                epoch,
                status_of=self._status,
                stats=self._stats,
                clock=clock,
            )
        )

    def turn(self, now: float) -> bool:
        """Read, admit, launch, process, send."""
        self._loop.wake()
        for gateway in self._gateways:
            self._read_gateway(gateway, now)
        self._compile()
        for transfer_id in self._scheduler.expire(now):
            self._endpoint.abort(transfer_id, now)
        self._read_prefill_nodes(now)
        self._flush()  # first tokens and refusals wait neither for the device's work nor for the step
        self._grant()
        self._mirror()
        self._prebuild()
        step = self._scheduler.next_step(self._clock()) if self._loop.can_launch else None
        if step is not None:
            self._loop.launch(step)
        done = step is not None
        for result in self._loop.results(launched=step is not None):
            done = True
            self._scheduler.process(result.step, result.tokens, self._clock())
        self._flush()
        if self._debug_checks:
            self._scheduler.check_invariants()
        return done

    def pollables(self) -> list[Pollable]:
        """What the node waits for."""
        links = [item for gateway in self._gateways for item in gateway.link.connector.pollables()]
        sockets = [*links, *self._endpoint.pollables()]
        return [*sockets, *self._loop.pollables(), *self._engine.grammars.pollables()]

    def deadline(self) -> float | None:
        """When `turn` has something to do at the latest."""
        links = [gateway.link.connector.deadline() for gateway in self._gateways]
        deadlines = (*links, self._endpoint.deadline(), self._scheduler.deadline())
        return min((d for d in deadlines if d is not None), default=None)

    def drain(self) -> None:
        """Take no new requests; those without pages go back to the gateway, the others end here."""
        self._scheduler.drain()
        self._flush()  # before the Status from which it is absent
        for gateway in self._gateways:
            gateway.said_usable = False
            gateway.link.send_status()

    def is_drained(self) -> bool:
        """Say whether all gateways have heard the end of every request."""
        peers = [gateway.peer for gateway in self._gateways]
        return self._scheduler.is_idle and all(peer is None or peer.has_heard for peer in peers)

    def close(self) -> None:
        """Close all sockets."""
        self._loop.close()
        for gateway in self._gateways:
            gateway.link.close()
        self._endpoint.close()
        self._context.destroy(linger=0)

    # The gateway --------------------------------------------------------------------------------------------

    def _read_gateway(self, gateway: Gateway, now: float) -> None:
        for event in gateway.link.poll(now):
            match event:
                case PeerUp(peer):
                    gateway.up(peer)
                case PeerDown(peer, _):
                    self._gateway_gone(gateway, peer, now)
                case PeerMessage(peer, Submit() as submit):
                    self._counters["requests_submitted"] += 1
                    key = RequestKey(peer.epoch, submit.request_id)
                    for i in range(submit.sampling.num_choices):
                        gateway.reconciler.opened(submit.request_id + i)
                    self._scheduler.submit(key, submit, self._clock(), longest_prompt=self._longest_prompt())
                    self._compile()
                    self._grant()  # so that only what has to wait counts as waiting
                case PeerMessage(peer, Abort(request_id)):
                    self._abort(RequestKey(peer.epoch, request_id), now)
                case PeerMessage(_, Peers(prefills)):
                    gateway.told(prefills, now)
                    self._set_prefill_nodes(now)
                case PeerMessage(peer, Status() as status):
                    gateway.is_draining = status.draining
                    lost = gateway.reconciler.on_status(status.last_seq_seen, status.open_ids)
                    self._counters["requests_lost"] += len(lost)
                    for request_id in lost:
                        self._abort(RequestKey(peer.epoch, request_id), now)
                case PeerMessage():
                    self._counters["messages_misplaced"] += 1

    def _gateway_gone(self, gateway: Gateway, peer: Peer, now: float) -> None:
        """What that gateway submitted is over: nobody is left to read it."""
        self._counters["gateways_lost"] += not gateway.is_draining
        for key in self._scheduler.keys_of(peer.epoch):
            self._abort(key, now)
        gateway.down()
        self._set_prefill_nodes(now)  # after the last one, the next tells which there are

    def _set_prefill_nodes(self, now: float) -> None:
        if not self._colocated:
            # With the last gateway goes who tells of them; no prefill node died.
            others_died = any(gateway.peer is not None for gateway in self._gateways)
            self._endpoint.set_prefill_nodes(self._gateways.prefills(), now, others_died=others_died)

    def _abort(self, key: RequestKey, now: float) -> None:
        self._counters["requests_aborted"] += 1
        if (gateway := self._gateways.of(key.epoch)) is not None:
            gateway.reconciler.closed(key.request_id)
        transfer_id = self._scheduler.abort(key)
        if transfer_id is not None:
            self._endpoint.abort(transfer_id, now)

    # Prefill nodes ------------------------------------------------------------------------------------------

    def _can_prefill(self) -> bool:
        return self._colocated or bool(self._endpoint.ready_nodes())

    def _is_usable(self) -> bool:
        return self._can_prefill() and not self._scheduler.is_draining

    def _longest_prompt(self) -> int | None:
        """Tokens of the longest prompt that somebody can compute; None when nobody is there."""
        if self._colocated:
            return self._engine.spec.context_length
        hellos = (self._endpoint.hello(node_id) for node_id in self._endpoint.ready_nodes())
        return max((hello.capacity_tokens for hello in hellos), default=None)

    def _read_prefill_nodes(self, now: float) -> None:
        for output in self._endpoint.poll(now):
            match output:
                case TransferDone(transfer_id, commit):
                    self._scheduler.transfer_done(transfer_id, commit, self._clock())
                case TransferReleased(transfer_id):
                    self._scheduler.transfer_released(transfer_id)
                case TransferGaveOut(transfer_id, status, reason, retryable):
                    self._scheduler.transfer_gave_out(
                        transfer_id,
                        status,
                        reason,
                        retryable=retryable,
                        can_prefill=self._can_prefill(),
                    )
        self._scheduler.prefill_lost(self._longest_prompt())
        is_usable = self._is_usable()
        for gateway in self._gateways:
            if is_usable is not gateway.said_usable and gateway.peer is not None:
                gateway.said_usable = is_usable
                self._flush()  # what ended here is told before a Status from which it is absent
                gateway.link.send_status()

    def _compile(self) -> None:
        """Queue those whose grammar is compiled, and have the others' compiled."""
        for key, answer in self._engine.grammars.answers(self._scheduler.compiling()):
            if isinstance(answer, GrammarRefusal):
                self._scheduler.not_compiled(key, answer.status, answer.reason)
            else:
                self._scheduler.compiled(key, answer)

    def _grant(self) -> None:
        # The loads are summed over all transfers: not in a turn in which nobody waits.
        while self._scheduler.num_queued and (grant := self._scheduler.admit(self._loads())) is not None:
            request = grant.entry.request
            self._granted.append(request)
            transfer_id = None
            if grant.node_id is not None:
                pages = request.page_ids[: self._engine.layout.pages_for(request.prompt_len)]
                transfer_id = self._endpoint.grant(grant.node_id, request.prompt_ids, request.sampling, pages)
            self._scheduler.granted(grant, transfer_id, self._clock())

    def _mirror(self) -> None:
        """Tell the device what was granted: after prefill nodes were asked, and first tokens are out."""
        parted, self._scheduler.parted = self._scheduler.parted, []
        for request in (*self._granted, *parted):
            if request.row:  # else it ended meanwhile
                self._engine.runner.grant(request)
        self._granted.clear()

    def _loads(self) -> list[PrefillLoad]:
        return [
            PrefillLoad(
                node_id,
                self._endpoint.tokens_ahead(node_id),
                budget_tokens=hello.prefill_budget_tokens,
                capacity_tokens=hello.capacity_tokens,
            )
            for node_id in self._endpoint.ready_nodes()
            for hello in (self._endpoint.hello(node_id),)
        ]

    def _prebuild(self) -> None:
        if (prebuilt := self._scheduler.take_prebuilt()) is None:
            return
        self._engine.runner.seed_first_tokens(prebuilt.batch, [entry.request for entry in prebuilt.entries])
        self._scheduler.process_prebuilt(prebuilt, self._clock())
        self._counters["requests_prebuilt"] += len(prebuilt.entries)

    # Going out ----------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        outs, self._scheduler.out = self._scheduler.out, []
        for epoch, message, ended in messages_of(outs):
            gateway = self._gateways.of(epoch)
            if gateway is None or gateway.peer is None:
                continue
            for key in ended:
                gateway.reconciler.closed(key.request_id)
            gateway.peer.send(message)

    def _status(self, epoch: int) -> Status:
        return Status(
            last_seq_seen=0,
            open_ids=tuple(key.request_id for key in self._scheduler.keys_of(epoch)),
            queued=self._scheduler.num_queued,
            out_of_pages=self._scheduler.is_out_of_pages,
            running=self._scheduler.num_running,
            steps=self._loop.num_launched,
            usable=self._is_usable(),
            draining=self._scheduler.is_draining,
        )

    def _stats(self) -> tuple[PageLedger, dict[str, int]]:
        counters = Counter(self._counters)
        counters.update(self._endpoint.counters())
        for gateway in self._gateways:
            counters.update(gateway.link.connector.counters)
        counters.update(self._loop.counters())
        counters["attention_fallbacks"] = int(self._engine.attention_fell_back)
        counters["tokens_sampled"] = self._scheduler.tokens_sampled
        counters["requests_expired"] = self._scheduler.requests_expired
        counters["requests_retracted"] = self._scheduler.num_retracted
        counters["transfers_retried"] = self._scheduler.num_retried
        return self._scheduler.ledger(), dict(counters)


def run_decode(
    model: ModelConfig,
    engine: EngineConfig,
    transfer: TransferConfig,
    decode: DecodeConfig,
    node: NodeConfig,
    drain: DrainConfig,
    lifeline: Lifeline,
) -> None:
    """Run a decode node until it is told to end, and its requests are over; `model.model` is a folder.

    Raises:
        ConfigError: the model or a setting does not work here.
    """
    duties = Duties(prefills=decode.colocated, shares_pool=not decode.colocated)
    loaded = load_engine(Path(model.model), model, engine, duties)
    run_loop(
        DecodeNode(
            loaded,
            transfer,
            decode,
            node,
            max_running=loaded.max_running,
            debug_checks=engine.debug_checks,
        ),
        lifeline,
        drain.drain_grace,
    )
