"""The default model in float32: 64 greedy tokens of each prompt are those of transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.system.client import Body, Client, greedy
from tests.system.oracle import Oracle
from tests.system.server import running

pytestmark = [pytest.mark.system, pytest.mark.smollm2]

NUM_TOKENS = 64
LENGTHS = (1, 15, 16, 17, 32, 33)  # tokens, around a page of 16
LONG_WORDS = 1400
PREFILL_BUDGET = 256
TEXT = (
    "The relay race is as old as the messenger. Long before there were stadiums, news travelled from runner "
    "to runner across deserts and mountains, each one carrying it for a few miles and handing it on. "
)
TEXTS = (
    "Tell me 😀🎉👩‍🚀 a story about 🐈!",
    "请用中文介绍一下北京的历史。",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "  \n\n\tWhitespace   first",
)
CHAT = [
    {"role": "system", "content": "You are a sailor. Answer in one sentence."},
    {"role": "user", "content": "What is a relay race?"},
]


@dataclass(frozen=True)
class Question:
    """A request, and the token ids that its prompt must become."""

    path: str
    body: Body
    prompt_ids: list[int]


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Oracle:
    return Oracle(smollm2)


@pytest.fixture(scope="module")
def questions(oracle: Oracle) -> list[Question]:
    def completion(prompt: str | list[int], ids: list[int]) -> Question:
        return Question("/v1/completions", greedy(prompt, NUM_TOKENS), ids)

    ids = oracle.tokenizer.encode(TEXT)
    draw = random.Random(2)
    long = " ".join(draw.choice(TEXT.split()) for _ in range(LONG_WORDS))
    chat = greedy("", NUM_TOKENS, messages=CHAT)
    del chat["prompt"]
    return [
        *(completion(ids[:n], ids[:n]) for n in LENGTHS),
        *(completion(text, oracle.tokenizer.encode(text)) for text in (*TEXTS, long)),
        Question("/v1/chat/completions", chat, oracle.chat_ids(CHAT)),
    ]


@pytest.fixture(scope="module")
def client(smollm2: Path) -> Iterator[Client]:
    with running(smollm2, "--dtype", "float32", "--prefill-budget", str(PREFILL_BUDGET)) as server:
        client = Client(server.url, server.model)
        yield client
        client.assert_ledger_clean()


def test_alone_and_all_at_once(client: Client, oracle: Oracle, questions: list[Question]) -> None:
    assert len(questions) >= 12
    alone = [client.ask(question.body, question.path) for question in questions]
    for question, outcome in zip(questions, alone, strict=True):
        assert outcome.succeeded, outcome
        assert outcome.prompt_token_ids == question.prompt_ids
        assert len(outcome.token_ids) == NUM_TOKENS
        assert oracle.follows(question.prompt_ids, outcome.token_ids), question.body
        assert outcome.text == oracle.text(outcome.token_ids)

    together = client.ask_each([(question.path, question.body) for question in questions])
    assert [outcome.token_ids for outcome in together] == [outcome.token_ids for outcome in alone]
