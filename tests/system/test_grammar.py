"""Grammars on real servers: what is drawn is what the grammar allows, wherever and however it is drawn.

The oracle is transformers with the likeliest token that a predicate allows (tests/engine/languages.py), and
`jsonschema` for schemas. One of the model's end-of-sequence tokens is a word like any other.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import jsonschema
import pytest

from tests.engine.languages import Language, eos_of, greedy, letters, words
from tests.system.client import Body, Client, Outcome
from tests.system.server import running
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.system

SET_UPS = {
    "pair, overlapped": ("--overlap", "on"),
    "pair, plain, frames": ("--overlap", "off", "--transfer", "frames"),
    "colocated, overlapped": ("--overlap", "on", "--colocated"),
}
LANGUAGES = (
    words("yes", "no", "maybe"),
    letters("ab", 9),
    words("the quick brown fox", "the lazy dog", "she sells sea shells"),
    letters("xyz ", 14),
)
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["fox", "dog"]},
        "legs": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["kind", "legs", "count"],
}
LONG = letters("qxz", 300)


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(8)
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randrange(5, 40))] for _ in range(count)]


def body(prompt: Sequence[int], structure: Body, max_tokens: int, **fields: object) -> Body:
    common: Body = {"prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True, "temperature": 0}
    return common | {"structured_outputs": structure} | fields


def regex(language: Language) -> Body:
    return {"regex": language.regex}


@pytest.fixture(scope="module")
def clients(model: Path) -> Iterator[dict[str, Client]]:
    with ExitStack() as stack:
        servers = {how: stack.enter_context(running(model, *options)) for how, options in SET_UPS.items()}
        yield {how: Client(server.url, server.model) for how, server in servers.items()}


@pytest.fixture(params=SET_UPS)
def client(clients: dict[str, Client], request: pytest.FixtureRequest) -> Iterator[Client]:
    yield clients[request.param]
    clients[request.param].assert_ledger_clean()


def test_tokens_are_the_likeliest_of_those_allowed(client: Client, model: Path) -> None:
    """The hand-over after which each answer ends or goes on is at its first token; plain ones are beside."""
    cases = [
        (prompt, LANGUAGES[i % len(LANGUAGES)], (1, 2, 3, 30)[i // len(LANGUAGES)])
        for i, prompt in enumerate(prompts(16))
    ]
    plain = [{"prompt": prompt, "max_tokens": 20, "temperature": 0} for prompt in prompts(4)]
    bodies = [body(prompt, regex(language), most) for prompt, language, most in cases]
    outcomes = client.ask_all([*bodies, *plain])
    for (prompt, language, most), outcome in zip(cases, outcomes, strict=False):
        right = greedy(model, prompt, language, most)
        assert outcome.token_ids == right
        ended = right[-1] in eos_of(model)
        assert outcome.finish == ("stop" if ended else "length")
        if ended:
            assert language.is_whole(outcome.text)
    assert all(outcome.succeeded for outcome in outcomes)


def test_drawn_answers_validate_and_are_the_same_everywhere(clients: dict[str, Client]) -> None:
    bodies = [
        body(prompt, {"json": SCHEMA}, 400, temperature=1, seed=seed)
        for seed, prompt in enumerate(prompts(8))
    ]
    answers = [[outcome.text for outcome in client.ask_all(bodies)] for client in clients.values()]
    assert answers[0] == answers[1] == answers[2]
    for text in answers[0]:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(answers[0])) > 1


def test_what_cannot_be_compiled_is_the_clients_to_mend(client: Client) -> None:
    for structure, reason in (({"regex": "[a-z"}, "nclosed"), ({"grammar": "root ::= sheep"}, "sheep")):
        outcome = client.ask(body([5], structure, 5))
        assert outcome.status == 400
        assert outcome.error is not None
        assert reason in json.dumps(outcome.error)


def test_clients_leave_at_any_time(client: Client, model: Path) -> None:
    async def leave(http: object, number: int) -> None:
        # Each a grammar of its own: some leave while it is compiled.
        language = letters("qxz", 250 + number)
        outcome = Outcome()
        asked = body(prompts(1)[0], regex(language), 300, stream=True)
        task = asyncio.create_task(client.follow(http, asked, outcome))
        while len(outcome.token_ids) < 3 * number and not task.done():
            await asyncio.sleep(0.002)
        task.cancel()

    async def run() -> None:
        async with client.session() as http:
            await asyncio.gather(*(leave(http, number) for number in range(12)))

    asyncio.run(run())
    client.assert_ledger_clean()
    prompt = prompts(1)[0]
    outcome = client.ask(body(prompt, regex(LANGUAGES[1]), 30))
    assert outcome.token_ids == greedy(model, prompt, LANGUAGES[1], 30)


@pytest.mark.parametrize("how", ["pair, overlapped", "pair, plain, frames"])
def test_a_retracted_request_goes_on_where_its_grammar_was(model: Path, how: str) -> None:
    asked = [prompt[:20] for prompt in prompts(3)]
    with running(model, "--kv-pages", "56", *SET_UPS[how]) as server:  # room for them all to enter
        client = Client(server.url, server.model)
        outcomes = client.ask_all([body(prompt, regex(LONG), 310) for prompt in asked])
        for prompt, outcome in zip(asked, outcomes, strict=True):
            assert outcome.token_ids == greedy(model, prompt, LONG, 310)
            assert LONG.is_whole(outcome.text)
        assert client.metric("baton_node_requests_retracted_total") > 0
        client.assert_ledger_clean()
