"""Chunks from a cut template against the renderer's own, and the order of what a call writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import int32s
from common.request import FinishReason, SamplingParams, TokenLogprobs
from gateway.answer import Answer, Delta, ScoredToken, TextRules
from gateway.chunks import ChunkWriter
from gateway.endpoints import CHAT, COMPLETIONS, Endpoint
from gateway.fake import FakeNodes
from gateway.prompts import Prompt
from gateway.rendering import Renderer
from gateway.reply import DIRECT, Reply, event_of
from gateway.text import TextPipeline
from gateway.timeline import GatewayStamps

FIELDS: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"continuous_usage_stats": True}},
    {"return_token_ids": True},
]
HEAD = {"id": "x-1", "created": 5, "model": 'a "model"'}
SCORED = (ScoredToken(5, TokenLogprobs(-0.5, (5,), (-0.5,)), 0),)
DELTA = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])).map(lambda text: Delta(text, (5,))),
    st.sampled_from(
        [
            Delta("", ()),
            Delta("end", (5,), FinishReason.LENGTH),
            Delta("ab", (5,), scored=SCORED),
            Delta('"\\\n\x00\u2028', (5,)),
        ]
    ),
)


def request_of(endpoint: Endpoint, fields: dict[str, Any]) -> Any:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if endpoint is CHAT else {"prompt": "x"}
    return endpoint.parse({"model": "m", "stream": True, **prompt, **json.loads(json.dumps(fields))})[0]


def first_told(written: list[bytes]) -> dict[int, int]:
    """Return behind how many writes each choice has a chunk that is not just its opening."""
    found: dict[int, int] = {}
    for count, data in enumerate(written, 1):
        for event in data.split(b"\n\n")[:-1]:
            choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
            if choice.get("delta") != {"role": "assistant", "content": ""}:
                found.setdefault(choice["index"], count)
    return found


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
@settings(max_examples=25, deadline=None)
@given(deltas=st.lists(st.tuples(st.integers(0, 1), DELTA), max_size=8))
def test_chunks_are_the_renderers(
    text: TextPipeline,
    endpoint: Endpoint,
    fields: dict[str, Any],
    deltas: list[tuple[int, Delta]],
) -> None:
    request = request_of(endpoint, fields)
    streams = [FakeNodes().submit(int32s([5]), SamplingParams(max_tokens=9))[0] for _ in range(2)]
    answers = [
        Answer(i, int32s([5]), stream, text.detokenizer(), TextRules((), 0), GatewayStamps(0.0))
        for i, stream in enumerate(streams)
    ]
    prompts = [Prompt(int32s([5]), SamplingParams(max_tokens=9))] * 2
    oracle = Renderer(endpoint, request, dict(HEAD), text.token_texts, prompts)
    expected = b"".join(
        event_of(chunk) for i, delta in deltas for chunk in oracle.chunks(answers[i], delta, answers)
    )
    written: list[bytes] = []
    told: dict[int, int] = {}  # what was written when an answer was told of first
    again = Renderer(endpoint, request, dict(HEAD), text.token_texts, prompts)

    def first_written(answer: Answer) -> None:
        assert answer.index not in told
        told[answer.index] = len(written)

    chunks = ChunkWriter(again, answers, written.append, first_written)
    for i, delta in deltas:
        chunks.add(answers[i], delta)
    assert b"".join(written) == expected
    assert told == first_told(written)


class Client:
    """A client as a server sees it: what reaches it, and whether it reads. `Reply` writes in two ways."""

    def __init__(self) -> None:
        self.body = b""
        self.statuses: list[int] = []
        self.is_over = False
        self.soon: list[bytes] = []
        self.notes: list[Callable[[], None]] = []
        self.noted = b""  # what is to be here with the next bytes
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: Any) -> None:
        while not self.reads.is_set():  # it may have stopped again since it woke us
            await self.reads.wait()
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])
            return
        assert not self.soon, "what was to go soon is overtaken"
        self._take(message["body"])
        self.is_over = not message["more_body"]

    def write(self, data: bytes) -> bool:
        assert self.statuses == [200]
        if self.reads.is_set():
            self.soon.append(data)
        return self.reads.is_set()

    def when_written(self, note: Callable[[], None]) -> None:
        assert self.soon
        self.notes.append(note)

    def flush(self) -> None:
        notes, self.notes = self.notes, []
        for note in notes:
            note()
        self._take(b"".join(self.soon))
        self.soon.clear()

    def note(self, events: bytes) -> None:
        """Take a note that so much is about to come; the client is ready for it."""
        assert self.reads.is_set()
        assert len(self.body) < len(events)
        self.noted = events

    def _take(self, data: bytes) -> None:
        self.body += data
        if data:
            assert self.body.startswith(self.noted)


@pytest.mark.parametrize("is_direct", [True, False])
@settings(deadline=None)
@given(steps=st.lists(st.sampled_from(["event", "event", "stop", "read", "turn"]), max_size=30))
def test_events_arrive_in_order_whatever_the_client_does(is_direct: bool, steps: list[str]) -> None:
    async def story() -> None:
        client = Client()
        scope = {"extensions": {DIRECT: {"writer": client}}} if is_direct else {}

        async def never() -> Any:
            raise AssertionError

        reply = Reply("id", scope, never, client.send)
        sent, noted = b"", 0

        def written(so_far: bytes) -> None:
            nonlocal noted
            client.note(so_far)
            noted += 1

        for i, step in enumerate(steps):
            match step:
                case "event":
                    sent += b"%d," % i
                    reply.write(b"%d," % i)
                    reply.when_written(partial(written, sent))
                case "stop":
                    client.flush()  # of an earlier turn
                    client.reads.clear()
                case "read":
                    client.reads.set()
                case "turn":
                    client.flush()
                    await asyncio.sleep(0)
        client.reads.set()
        await reply.done()
        assert client.body == sent + b"data: [DONE]\n\n"
        assert client.is_over
        assert noted == steps.count("event")
        assert client.statuses == [200]

    asyncio.run(story())
