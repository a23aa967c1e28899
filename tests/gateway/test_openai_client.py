"""The official client against the gateway: completions and chat, sync and async, stream and not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from gateway.fake import Script
from gateway.text import TextPipeline
from tests.gateway.conftest import MODEL, WAIT_S, LiveServer
from tests.timings import assert_adds_up
from tests.tiny import IM_END

ANSWER = "fox jumps over 你好 😀 and then"
MESSAGES: list[Any] = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]


@pytest.fixture
def answer_ids(server: LiveServer, text: TextPipeline) -> list[int]:
    ids = [*text.encode([ANSWER], special_tokens=False)[0], IM_END]
    server.nodes.script = Script(lambda _: ids, eos_token_ids=(IM_END,))
    return ids


@pytest.fixture
def api(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S) as api:
        yield api


def prompt_ids(text: TextPipeline) -> list[int]:
    return text.encode([text.render_chat(MESSAGES)], special_tokens=False)[0]


def test_chat(api: openai.OpenAI, server: LiveServer, text: TextPipeline, answer_ids: list[int]) -> None:
    answer = api.chat.completions.create(model=MODEL, messages=MESSAGES, seed=5)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert answer.usage is not None
    prompt = prompt_ids(text)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(answer_ids))
    assert answer.usage.total_tokens == len(prompt) + len(answer_ids)
    assert server.nodes.streams[0].prompt_ids.tolist() == prompt
    assert server.nodes.streams[0].sampling.seed == 5


def test_chat_stream(api: openai.OpenAI, text: TextPipeline, answer_ids: list[int]) -> None:
    chunks = list(
        api.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert {(chunk.id, chunk.object) for chunk in chunks} == {(chunks[0].id, "chat.completion.chunk")}
    first = chunks[0].choices[0].delta
    assert (first.role, first.content) == ("assistant", "")
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(deltas) == ANSWER
    assert len(deltas) > 10
    assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    usage = chunks[-1].usage
    assert chunks[-1].choices == []
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt_ids(text)), len(answer_ids))


def test_completion_of_texts(api: openai.OpenAI, server: LiveServer, text: TextPipeline) -> None:
    prompts = ["the quick brown", "fox", "😀"]
    ids = text.encode(prompts, special_tokens=True)
    answer = api.completions.create(model=MODEL, prompt=prompts, max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
    assert [stream.prompt_ids.tolist() for stream in server.nodes.streams] == ids
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(prompt) for prompt in ids)
    assert answer.usage.completion_tokens == 9


def test_stream_and_body_agree(api: openai.OpenAI, answer_ids: list[int]) -> None:
    extra = {"return_token_ids": True, "timings": True}
    for stop in (None, "over", ["你", "zzz"], "😀 and"):
        arguments: dict[str, Any] = {"model": MODEL, "prompt": [7, 8], "max_tokens": 90, "stop": stop}
        body = api.completions.create(**arguments, extra_body=extra)
        stream = api.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}, extra_body=extra
        )
        *chunks, last = [chunk.model_dump() for chunk in stream]
        whole = body.model_dump()
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
        assert choices[0]["prompt_token_ids"] == whole["choices"][0]["prompt_token_ids"] == [7, 8]
        ids = [token_id for choice in choices for token_id in choice["token_ids"]]
        assert ids == whole["choices"][0]["token_ids"] == answer_ids[: len(ids)]
        assert last["usage"] == whole["usage"]
        assert whole["usage"]["completion_tokens"] == len(ids)
        assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"] == "stop"
        assert_adds_up(chunks[-1]["timings"])
        assert_adds_up(whole["timings"])


def test_chat_stream_tells_token_ids_once(
    api: openai.OpenAI, text: TextPipeline, answer_ids: list[int]
) -> None:
    stream = api.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, extra_body={"return_token_ids": True}
    )
    choices = [chunk.model_dump()["choices"][0] for chunk in stream]
    assert choices[0]["prompt_token_ids"] == prompt_ids(text)
    assert all("prompt_token_ids" not in choice for choice in choices[1:])
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == answer_ids


def test_continuous_usage(api: openai.OpenAI, server: LiveServer) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = api.completions.create(
        model=MODEL, prompt=[[7], [8, 9]], max_tokens=3, stream=True, stream_options=options
    )
    usages = [chunk.usage for chunk in stream]
    assert [usage and usage.completion_tokens for usage in usages] == [1, 2, 3, 4, 5, 6, 6]
    assert {usage and usage.prompt_tokens for usage in usages} == {3}


def test_eos_first_is_an_empty_completion(api: openai.OpenAI, server: LiveServer) -> None:
    server.nodes.script = Script(lambda _: [IM_END], eos_token_ids=(IM_END,))
    body = api.completions.create(model=MODEL, prompt="hi")
    assert (body.choices[0].text, body.choices[0].finish_reason) == ("", "stop")
    assert body.usage is not None
    assert body.usage.completion_tokens == 1
    (chunk,) = api.completions.create(model=MODEL, prompt="hi", stream=True)
    assert (chunk.choices[0].text, chunk.choices[0].finish_reason) == ("", "stop")


def test_async(server: LiveServer, answer_ids: list[int]) -> None:
    async def run() -> tuple[list[Any], str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as api:
            bodies = await asyncio.gather(
                *(api.chat.completions.create(model=MODEL, messages=MESSAGES) for _ in range(20)),
                *(api.completions.create(model=MODEL, prompt="hi", max_tokens=90) for _ in range(20)),
            )
            chat = await api.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in chat])
            plain = await api.completions.create(model=MODEL, prompt="hi", max_tokens=90, stream=True)
            return list(bodies), text + "".join([chunk.choices[0].text async for chunk in plain])

    bodies, streamed = asyncio.run(run())
    assert {body.choices[0].message.content for body in bodies[:20]} == {ANSWER}
    assert {body.choices[0].text for body in bodies[20:]} == {ANSWER}
    assert streamed == ANSWER * 2


def test_models_and_errors(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as missing:
        api.completions.create(model="other", prompt="hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(model=MODEL, messages=MESSAGES, store=True)
    assert refused.value.param == "store"


def test_error_in_a_stream_reaches_the_client(api: openai.OpenAI, server: LiveServer) -> None:
    server.nodes.script = Script(fail_after=2)
    with pytest.raises(openai.APIError, match="the decode node died"):
        list(api.completions.create(model=MODEL, prompt="hi", stream=True))
