"""Several choices of one prompt from a real server: each is what it is alone, of one prefill; none is lost.

The oracle draws every choice by itself, with transformers, from the whole sequence computed anew.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.system.client import Body, Client, Outcome
from tests.system.server import START_S, Server, poll_until, running
from tests.system.test_logprobs_penalties import DEFAULTS, LONG, Loop

pytestmark = pytest.mark.system

N = 4
SET_UPS = {
    "pair, overlapped": ("--overlap", "on"),
    "pair, plain, frames": ("--overlap", "off", "--transfer", "frames"),
    "colocated, overlapped": ("--overlap", "on", "--colocated"),
}
DRAWN: Body = DEFAULTS | {"temperature": 1, "n": N}
FIELDS: list[Body] = [
    {"prompt": LONG, "seed": 7},
    {"prompt": LONG[:9], "seed": 8, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"prompt": LONG * 2 + [3], "seed": 9, "repetition_penalty": 1.4, "temperature": 1.3},
    {"prompt": LONG[3:], "seed": 10, "top_k": 20, "min_tokens": 5, "stop_token_ids": list(range(0, 300, 3))},
    {"prompt": LONG * 3 + [5, 6], "seed": 11, "max_tokens": 1},
    {"prompt": LONG, "seed": 12, "temperature": 0},
]


@dataclass
class Choices(Outcome):
    """An outcome by choice."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finishes: dict[int, str] = field(default_factory=dict)

    def take_choice(self, choice: Body) -> None:
        super().take_choice(choice)
        self.tokens[choice["index"]] += choice.get("token_ids") or []
        if choice["finish_reason"]:
            self.finishes[choice["index"]] = choice["finish_reason"]


@dataclass(frozen=True)
class Case:
    """A request, and the tokens of each of its choices."""

    body: Body
    tokens: dict[int, list[int]]


@pytest.fixture(scope="module")
def cases(model: Path) -> list[Case]:
    loop = Loop(model)
    bodies = [DRAWN | fields for fields in FIELDS]
    return [
        Case(body, {i: loop.case(body | {"choice": i}, body["prompt"]).tokens for i in range(N)})
        for body in bodies
    ]


@pytest.fixture(scope="module")
def long_cases(model: Path) -> list[Case]:
    """More than a small pool holds at once."""
    loop = Loop(model)
    bodies = [DRAWN | {"prompt": LONG * 2 + [i], "seed": i, "max_tokens": 300, "n": 2} for i in (1, 2)]
    return [
        Case(body, {i: loop.case(body | {"choice": i}, body["prompt"]).tokens for i in range(2)})
        for body in bodies
    ]


def ask(client: Client, cases: list[Case], **extra: object) -> list[Choices]:
    """Ask for all at once."""

    async def run() -> list[Choices]:
        outcomes = [Choices() for _ in cases]
        async with client.session() as http:
            follow = (client.follow(http, c.body | extra, o) for c, o in zip(cases, outcomes, strict=True))
            await asyncio.gather(*follow)
        return outcomes

    return asyncio.run(run())


def check(cases: list[Case], outcomes: list[Choices]) -> None:
    for case, outcome in zip(cases, outcomes, strict=True):
        assert outcome.succeeded, outcome.error
        assert dict(outcome.tokens) == case.tokens
        assert sorted(outcome.finishes) == sorted(case.tokens)


@pytest.fixture(scope="module", params=SET_UPS)
def _server(model: Path, request: pytest.FixtureRequest) -> Iterator[Client]:
    with running(model, *SET_UPS[request.param]) as server:
        yield Client(server.url, server.model)


@pytest.fixture
def client(_server: Client) -> Iterator[Client]:
    yield _server
    _server.assert_ledger_clean()


def test_every_choice_is_what_it_is_alone(client: Client, cases: list[Case]) -> None:
    check(cases, ask(client, cases))
    check(cases, ask(client, cases, stream=True))


def test_a_prompt_is_computed_once(client: Client, cases: list[Case]) -> None:
    before = client.metric("baton_node_tokens_computed_total")
    check(cases[:1], ask(client, cases[:1]))
    computed = client.metric("baton_node_tokens_computed_total") - before
    assert computed in (0, len(cases[0].body["prompt"]))  # 0: a decode node does not count


def test_the_first_is_the_single_request(client: Client, cases: list[Case]) -> None:
    for case in cases:
        assert client.ask(case.body | {"n": 1}).token_ids == case.tokens[0]


def test_two_prompts_have_choices_in_order(client: Client, cases: list[Case]) -> None:
    body = cases[0].body | {"prompt": [cases[0].body["prompt"], cases[0].body["prompt"]], "n": 3}
    (outcome,) = ask(client, [Case(body, {})])
    assert dict(outcome.tokens) == {i: cases[0].tokens[i % 3] for i in range(6)}


