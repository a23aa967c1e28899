"""`n` answers to each prompt: their order, their usage, and what they ask of the nodes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from gateway.fake import Script
from tests.gateway.conftest import MODEL, WAIT_S, LiveServer
from tests.timings import assert_adds_up
from tests.tiny import IM_END

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def api(server: LiveServer) -> Any:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S) as api:
        yield api


def test_choices_of_several_prompts(api: openai.OpenAI, server: LiveServer) -> None:
    prompts = [[40], [50], [60]]
    body = api.completions.create(
        model=MODEL, prompt=prompts, n=2, max_tokens=3, seed=7, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in body.choices] == [0, 1, 2, 3, 4, 5]
    told = [choice.model_dump()["prompt_token_ids"] for choice in body.choices]
    assert told == [[40], [40], [50], [50], [60], [60]]
    assert body.usage is not None
    assert (body.usage.prompt_tokens, body.usage.completion_tokens) == (3, 18)
    asked = [(stream.prompt_ids.tolist(), stream.sampling.choice) for stream in server.nodes.streams]
    assert asked == [([40], 0), ([40], 1), ([50], 0), ([50], 1), ([60], 0), ([60], 1)]
    assert {stream.sampling.seed for stream in server.nodes.streams} == {7}


def test_choices_of_a_chat_in_a_stream(api: openai.OpenAI, server: LiveServer) -> None:
    *chunks, last = api.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    by_index: dict[int, list[Any]] = {}
    for chunk in chunks:
        (choice,) = chunk.choices
        by_index.setdefault(choice.index, []).append(choice)
    assert sorted(by_index) == [0, 1, 2]
    for choices in by_index.values():
        assert choices[0].delta.role == "assistant"
        assert [choice.finish_reason for choice in choices][-2:] == [None, "length"]
    texts = {"".join(choice.delta.content or "" for choice in choices) for choices in by_index.values()}
    assert len(texts) == 1  # the script's choices are alike
    assert last.usage is not None
    prompt = len(server.nodes.streams[0].prompt_ids)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (prompt, 12)


def test_a_choice_that_ends_first_does_not_end_the_others(api: openai.OpenAI, server: LiveServer) -> None:
    server.nodes.script = Script(lambda _: [97, 98, IM_END], eos_token_ids=(IM_END,))
    body = api.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, stop="zzz")
    assert [choice.finish_reason for choice in body.choices] == ["stop", "stop"]


def test_a_failure_of_one_fails_the_call(api: openai.OpenAI, server: LiveServer) -> None:
    server.nodes.script = Script(fail_after=2)
    with pytest.raises(openai.InternalServerError):
        api.completions.create(model=MODEL, prompt="hi", n=3)


def test_each_choice_has_timings_of_its_own(client: httpx.Client) -> None:
    asked = {"model": MODEL, "prompt": ["hi", "ho"], "n": 2, "timings": True, "max_tokens": 3}
    body = client.post("/v1/completions", json=asked).json()
    assert "timings" not in body
    for choice in body["choices"]:
        assert_adds_up(choice["timings"])
    stream = client.post("/v1/completions", json=asked | {"stream": True}).text
    *events, done = stream.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    last = {chunk["choices"][0]["index"]: chunk for chunk in chunks if "timings" in chunk}
    assert sorted(last) == [0, 1, 2, 3]
    for chunk in last.values():
        assert chunk["choices"][0]["finish_reason"] == "length"
        assert_adds_up(chunk["timings"])
