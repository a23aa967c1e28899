"""Log probabilities as the official client reads them: one a token, streamed or not, in whatever pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from common.request import TokenLogprobs
from gateway.fake import Script
from gateway.text import TextPipeline
from tests.gateway.conftest import MODEL, WAIT_S, LiveServer
from tests.tiny import IM_END, SPECIAL_TOKENS

ANSWER = "fox jumps over 你好 😀 and"
HALF = 9  # tokens: the last two are two of the three bytes of a character
# How an answer may end, and which part of it is text.
ENDS: dict[str, tuple[dict[str, Any], str]] = {
    "EOS": ({}, ANSWER),
    "length": ({"max_tokens": 2}, "fox"),
    "half a character": ({"max_tokens": HALF}, "fox jumps over \N{REPLACEMENT CHARACTER}"),
    "stop string": ({"stop": "s over"}, "fox jump"),
    "held back to the end": ({"stop": "and more"}, ANSWER),
}


def score(token_id: int, num: int) -> TokenLogprobs:
    """A number of its own for every token; the drawn one is not among the likeliest."""
    return TokenLogprobs(-float(token_id), tuple(range(97, 97 + num)), tuple(-float(i) for i in range(num)))


def text_id(text: TextPipeline, character: str) -> int:
    (token_id,) = text.encode([character], special_tokens=False)[0]
    return token_id


@pytest.fixture(params=[1, 3, 100])
def answer_ids(request: pytest.FixtureRequest, server: LiveServer, text: TextPipeline) -> list[int]:
    """The tokens of ANSWER and EOS, which come so many at once."""
    ids = [*text.encode([ANSWER], special_tokens=False)[0], IM_END]
    server.nodes.script = Script(
        lambda _: ids, score, tokens_per_event=request.param, eos_token_ids=(IM_END,)
    )
    return ids


@pytest.fixture
def api(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S) as api:
        yield api


def completion(api: openai.OpenAI, *, stream: bool, **fields: Any) -> tuple[dict[str, list[Any]], str, int]:
    """Ask; return all log probabilities, the text, and how many tokens were counted."""
    arguments: dict[str, Any] = {"model": MODEL, "prompt": [7, 8], "max_tokens": 90, "logprobs": 2, **fields}
    if stream:
        chunks = list(
            api.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
        )
    else:
        chunks = [api.completions.create(**arguments)]
    whole: dict[str, list[Any]] = {}
    choices = [choice for chunk in chunks for choice in chunk.choices]
    for choice in choices:
        assert choice.logprobs is not None
        for name, values in choice.logprobs.model_dump().items():
            whole.setdefault(name, []).extend(values)
    assert chunks[-1].usage is not None
    return whole, "".join(choice.text for choice in choices), chunks[-1].usage.completion_tokens


def chat(api: openai.OpenAI, *, stream: bool, **fields: Any) -> tuple[list[dict[str, Any]], int]:
    arguments: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 90,
        "logprobs": True,
        **fields,
    }
    if stream:
        arguments |= {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(api.chat.completions.create(**arguments))
        # The chunk that only says who speaks has no token.
        assert chunks[0].choices[0].logprobs is None
        parts = [choice.logprobs for chunk in chunks[1:] for choice in chunk.choices]
    else:
        chunks = [api.chat.completions.create(**arguments)]
        parts = [chunks[0].choices[0].logprobs]
    content = [token.model_dump() for part in parts for token in part.content]
    return content, chunks[-1].usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_completion_has_one_a_token(
    api: openai.OpenAI, answer_ids: list[int], end: str, stream: bool
) -> None:
    fields, shown = ENDS[end]
    logprobs, text, count = completion(api, stream=stream, **fields)
    taken = answer_ids[:count]
    assert logprobs["token_logprobs"] == [-float(token_id) for token_id in taken]
    for texts, token, logprob in zip(
        logprobs["top_logprobs"], logprobs["tokens"], logprobs["token_logprobs"], strict=True
    ):
        assert texts[token] == logprob
        assert len(texts) <= 3
    if end in ("EOS", "held back to the end"):
        assert count == len(answer_ids)
    if shown:
        assert text == shown
    # Where the tokens are characters, they lie in the text where the offsets say.
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if "\N{REPLACEMENT CHARACTER}" not in token and token not in SPECIAL_TOKENS:
            assert ANSWER[offset : offset + len(token)] == token
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_chat_has_one_a_token(api: openai.OpenAI, answer_ids: list[int], end: str, stream: bool) -> None:
    fields, _ = ENDS[end]
    content, count = chat(api, stream=stream, top_logprobs=20, **fields)
    assert [entry["logprob"] for entry in content] == [-float(token_id) for token_id in answer_ids[:count]]
    whole = b"".join(bytes(entry["bytes"]) for entry in content)
    assert (ANSWER + "<|im_end|>").encode().startswith(whole)
    for entry in content:
        assert entry["token"] == bytes(entry["bytes"]).decode(errors="replace")
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-float(i) for i in range(20)]
        assert len({bytes(top["bytes"]) for top in entry["top_logprobs"]}) == 20
        assert all(top.keys() == {"token", "logprob", "bytes"} for top in entry["top_logprobs"])


def test_offsets_within_a_character_are_its_own(api: openai.OpenAI, answer_ids: list[int]) -> None:
    logprobs, _, _ = completion(api, stream=False)
    offsets = logprobs["text_offset"]
    begins = {ANSWER.index(character): len(character.encode()) for character in "你好😀"}
    for offset, num_bytes in begins.items():
        assert offsets.count(offset) == num_bytes  # the tiny tokenizer has a token for each byte of these
    assert offsets[-1] == len(ANSWER)  # EOS lies behind it


def test_the_drawn_token_alone(api: openai.OpenAI, answer_ids: list[int]) -> None:
    logprobs, _, count = completion(api, stream=False, logprobs=0)
    assert logprobs["top_logprobs"] == [
        {token: logprob}
        for token, logprob in zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    ]
    content, chat_count = chat(api, stream=True)
    assert [entry["top_logprobs"] for entry in content] == [[]] * chat_count
    assert count == chat_count == len(answer_ids)


def test_one_text_stands_for_the_drawn_token_or_else_for_the_likeliest(
    api: openai.OpenAI, server: LiveServer, text: TextPipeline
) -> None:
    a, b, c = text.encode(["😀"], special_tokens=False)[0][:3]
    letter = text_id(text, "f")
    likeliest = {
        a: TokenLogprobs(-5.0, (b, c, letter), (-1.0, -2.0, -3.0)),
        letter: TokenLogprobs(-3.0, (b, c), (-1.0, -2.0)),
    }
    server.nodes.script = Script(lambda _: [a, letter], lambda token_id, _: likeliest[token_id])
    logprobs, _, _ = completion(api, stream=False, max_tokens=2, logprobs=3)
    replacement = "\N{REPLACEMENT CHARACTER}"
    assert logprobs["top_logprobs"] == [{replacement: -5.0, "f": -3.0}, {replacement: -1.0, "f": -3.0}]


def test_prompts_of_one_call_keep_theirs_apart(api: openai.OpenAI, server: LiveServer) -> None:
    server.nodes.script = Script(score=score)  # every prompt is echoed
    prompts = [[40, 41], [50, 51], [60, 61]]
    arguments: dict[str, Any] = {"model": MODEL, "prompt": prompts, "max_tokens": 4, "logprobs": 1}
    expected = [[-float(token_id) for token_id in prompt * 2] for prompt in prompts]
    body = api.completions.create(**arguments)
    assert [choice.logprobs and choice.logprobs.token_logprobs for choice in body.choices] == expected
    streamed: list[list[float]] = [[], [], []]
    for chunk in api.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            assert choice.logprobs is not None
            streamed[choice.index] += choice.logprobs.token_logprobs or []
    assert streamed == expected


@pytest.mark.parametrize("stream", [False, True])
def test_none_unless_asked_for(api: openai.OpenAI, answer_ids: list[int], stream: bool) -> None:
    for create, arguments in (
        (api.completions.create, {"prompt": [7]}),
        (api.chat.completions.create, {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        answer: Any = create(model=MODEL, max_tokens=5, stream=stream, **arguments)
        for part in answer if stream else [answer]:
            assert part.model_dump()["choices"][0]["logprobs"] is None
