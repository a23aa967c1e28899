"""F: nobody waits for ever. Work always goes on, and a refusal anywhere reaches the client at once."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from conformance.fake_prefill import REASON, fake_prefill
from tests.faults.by_hand import AT_ONCE_S, assert_unavailable, by_hand, start_gateway, wait_for_nodes
from tests.system.client import Body, Client, Outcome
from tests.system.oracle import Case, Oracle
from tests.system.server import running

pytestmark = pytest.mark.system

NUM_PAGES = 80  # three whole answers
NUM_ANSWERS = 24
NUM_TOKENS = 400
PROGRESS_S = 5.0


@dataclass
class Timed(Outcome):
    """An outcome that notes when tokens came."""

    times_s: list[float] = field(default_factory=list)

    def take_choice(self, choice: Body) -> None:
        super().take_choice(choice)
        if choice.get("token_ids"):
            self.times_s.append(time.monotonic())


def test_f2_short_prompts_with_long_answers_always_go_on(
    model: Path, oracle: Oracle, cases: list[Case]
) -> None:
    """More answers grow at a time than the pool can hold: there is never no token for five seconds."""
    few = [oracle.case(case.prompt, NUM_TOKENS) for case in cases[:3]]
    chosen = [few[i % len(few)] for i in range(NUM_ANSWERS)]
    outcomes = [Timed() for _ in chosen]

    async def run(client: Client) -> None:
        async with client.session() as http:
            bodies = [case.body(stream=True) for case in chosen]
            calls = zip(bodies, outcomes, strict=True)
            await asyncio.gather(*(client.follow(http, body, outcome) for body, outcome in calls))

    with running(model, "--kv-pages", str(NUM_PAGES)) as server:
        client = Client(server.url, server.model)
        start = time.monotonic()
        asyncio.run(run(client))
        for case, outcome in zip(chosen, outcomes, strict=True):
            case.check(outcome)
        times_s = sorted([start, *(at for outcome in outcomes for at in outcome.times_s)])
        assert max(b - a for a, b in itertools.pairwise(times_s)) < PROGRESS_S
        # Otherwise nobody grew beyond what was there.
        assert client.metric("baton_node_requests_retracted_total") > 0
        client.assert_ledger_clean()


def test_f16_refusal_of_the_prefill_node_reaches_the_client(model: Path, cases: list[Case]) -> None:
    """D holds pages for it and waits: both let go at once, and the client has P's reason."""
    with by_hand(model) as processes:
        client, address = start_gateway(processes)
        processes.start("decode", "--join", address)
        listen = f"ipc://{processes.folder}/prefill.sock"
        with fake_prefill(model, address, "refusing", listen, refuses=True, verify_pages=False) as prefill:
            processes.wait_ready()
            for num_asked, stream in enumerate((False, True), 1):
                start = time.monotonic()
                outcome = client.ask(cases[2].body(stream=stream))
                took_s = time.monotonic() - start
                assert outcome.status == 400, outcome
                assert outcome.error is not None
                assert REASON in outcome.error["message"]
                assert took_s < AT_ONCE_S
                assert prefill.num_refused == num_asked  # no other try: it would be refused again
                client.assert_ledger_clean()
        processes.end()


def test_f16_prefill_node_that_cannot_be_reached_is_nobody(model: Path, cases: list[Case]) -> None:
    """P has joined the gateway, and every connection of D to it is refused."""
    with by_hand(model) as processes:
        client, address = start_gateway(processes)
        listen = processes.folder / "unreachable.sock"
        processes.start("prefill", "--join", address, "--listen", f"ipc://{listen}")
        wait_for_nodes(client, "prefill")
        listen.unlink()
        processes.start("decode", "--join", address)
        wait_for_nodes(client, "prefill", "decode")
        assert_unavailable(client, cases[2])
        client.assert_ledger_clean()
        processes.end()


def test_f17_refused_handshake_reaches_the_client(model: Path, cases: list[Case]) -> None:
    """D and P do not fit together: both say why, with both values, and the client has an error body."""
    with by_hand(model) as processes:
        client, address = start_gateway(processes)
        nodes = [
            processes.start(role, "--join", address, "--page-size", page_size)
            for role, page_size in (("prefill", "32"), ("decode", "16"))
        ]
        for node in nodes:
            refusal = node.wait_for(r"link refused: (.*page_size.*)")
            assert set(re.findall(r"(\d+) at", refusal)) == {"16", "32"}, refusal
        wait_for_nodes(client, "prefill", "decode")
        assert_unavailable(client, cases[2])
        # Another one that fits serves it, while the first stays refused.
        processes.start("prefill", "--join", address, name="fitting")
        processes.wait_ready()
        cases[2].check(client.ask(cases[2].body()))
        client.assert_ledger_clean()
        processes.end()
