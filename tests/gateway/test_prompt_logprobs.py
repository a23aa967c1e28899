"""The gateway's stream has its prompt's log probabilities in its first event, or fails."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace

import pytest

from common.codec import IntArray
from common.errors import RequestRejected
from common.messages import Abort, PromptLogprobs, Tokens, float32s, int32s
from common.request import LogprobArrays, TokenLogprobs
from gateway.nodes import RequestStream, TokenEvent
from gateway.stream import SLICE_TOKENS
from tests.gateway.test_retry import PROMPT, SAMPLING, Decoder, World, run

ASKED = replace(SAMPLING, num_prompt_logprobs=2)
TOLD = PromptLogprobs(1, float32s([-1, -2]), int32s([9, 8, 7, 5]), float32s([-0.5, -1, -1.5, -2]))
ROWS = (TokenLogprobs(-1.0, (9, 8), (-0.5, -1.0)), TokenLogprobs(-2.0, (7, 5), (-1.5, -2.0)))


async def ask(world: World, prompt: IntArray = PROMPT) -> tuple[RequestStream, Decoder]:
    """Submit a request that wants them; returns it and who has it."""
    await world.until(world.client.usable)
    (stream,) = world.client.submit(prompt, ASKED, None)
    await world.until(lambda: any(node.heard for node in world.nodes))
    return stream, next(node for node in world.nodes if node.heard)


def test_the_first_event_has_them_and_no_other() -> None:
    async def story(world: World) -> None:
        stream, node = await ask(world)
        node.say(TOLD)
        node.token()
        node.say(Tokens((1,), (), int32s([1]), int32s([1]), int32s([43])))
        assert await stream.next() == TokenEvent((42,), None, (), ROWS)
        assert await stream.next() == TokenEvent((43,), None)

    run(story, num_nodes=1)


def test_a_prompt_of_one_token_has_an_empty_tuple() -> None:
    async def story(world: World) -> None:
        stream, node = await ask(world, int32s([5]))
        node.say(PromptLogprobs(1))
        node.token()
        assert (await stream.next()).prompt_logprobs == ()

    run(story, num_nodes=1)


@pytest.mark.parametrize(
    "told",
    [
        None,
        PromptLogprobs(2, TOLD.logprobs, TOLD.top_ids, TOLD.top_logprobs),  # another's
        PromptLogprobs(1),
        PromptLogprobs(1, TOLD.logprobs),
        PromptLogprobs(1, TOLD.logprobs, TOLD.top_ids, TOLD.top_logprobs[:3]),
        PromptLogprobs(1, TOLD.logprobs[:1], TOLD.top_ids[:2], TOLD.top_logprobs[:2]),
    ],
)
def test_without_them_the_request_fails_and_the_node_is_told(told: PromptLogprobs | None) -> None:
    async def story(world: World) -> None:
        stream, node = await ask(world)
        node.heard.clear()
        if told is not None:
            node.say(told)
        node.token()
        with pytest.raises(RequestRejected, match="lost") as caught:
            await stream.next()
        assert caught.value.status == 500
        await world.until(lambda: node.heard == [Abort(1)])

    run(story, num_nodes=1)


def test_those_of_a_node_that_died_do_not_count() -> None:
    async def story(world: World) -> None:
        stream, node = await ask(world)
        node.say(replace(TOLD, logprobs=float32s([-7, -7])))
        await world.until(lambda: world.client._streams[1].scores is not None)
        await world.kill(node)
        (other,) = world.nodes
        await world.until(lambda: bool(other.heard))
        other.say(TOLD)
        other.token()
        assert (await stream.next()).prompt_logprobs == ROWS

    run(story)


def test_others_get_on_while_those_of_a_long_prompt_are_unpacked() -> None:
    num_tokens = 10 * SLICE_TOKENS

    async def story(world: World) -> None:
        stream, node = await ask(world, array("i", [5]) * (num_tokens + 1))
        scores = LogprobArrays(
            float32s([-1.0]) * num_tokens, int32s([7, 8]) * num_tokens, float32s([-1.0, -2.0]) * num_tokens
        )
        node.say(PromptLogprobs(1, scores.logprobs, scores.top_ids, scores.top_logprobs))
        node.token()
        await world.until(lambda: world.client._streams[1].received > 0)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        event = await stream.next()
        beside.cancel()
        assert event.prompt_logprobs == (TokenLogprobs(-1.0, (7, 8), (-1.0, -2.0)),) * num_tokens
        assert turns >= 10

    run(story, num_nodes=1)
