"""Prompts that come back: `echo`, with log probabilities and for scoring, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from common.request import TokenLogprobs
from gateway.fake import Script
from gateway.text import TextPipeline
from tests.gateway.conftest import MODEL, WAIT_S, LiveServer
from tests.tiny import IM_END, SPECIAL_TOKENS

PROMPT, ANSWER = "the fox 你好", " jumps 😀"


def score(token_id: int, num: int) -> TokenLogprobs:
    """A number of its own for every token; the drawn one is not among the likeliest."""
    return TokenLogprobs(-float(token_id), tuple(range(97, 97 + num)), tuple(-float(i) for i in range(num)))


@pytest.fixture
def ids(server: LiveServer, text: TextPipeline) -> tuple[list[int], list[int]]:
    """Of the prompt and of the answer, which ends with EOS."""
    prompt, answer = text.encode([PROMPT, ANSWER], special_tokens=False)
    answer.append(IM_END)
    server.nodes.script = Script(lambda _: answer, score, eos_token_ids=(IM_END,))
    return prompt, answer


@pytest.fixture
def api(server: LiveServer) -> Any:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S) as api:
        yield api


def complete(api: openai.OpenAI, *, stream: bool, **fields: Any) -> tuple[list[dict[str, Any]], Any]:
    """Return the choices, those of a stream put together, and the usage."""
    arguments: dict[str, Any] = {"model": MODEL, "max_tokens": 90, **fields}
    if not stream:
        body = api.completions.create(**arguments).model_dump()
        return body["choices"], body["usage"]
    choices: dict[int, dict[str, Any]] = {}
    *chunks, last = api.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    for chunk in chunks:
        (choice,) = chunk.model_dump()["choices"]
        whole = choices.setdefault(choice["index"], choice | {"text": "", "logprobs": None})
        whole["text"] += choice["text"]
        whole["finish_reason"] = choice["finish_reason"]
        if (more := choice["logprobs"]) is not None:
            told = whole["logprobs"] or {name: [] for name in more}
            whole["logprobs"] = {name: told[name] + more[name] for name in more}
    return [choices[index] for index in sorted(choices)], last.model_dump()["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_comes_first(api: openai.OpenAI, ids: tuple[list[int], list[int]], stream: bool) -> None:
    for prompt in (PROMPT, ids[0]):  # ids are shown as their text
        (choice,), usage = complete(api, stream=stream, prompt=prompt, echo=True)
        assert choice["text"] == PROMPT + ANSWER
        assert (choice["logprobs"], choice["finish_reason"]) == (None, "stop")
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == tuple(map(len, ids))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("as_ids", [False, True])
def test_log_probabilities_of_prompt_and_answer(
    api: openai.OpenAI, ids: tuple[list[int], list[int]], stream: bool, n: int, as_ids: bool
) -> None:
    prompt, answer = ids
    choices, usage = complete(
        api, stream=stream, prompt=prompt if as_ids else PROMPT, echo=True, logprobs=2, n=n
    )
    assert [choice["index"] for choice in choices] == list(range(n))
    for choice in choices:
        told = choice["logprobs"]
        assert {len(values) for values in told.values()} == {len(prompt) + len(answer)}
        assert told["token_logprobs"] == [None] + [-float(i) for i in (*prompt, *answer)[1:]]
        assert told["top_logprobs"][0] is None
        for token, logprob, top in list(
            zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True)
        )[1:]:
            assert top[token] == logprob
            assert len(top) <= 3
        whole = PROMPT + ANSWER
        assert choice["text"] == whole
        assert told["text_offset"] == sorted(told["text_offset"])
        for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
            if "\N{REPLACEMENT CHARACTER}" not in token and token not in SPECIAL_TOKENS:
                assert whole[offset : offset + len(token)] == token
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == n * len(answer)


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_without_an_answer(
    api: openai.OpenAI, server: LiveServer, ids: tuple[list[int], list[int]], stream: bool
) -> None:
    prompts = [[40, 41, 42], [50], [60, 61]]
    choices, usage = complete(
        api,
        stream=stream,
        prompt=prompts,
        echo=True,
        logprobs=1,
        max_tokens=0,
        extra_body={"return_token_ids": True},
    )
    for prompt, choice in zip(prompts, choices, strict=True):
        assert choice["logprobs"]["token_logprobs"] == [None] + [-float(i) for i in prompt[1:]]
        assert (choice["finish_reason"], choice["token_ids"]) == ("length", [])
    assert usage == usage | {"prompt_tokens": 6, "completion_tokens": 0, "total_tokens": 6}
    assert {stream.sampling.max_tokens for stream in server.nodes.streams} == {1}


def test_as_lm_eval_scores(api: openai.OpenAI, ids: tuple[list[int], list[int]]) -> None:
    """It asks for one token and drops it: of context + continuation it sums the continuation."""
    context, continuation = [40, 41], [50, 51, 52]
    (choice,), _ = complete(
        api,
        stream=False,
        prompt=[context + continuation],
        echo=True,
        logprobs=1,
        max_tokens=1,
        temperature=0,
        seed=1,
    )
    assert sum(choice["logprobs"]["token_logprobs"][len(context) : -1]) == -sum(map(float, continuation))
    assert len(choice["logprobs"]["top_logprobs"][len(context) : -1]) == len(continuation)


def test_prompt_logprobs_as_in_vllm(
    api: openai.OpenAI, client: httpx.Client, ids: tuple[list[int], list[int]]
) -> None:
    own_alone = {"logprob": -42.0, "rank": None, "decoded_token": "_"}  # 42 is not among the likeliest
    first = {"logprob": 0.0, "rank": 1, "decoded_token": "_"}
    second = {"logprob": -1.0, "rank": 2, "decoded_token": "_"}
    expected = [
        None,
        {"97": first, "98": second | {"logprob": -98.0}},
        {"42": own_alone, "97": first, "98": second},
    ]

    def told(prompt_logprobs: Any) -> Any:
        for place in prompt_logprobs[1:]:
            for entry in place.values():
                assert entry["decoded_token"]
                entry["decoded_token"] = "_"
        return prompt_logprobs

    body = {"model": MODEL, "prompt": [[40, 98, 42], [7]], "prompt_logprobs": 2, "max_tokens": 2, "n": 2}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    for choice in choices[:2]:
        assert told(choice["prompt_logprobs"]) == expected
    assert [choice["prompt_logprobs"] for choice in choices[2:]] == [[None], [None]]
    assert all(choice["logprobs"] is None for choice in choices)
    chat = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "prompt_logprobs": 0,
        "max_tokens": 1,
    }
    answer = client.post("/v1/chat/completions", json=chat).json()
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert {len(place) for place in answer["prompt_logprobs"][1:]} == {1}
    assert "prompt_logprobs" not in answer["choices"][0]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": 0, "echo": True, "min_tokens": 2}, "min_tokens"),
        ("completions", {"prompt": "a", "echo": 1}, "echo"),
        ("completions", {"prompt": [10**30], "echo": True}, "prompt"),
        ("completions", {"prompt": [-1], "echo": True}, "prompt"),
        ("completions", {"prompt": [2**31 - 1], "echo": True}, "prompt"),
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("completions", {"prompt": "a", "best_of": 2}, "best_of"),
        ("completions", {"prompt": ["a"] * 600, "n": 2}, "n"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_is_refused(client: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:
    response = client.post(f"/v1/{path}", json={"model": MODEL, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