def test_pages_are_shared_while_they_run(client: Client, cases: list[Case]) -> None:
    prompt = LONG * 20  # 20 pages
    pending = client.begin(cases[0].body | {"prompt": prompt, "n": 8, "max_tokens": 150, "stream": True})
    client.until(lambda: len(set(pending.outcome.order)) == 8, "all choices have tokens")
    active = client.pages("decode")["active"]
    assert 0 < active <= 20 + 8 * 10
    pending.leave()
    client.assert_ledger_clean()


def test_a_client_leaves(client: Client, cases: list[Case]) -> None:
    for num_events in (0, 1, 6, 30):
        pending = client.begin(cases[0].body | {"max_tokens": 300, "stream": True, "prompt": LONG * 9})
        client.until(lambda: len(pending.outcome.token_ids) >= num_events, "it has begun")  # noqa: B023
        pending.leave()
    client.assert_ledger_clean()
    check(cases[:2], ask(client, cases[:2]))


def test_a_stop_string_ends_its_choice_alone(client: Client, cases: list[Case]) -> None:
    body = cases[0].body | {"return_token_ids": True}
    texts = {c["index"]: c["text"] for c in client.post("/v1/completions", body).json()["choices"]}
    stop = next(
        texts[1][i : i + 3] for i in range(20) if all(texts[1][i : i + 3] not in texts[j] for j in (0, 2, 3))
    )
    answer = client.post("/v1/completions", body | {"stop": stop}).json()
    choices = {c["index"]: (c["text"], c["finish_reason"]) for c in answer["choices"]}
    assert choices[1] == (texts[1].split(stop)[0], "stop")
    assert [choices[j] for j in (0, 2, 3)] == [(texts[j], "length") for j in (0, 2, 3)]


def test_every_choice_keeps_to_the_grammar(client: Client) -> None:
    regex = "(red|green|blue)( [0-9]{2}){2,3}"
    body: Body = {"prompt": LONG, "max_tokens": 60, "temperature": 1.5, "seed": 5, "n": 8}
    body |= {"structured_outputs": {"regex": regex}}
    answer = client.post("/v1/completions", body).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert all(re.fullmatch(regex, text) for text in texts), texts
    assert len(set(texts)) > 4
    assert client.post("/v1/completions", body | {"n": 1}).json()["choices"][0]["text"] == texts[0]


def test_more_than_rows_is_refused_by_name(client: Client, cases: list[Case]) -> None:
    answer = client.post("/v1/completions", cases[0].body | {"n": 129})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"


@pytest.mark.parametrize("how", SET_UPS)
def test_all_finish_in_a_small_pool(model: Path, long_cases: list[Case], how: str) -> None:
    with running(model, "--kv-pages", "30", *SET_UPS[how]) as server:
        client = Client(server.url, server.model)
        check(long_cases, ask(client, long_cases))
        assert client.metric("baton_node_requests_retracted_total") > 0
        client.assert_ledger_clean()


def test_more_choices_than_may_run_wait_their_turn(model: Path, cases: list[Case]) -> None:
    with running(model, "--max-running", "2") as server:
        client = Client(server.url, server.model)
        check(cases, ask(client, cases))
        refused = client.post("/v1/completions", cases[0].body | {"n": 5}).json()["error"]
        assert (refused["code"], refused["param"]) == ("too_many_choices", "n")
        client.assert_ledger_clean()


def wait_ready_again(server: Server, role: str, pid: int) -> None:
    poll_until(lambda: server.pids().get(role, pid) != pid, START_S, f"{role} is started again")
    server.wait_ready()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_is_killed(model: Path, cases: list[Case], role: str) -> None:
    with running(model, calm=False) as server:
        client = Client(server.url, server.model)
        pid = server.pids()[role]
        running_: Body = cases[0].body | {"max_tokens": 400, "stream": True}
        pending = client.begin(running_)
        client.until(lambda: len(set(pending.outcome.order)) == N, "all choices have tokens")
        queued = client.begin(cases[0].body | {"prompt": LONG * 29, "max_tokens": 4})
        client.until(lambda: client.pages("decode")["incoming"] > 0 or queued.ended, "it is granted")
        os.kill(pid, signal.SIGKILL)
        first, second = pending.wait(), queued.wait()
        assert first.succeeded == (role == "prefill")  # who runs does not notice
        assert second.succeeded or (second.error is not None and second.status == 503), second
        wait_ready_again(server, role, pid)
        check(cases, ask(client, cases))
        client.assert_ledger_clean()
