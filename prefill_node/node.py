"""The process of `baton prefill`: computes prompts for decode nodes, and hands them over."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from common.clock import Clock
from common.config import DrainConfig, EngineConfig, ModelConfig, NodeConfig, TransferConfig
from common.context import open_context
from common.engine.loader import Duties, Engine, load_engine
from common.keys import load_keys
from common.messages import PageLedger, Role, Status
from common.node import join_gateways, make_hello, private_address, remove_socket_at_exit, run_loop
from common.sockets import Pollable
from common.supervision.lifeline import Lifeline
from prefill_node.handoff import Handoff
from prefill_node.scheduler import PrefillScheduler
from transfer.faulty_endpoints import sender_class
from transfer.sender_endpoint import TransferKey
from transfer.transfer_stream import TransferStream


class PrefillNode:
    """A server to decode nodes: it knows transfers, never a client.

    `clock` is the one that `turn` is given the time of.
    """

    def __init__(
        self,
        engine: Engine,
        transfer: TransferConfig,
        node: NodeConfig,
        listen: str,
        *,
        debug_checks: bool,
        clock: Clock = time.monotonic,
    ) -> None:
        self._engine = engine
        self._debug_checks = debug_checks
        self._context = open_context(load_keys(node.keys))
        hello, epoch = make_hello(
            Role.PREFILL,
            node,
            model=engine.spec.fingerprint,
            layout=engine.layout,
            capacity_tokens=engine.pool.num_pages * engine.layout.page_size,
            prefill_budget_tokens=engine.prefill_budget,
            transfer=transfer,
            device_type=engine.pool.device.type,
        )
        stream = TransferStream(engine.streams)
        self._endpoint = sender_class()(
            self._context, listen, engine.pool, transfer, hello, epoch, stream=stream, clock=clock
        )
        self._scheduler: PrefillScheduler[TransferKey] = PrefillScheduler(
            layout=engine.layout,
            num_pages=engine.pool.num_pages,
            num_rows=engine.num_rows,
            budget=engine.prefill_budget,
            vocab_size=engine.spec.vocab_size,
            context_length=engine.spec.context_length,
            eos_token_ids=engine.spec.eos_token_ids,
        )
        self._handoff = Handoff(engine, self._scheduler, self._endpoint, clock)
        self._gateways = join_gateways(
            self._context,
            node.join,
            replace(hello, listen=self._endpoint.address),
            epoch,
            status_of=self._status,
            stats=self._stats,
            clock=clock,
        )

    def turn(self, now: float) -> bool:
        """Read, compute one step, send."""
        for gateway in self._gateways:
            gateway.poll(now)
        self._handoff.take(self._endpoint.poll(now))
        done = self._handoff.step()
        # What the step ended (a Commit) is reported by the next poll; without this turn it would wait.
        self._handoff.take(self._endpoint.take_outputs())
        if self._debug_checks:
            self._scheduler.check_invariants()
        return done or self._endpoint.has_more

    def pollables(self) -> list[Pollable]:
        """What the node waits for."""
        links = [item for gateway in self._gateways for item in gateway.connector.pollables()]
        sockets = [*links, *self._endpoint.pollables()]
        return [*sockets, *self._handoff.loop.pollables(), *self._engine.grammars.pollables()]

    def deadline(self) -> float | None:
        """When `turn` has something to do at the latest."""
        deadlines = (*(g.connector.deadline() for g in self._gateways), self._endpoint.deadline())
        return min((d for d in deadlines if d is not None), default=None)

    def drain(self) -> None:
        """Take no new transfers; those that are here are finished."""
        self._endpoint.drain()
        for gateway in self._gateways:
            gateway.send_status()

    def is_drained(self) -> bool:
        """Say whether the decode nodes have heard the end of every transfer."""
        return self._endpoint.is_drained

    def close(self) -> None:
        """Close all sockets."""
        self._handoff.loop.close()
        for gateway in self._gateways:
            gateway.close()
        self._endpoint.close()
        self._context.destroy(linger=0)

    def _status(self, _: int) -> Status:
        return Status(
            last_seq_seen=0,
            open_ids=(),
            queued=self._scheduler.num_queued,
            running=self._scheduler.num_computing,
            steps=self._handoff.loop.num_launched,
            draining=self._endpoint.is_draining,
        )

    def _stats(self) -> tuple[PageLedger, dict[str, int]]:
        counters = Counter(self._endpoint.counters())
        for gateway in self._gateways:
            counters.update(gateway.connector.counters)
        counters.update(self._handoff.loop.counters())
        counters["attention_fallbacks"] = int(self._engine.attention_fell_back)
        return self._scheduler.ledger(), dict(counters)


def run_prefill(
    model: ModelConfig,
    engine: EngineConfig,
    transfer: TransferConfig,
    node: NodeConfig,
    drain: DrainConfig,
    lifeline: Lifeline,
) -> None:
    """Run a prefill node until it is told to end, and its transfers are over; `model.model` is a folder.

    Raises:
        ConfigError: the model or a setting does not work here.
    """
    listen = node.listen or private_address(node.join, "prefill", lifeline)
    remove_socket_at_exit(listen, lifeline)
    loaded = load_engine(Path(model.model), model, engine, Duties(decodes=False))
    prefill = PrefillNode(loaded, transfer, node, listen, debug_checks=engine.debug_checks)
    run_loop(prefill, lifeline, drain.drain_grace)
