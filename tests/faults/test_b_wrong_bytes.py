"""B: wrong tokens without any error. Every answer is compared, and every page has a checksum."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.by_hand import by_hand, start_gateway
from tests.system.client import Client, Outcome, greedy
from tests.system.load import Fate, steady_load
from tests.system.oracle import Case, Oracle
from tests.system.server import running
from tests.system.test_standalone import CHECKS
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.system

NUM_REQUESTS = 500
NUM_CLIENTS = 16
CONTEXT = 512
D_PAGES, P_PAGES, PAGE_SIZE = 20, 10, 16
NUM_LENGTHS = 130  # a chunk of the budget, 128, and two more
NUM_TOKENS = 6


def test_b1_answers_stay_right_after_hundreds(model: Path, cases: list[Case]) -> None:
    """Pages are used again and again: few pages, many lengths, checksums at every hand-over."""
    draw = random.Random(1)
    fates = [
        Fate(draw.choice(cases), Outcome(), max_tokens=draw.choice((1, 2, 9, 17, 33)))
        for _ in range(NUM_REQUESTS)
    ]

    async def nothing(_: object) -> None:
        """No accident happens here."""

    with running(model, "--kv-pages", "48") as server:  # with --verify-pages
        client = Client(server.url, server.model)
        steady_load(client, fates, NUM_CLIENTS, nothing)
        for fate in fates:
            fate.case.check(fate.outcome, fate.max_tokens)
        assert client.metric("baton_node_chunks_broken_total") == 0
        assert client.metric("baton_node_transfers_failed_total") == 0
        client.assert_ledger_clean()


def test_b3_too_long_is_refused_and_never_answered(model: Path, oracle: Oracle) -> None:
    """Beyond the context, D's pool and P's pool, which is the smallest: always 400, and no text."""
    draw = random.Random(3)
    with by_hand(model) as processes:
        client, address = start_gateway(processes)
        processes.start("decode", "--join", address, *CHECKS, "--kv-pages", str(D_PAGES))
        processes.start("prefill", "--join", address, *CHECKS, "--kv-pages", str(P_PAGES))
        processes.wait_ready()
        longest = P_PAGES * PAGE_SIZE
        too_long = (
            longest + 1,
            D_PAGES * PAGE_SIZE - 1,
            D_PAGES * PAGE_SIZE,
            D_PAGES * PAGE_SIZE + 1,
            CONTEXT,
        )
        prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (*too_long, CONTEXT + 1)]
        bodies = [greedy(prompt, 1, stream=stream) for prompt in prompts for stream in (False, True)]
        for outcome in client.ask_all(bodies):
            assert outcome.status == 400, outcome
            assert outcome.error is not None
            assert outcome.error["code"] == "context_length_exceeded"
            assert (outcome.text, outcome.token_ids) == ("", [])
        # What just fits is answered, and right.
        case = oracle.case(prompts[0][:longest], 8)
        case.check(client.ask(case.body()))
        client.assert_ledger_clean()
        processes.end()


@pytest.fixture(scope="module")
def every_length(oracle: Oracle) -> list[Case]:
    """Prompts of 1 to 130 tokens."""
    draw = random.Random(4)
    prompts = ([draw.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in range(1, NUM_LENGTHS + 1))
    return [oracle.case(prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_b4_every_prompt_length_on_every_page_size(
    model: Path, every_length: list[Case], page_size: int
) -> None:
    with running(model, "--page-size", str(page_size)) as server:
        client = Client(server.url, server.model)
        outcomes = client.ask_all([case.body() for case in every_length])
        for case, outcome in zip(every_length, outcomes, strict=True):
            case.check(outcome)
        client.assert_ledger_clean()
