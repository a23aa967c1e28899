"""The official client against a real server: completions and chat, sync and async, stream and not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.system.client import Client
from tests.system.oracle import Case, Oracle

pytestmark = pytest.mark.system

MESSAGES: Any = [{"role": "user", "content": "tell a story 😀"}]
NUM_TOKENS = 20
FIELDS: dict[str, Any] = {
    "max_tokens": NUM_TOKENS,
    "temperature": 0,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}
USAGE: Any = {"include_usage": True}


@pytest.fixture
def api(pair: Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=pair.url + "/v1", api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture(scope="module")
def chat(oracle: Oracle) -> Case:
    return oracle.case(oracle.chat_ids(MESSAGES), NUM_TOKENS)


def test_sync(api: openai.OpenAI, pair: Client, oracle: Oracle, cases: list[Case], chat: Case) -> None:
    model = pair.model
    assert [entry.id for entry in api.models.list()] == [model]
    expected = oracle.text(cases[4].answer[:NUM_TOKENS])

    body = api.completions.create(model=model, prompt=cases[4].prompt, **FIELDS)
    assert body.choices[0].text == expected
    assert body.choices[0].finish_reason == "length"
    assert body.usage is not None
    assert (body.usage.prompt_tokens, body.usage.completion_tokens) == (len(cases[4].prompt), NUM_TOKENS)

    stream = api.completions.create(
        model=model, prompt=cases[4].prompt, stream=True, stream_options=USAGE, **FIELDS
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert last.usage == body.usage

    answer = api.chat.completions.create(model=model, messages=MESSAGES, **FIELDS)
    assert answer.choices[0].message.content == oracle.text(chat.answer)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(chat.prompt)

    deltas = api.chat.completions.create(
        model=model, messages=MESSAGES, stream=True, stream_options=USAGE, **FIELDS
    )
    *parts, end = deltas
    assert "".join(part.choices[0].delta.content or "" for part in parts) == oracle.text(chat.answer)
    assert end.usage == answer.usage


def test_async(pair: Client, oracle: Oracle, cases: list[Case], chat: Case) -> None:
    model = pair.model

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=pair.url + "/v1", api_key="none", max_retries=0) as api:
            plain, answer = await asyncio.gather(
                api.completions.create(model=model, prompt=cases[7].prompt, **FIELDS),
                api.chat.completions.create(model=model, messages=MESSAGES, **FIELDS),
            )
            assert plain.choices[0].text == oracle.text(cases[7].answer[:NUM_TOKENS])
            assert answer.choices[0].message.content == oracle.text(chat.answer)

            chunks = await api.completions.create(model=model, prompt=cases[7].prompt, stream=True, **FIELDS)
            assert "".join([c.choices[0].text async for c in chunks]) == plain.choices[0].text
            parts = await api.chat.completions.create(model=model, messages=MESSAGES, stream=True, **FIELDS)
            text = "".join([part.choices[0].delta.content or "" async for part in parts])
            assert text == answer.choices[0].message.content

    asyncio.run(run())


def test_stream_that_is_closed_early_is_aborted(api: openai.OpenAI, pair: Client, cases: list[Case]) -> None:
    sampled = pair.metric("baton_node_tokens_sampled_total")
    for _ in range(4):
        fields = FIELDS | {"max_tokens": 500}
        stream = api.completions.create(model=pair.model, prompt=cases[0].prompt, stream=True, **fields)
        next(iter(stream))
        stream.close()
    pair.assert_ledger_clean()
    assert pair.metric("baton_node_tokens_sampled_total") - sampled < 4 * 500 / 2


def test_errors_have_their_classes(api: openai.OpenAI, pair: Client) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        api.completions.create(model="other", prompt="hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        api.completions.create(model=pair.model, prompt="hi", max_tokens=10_000)
    assert refused.value.param == "max_tokens"
