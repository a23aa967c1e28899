"""The choices of one prompt are requests of their own, and move to another decode node together."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from common.errors import RequestRejected
from common.messages import Abort, Failed, Finish, Status, Submit, Tokens, int32s
from common.request import FinishReason
from gateway.nodes import RequestStream
from gateway.submission import each_choice
from tests.gateway.test_retry import PROMPT, SAMPLING, Decoder, World, die, run

ASKED = replace(SAMPLING, num_choices=3)
SUBMIT = Submit(1, ASKED, PROMPT)


async def ask(world: World) -> tuple[tuple[RequestStream, ...], Decoder]:
    """Submit a prompt with three choices when all nodes are usable; returns them and who has them."""
    for node in world.nodes:
        node.open_ids = (1, 2, 3)

    def all_usable() -> bool:
        statuses = [node.status for node in world.client._router.nodes()]
        return len(statuses) == len(world.nodes) and all(s is not None and s.usable for s in statuses)

    await world.until(all_usable)
    streams = world.client.submit(PROMPT, ASKED, None)
    return streams, await heard(world, SUBMIT)


async def heard(world: World, *messages: object) -> Decoder:
    """Wait until a decode node has heard exactly this; returns it."""
    await world.until(lambda: any(node.heard == list(messages) for node in world.nodes))
    return next(node for node in world.nodes if node.heard == list(messages))


def tokens(*ids: int, finished: tuple[int, ...] = ()) -> Tokens:
    """The first tokens of requests, 40 and their id."""
    ends = tuple(Finish(i, FinishReason.LENGTH) for i in finished)
    return Tokens(ids, ends, int32s([0] * len(ids)), int32s([1] * len(ids)), int32s(40 + i for i in ids))


def leave(node: Decoder) -> None:
    """Refuse all three, as a node that is about to leave does."""
    for request_id in (1, 2, 3):
        node.drain(request_id)


def test_each_has_a_stream_and_an_id_and_the_next_prompt_comes_behind() -> None:
    async def story(world: World) -> None:
        streams, node = await ask(world)
        other = world.client.submit(PROMPT, SAMPLING, None)
        await heard(world, SUBMIT, Submit(4, SAMPLING, PROMPT))
        node.say(tokens(1, 2, 3, 4, finished=(1, 2, 3, 4)))
        assert [(await stream.next()).token_ids for stream in (*streams, *other)] == [
            (41,),
            (42,),
            (43,),
            (44,),
        ]

    run(story, num_nodes=1)


def test_what_is_asked_of_each_choice() -> None:
    sampling = replace(SAMPLING, num_choices=3, choice=2, num_prompt_logprobs=4)
    first, second, third = each_choice(sampling)
    assert first == replace(SAMPLING, choice=2, num_prompt_logprobs=4)
    assert (second, third) == (replace(SAMPLING, choice=3), replace(SAMPLING, choice=4))
    assert each_choice(SAMPLING) == [SAMPLING]


@pytest.mark.parametrize("death", [False, True])
def test_they_move_together_and_once(death: bool) -> None:
    async def story(world: World) -> None:
        streams, first = await ask(world)
        (second,) = (node for node in world.nodes if node is not first)
        if death:
            await die(world, first)
        else:
            leave(first)
        await world.until(lambda: second.heard == [SUBMIT])
        second.say(tokens(1, 2, 3, finished=(1, 2, 3)))
        assert [(await stream.next()).token_ids for stream in streams] == [(41,), (42,), (43,)]
        assert second.heard == [SUBMIT]
        assert world.retried() == 3

    run(story)


def test_who_was_aborted_does_not_move() -> None:
    async def story(world: World) -> None:
        streams, first = await ask(world)
        streams[1].abort()
        await heard(world, SUBMIT, Abort(2))
        await die(world, first)
        second = await heard(world, SUBMIT, Abort(2))
        second.say(tokens(1, 3, finished=(1, 3)))
        assert [(await streams[i].next()).token_ids for i in (0, 2)] == [(41,), (43,)]
        assert world.retried() == 2

    run(story)


def test_who_has_a_token_fails_alone() -> None:
    async def story(world: World) -> None:
        streams, first = await ask(world)
        first.say(tokens(2))
        assert (await streams[1].next()).token_ids == (42,)
        await die(world, first)
        with pytest.raises(RequestRejected) as failure:
            await streams[1].next()
        assert failure.value.status == 503
        second = await heard(world, SUBMIT, Abort(2))
        second.say(tokens(1, 3, finished=(1, 3)))
        assert [(await streams[i].next()).token_ids for i in (0, 2)] == [(41,), (43,)]

    run(story)


def test_each_fails_when_nobody_is_left() -> None:
    async def story(world: World) -> None:
        streams, first = await ask(world)
        await die(world, first)
        for stream in streams:
            with pytest.raises(RequestRejected) as failure:
                await asyncio.wait_for(stream.next(), 10)
            assert (failure.value.status, failure.value.retry_after_s) == (503, 1)

    run(story, num_nodes=1)


def test_one_that_the_node_lost_is_taken_elsewhere_with_the_others() -> None:
    async def story(world: World) -> None:
        streams, first = await ask(world)
        for _ in range(2):
            first.say(Status(10**6, open_ids=(1, 3), usable=True))
        second = next(node for node in world.nodes if node is not first)
        await world.until(lambda: second.heard == [SUBMIT])
        await world.until(lambda: first.heard == [SUBMIT, Abort(1), Abort(3)])
        second.say(tokens(1, 2, 3, finished=(1, 2, 3)))
        assert [(await stream.next()).token_ids for stream in streams] == [(41,), (42,), (43,)]

    run(story)


def test_a_failure_of_one_is_its_own() -> None:
    async def story(world: World) -> None:
        streams, node = await ask(world)
        node.say(Failed(2, 500, "broken"))
        node.say(tokens(1, 3, finished=(1, 3)))
        with pytest.raises(RequestRejected, match="broken"):
            await streams[1].next()
        assert [(await streams[i].next()).token_ids for i in (0, 2)] == [(41,), (43,)]

    run(story, num_nodes=1)
