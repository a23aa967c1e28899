"""A pool too small for all answers: everybody finishes, with the tokens that a pool for all would give."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.system.client import Body, Client, Outcome
from tests.system.server import running
from tests.system.test_logprobs_penalties import COMPLETIONS, DEFAULTS, Case, Loop, Scored, check
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.system

NUM_TOKENS = 320  # more than is kept free for each at admission
NUM_PAGES = 60  # of 16 tokens: the prompts of eight, and the answers of two
SET_UPS = {
    "pair, overlapped": ("--overlap", "on"),
    "pair, plain, frames": ("--overlap", "off", "--transfer", "frames"),
    "colocated, overlapped": ("--overlap", "on", "--colocated"),
}
FIELDS: list[Body] = [
    {},
    {"temperature": 1, "seed": 7, "frequency_penalty": 1, "logprobs": 2},
    {"repetition_penalty": 1.3, "logprobs": 0},
    {"temperature": 0.8, "top_k": 20, "seed": -3, "presence_penalty": 1, "repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": -0.2, "logprobs": 5},
    {"temperature": 1.2, "seed": 12, "logprobs": 1},
    {"logit_bias": {"41": 3, "90": -100}, "frequency_penalty": 0.3},
    {"temperature": 1, "seed": 99, "min_tokens": 310, "ignore_eos": False, "repetition_penalty": 0.9},
]


@pytest.fixture(scope="module")
def loop(model: Path) -> Loop:
    return Loop(model)


def cases_of(loop: Loop, all_fields: list[Body], num_tokens: int) -> list[Case]:
    draw = random.Random(2)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randrange(5, 33))] for _ in all_fields]
    bodies = [
        DEFAULTS | {"max_tokens": num_tokens, "prompt": prompt} | fields
        for prompt, fields in zip(prompts, all_fields, strict=True)
    ]
    return [loop.case(body, body["prompt"]) for body in bodies]


@pytest.fixture(scope="module")
def cases(loop: Loop) -> list[Case]:
    return cases_of(loop, FIELDS, NUM_TOKENS)


@pytest.fixture(scope="module")
def long_cases(loop: Loop) -> list[Case]:
    """Three that enter at once, with a little to spare, and need half as much again."""
    return cases_of(loop, FIELDS[:3], 460)


async def ask(client: Client, cases: list[Case], outcomes: list[Scored], cut: list[Body]) -> None:
    """All at once, and others beside them that are cut off at different times."""
    async with client.session() as http:

        async def visit(body: Body, num_events: int) -> None:
            outcome = Scored()
            task = asyncio.create_task(client.follow(http, body | {"stream": True}, outcome, COMPLETIONS))
            while len(outcome.token_ids) < num_events and not task.done():
                await asyncio.sleep(0.005)
            task.cancel()

        async def whole(case: Case, outcome: Scored, *, stream: bool) -> Outcome:
            extra: Body = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            return await client.follow(http, case.body | extra, outcome, COMPLETIONS)

        await asyncio.gather(
            *(whole(c, o, stream=i % 2 == 0) for i, (c, o) in enumerate(zip(cases, outcomes, strict=True))),
            *(visit(body, 60 * i) for i, body in enumerate(cut)),
        )


@pytest.mark.parametrize("how", SET_UPS)
def test_everybody_finishes_with_the_tokens_of_a_large_pool(
    model: Path, loop: Loop, cases: list[Case], how: str
) -> None:
    with running(model, "--kv-pages", str(NUM_PAGES), *SET_UPS[how]) as server:
        client = Client(server.url, server.model)
        outcomes = [Scored() for _ in cases]
        asyncio.run(ask(client, cases, outcomes, [case.body for case in cases[:4]]))
        for case, outcome in zip(cases, outcomes, strict=True):
            check(case, outcome, loop)
        assert client.metric("baton_node_requests_retracted_total") > 0
        server.wait_ready()
        client.assert_ledger_clean()


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_a_retracted_request_goes_on_without_the_prefill_node(
    model: Path, loop: Loop, long_cases: list[Case], end: signal.Signals
) -> None:
    few = long_cases
    with running(model, "--kv-pages", "66", calm=end is signal.SIGSTOP) as server:
        client = Client(server.url, server.model)
        prefill = server.pids()["prefill"]
        outcomes = [Scored() for _ in few]

        async def stop_when_all_decode() -> None:
            streams: Body = {"stream": True, "stream_options": {"include_usage": True}}
            async with client.session() as http, asyncio.TaskGroup() as group:
                for case, outcome in zip(few, outcomes, strict=True):
                    group.create_task(client.follow(http, case.body | streams, outcome, COMPLETIONS))
                while not all(outcome.token_ids for outcome in outcomes):
                    await asyncio.sleep(0.005)
                os.kill(prefill, end)

        try:
            asyncio.run(stop_when_all_decode())
        finally:
            with suppress(ProcessLookupError):
                os.kill(prefill, signal.SIGCONT)
        for case, outcome in zip(few, outcomes, strict=True):
            check(case, outcome, loop)
        assert client.metric("baton_node_requests_retracted_total") > 0
        server.wait_ready()
        client.assert_ledger_clean()
