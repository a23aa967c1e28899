"""A request whose decode node leaves goes to another before its first token, each once, and never after."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import zmq

from common.connector import Connector
from common.errors import RequestRejected
from common.messages import (
    NODE_DRAINING,
    Abort,
    Begun,
    Finish,
    Granted,
    HostIdentity,
    Refused,
    Role,
    Status,
    Submit,
    Tokens,
    int32s,
)
from common.peer import PeerMessage
from common.request import FinishReason, PrefillStamps, SamplingParams
from common.sockets import wait
from gateway.client import NodeClient
from gateway.nodes import NodeStamps, RequestStream
from tests.wire.hellos import DECODE, hello
from tests.wire.loop import PATIENCE_S

PROMPT = int32s([5, 6, 7])
SAMPLING = SamplingParams(max_tokens=9, seed=3)


class Decoder:
    """A decode node that says what the test says."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, epoch: int) -> None:
        host = HostIdentity("the host of gateway", 2, 1, 1)  # another container of it: they have one clock
        greeting = replace(DECODE, node_id=f"decode-{epoch}", host=host)
        self.link = Connector(context, address, greeting, epoch, self._status, now=0.0)
        self.heard: list[Any] = []
        self.usable = True
        self.open_ids: tuple[int, ...] = (1,)

    def poll(self) -> None:
        """Read."""
        for event in self.link.poll(time.monotonic()):
            if isinstance(event, PeerMessage) and isinstance(event.message, Submit | Abort):
                self.heard.append(event.message)

    def say(self, message: Any) -> None:
        """Speak to the gateway."""
        assert self.link.peer is not None
        self.link.peer.send(message)

    def drain(self, request_id: int) -> None:
        """Refuse a request as a node does that is about to leave."""
        self.usable = False
        self.say(self._status(None))
        self.say(Refused(request_id, 503, "about to leave", code=NODE_DRAINING, retry_after_s=1))

    def granted(self, at_s: float) -> Granted:
        """Say that request 1 has its pages."""
        granted = Granted((1,), f"prefill of {self.link.local.node_id}", queued_s=at_s, granted_s=at_s + 1)
        self.say(granted)
        return granted

    def token(self, *, finish: FinishReason | None = None, begun: tuple[Begun, ...] = ()) -> None:
        """Give the first token of request 1, or the first and last."""
        finished = () if finish is None else (Finish(1, finish, prebuilt_s=7.0, second_token_s=8.0),)
        self.say(Tokens((1,), finished, int32s([0]), int32s([1]), int32s([42]), begun=begun))

    def _status(self, _: object) -> Status:
        return Status(0, open_ids=self.open_ids, usable=self.usable, draining=not self.usable)


class World:
    """A gateway's links and some decode nodes."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, num_nodes: int) -> None:
        self.client = NodeClient(context, address, replace(hello(Role.GATEWAY), layout=None, planes=()), 5)
        self.nodes = [Decoder(context, address, epoch) for epoch in range(1, num_nodes + 1)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Work as all decode nodes until it is so."""
        give_up_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up_s, [node.heard for node in self.nodes]
            pollables = [item for node in self.nodes for item in node.link.pollables()]
            await asyncio.to_thread(wait, pollables, 0.02)
            for node in self.nodes:
                node.poll()

    async def submit(self) -> tuple[RequestStream, Decoder]:
        """Submit a request when all nodes are usable; returns it and who has it."""

        def all_usable() -> bool:
            statuses = [node.status for node in self.client._router.nodes()]
            return len(statuses) == len(self.nodes) and all(s is not None and s.usable for s in statuses)

        await self.until(all_usable)
        (stream,) = self.client.submit(PROMPT, SAMPLING, None)
        return stream, await self.holder()

    async def holder(self, *without: Decoder) -> Decoder:
        """Wait until a decode node, not one of these, has the request; returns it."""
        others = [node for node in self.nodes if node not in without]
        await self.until(lambda: any(node.heard for node in others))
        (node,) = (node for node in others if node.heard)
        assert node.heard == [Submit(1, SAMPLING, PROMPT)]
        return node

    def retried(self) -> int:
        """How often a request went to another node."""
        return self.client.counters()["requests_retried"]

    async def kill(self, node: Decoder) -> None:
        """Close its socket, and wait until the gateway knows."""
        self.nodes.remove(node)
        node.link.close()
        count = len(self.client._router.nodes())
        await self.until(lambda: len(self.client._router.nodes()) == count - 1)


def run(story: Callable[[World], Coroutine[Any, Any, None]], num_nodes: int = 2) -> None:
    async def whole(address: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        world = World(context, address, num_nodes)
        try:
            await story(world)
        finally:
            world.client.close()
            for node in world.nodes:
                node.link.close()
            context.destroy(linger=0)

    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        asyncio.run(whole(f"ipc://{folder}/g"))


async def leave(world: World, node: Decoder) -> None:
    node.drain(1)


async def die(world: World, node: Decoder) -> None:
    await world.kill(node)


Ending = Callable[[World, Decoder], Coroutine[Any, Any, None]]


@pytest.mark.parametrize("end", [leave, die])
def test_before_the_first_token_another_has_it_unseen(end: Ending) -> None:
    async def story(world: World) -> None:
        stream, first = await world.submit()
        await end(world, first)
        second = await world.holder(first)
        second.token(finish=FinishReason.LENGTH)
        event = await stream.next()
        assert (event.token_ids, event.finish) == ((42,), FinishReason.LENGTH)
        assert world.retried() == 1

    run(story)


def test_a_request_that_waits_at_its_node_is_queued_there_since_it_was_sent() -> None:
    async def story(world: World) -> None:
        before_s = time.monotonic()
        stream, node = await world.submit()
        sent_s = time.monotonic()
        await world.until(lambda: stream.stamps.queued_s is not None)  # by its node's next Status
        assert stream.stamps.queued_s is not None
        assert before_s <= stream.stamps.queued_s <= sent_s
        assert stream.stamps.granted_s is None
        node.granted(1.0)
        await world.until(lambda: stream.stamps.granted_s is not None)
        assert stream.stamps.queued_s == 1.0  # what the node says itself

    run(story)


@pytest.mark.parametrize("end", [leave, die])
def test_its_stamps_are_those_of_the_last_that_had_it(end: Ending) -> None:
    async def story(world: World) -> None:
        stream, first = await world.submit()
        assert replace(stream.stamps, queued_s=None) == NodeStamps(first.link.local.node_id)
        first.granted(1.0)
        await world.until(lambda: stream.stamps.prefill_node is not None)
        assert stream.stamps.decode_node == first.link.local.node_id
        await end(world, first)
        second = await world.holder(first)
        name = second.link.local.node_id
        assert replace(stream.stamps, queued_s=None) == NodeStamps(name)
        begun = Begun(second.granted(2.0), PrefillStamps(3.0, (4.0, 5.0), 5.5), arrived_s=6.0)
        second.token(finish=FinishReason.LENGTH, begun=(begun,))
        await stream.next()
        assert stream.stamps == NodeStamps(
            name,
            f"prefill of {name}",
            queued_s=2.0,
            granted_s=3.0,
            prefill_start_s=3.0,
            chunks_s=(4.0, 5.0),
            committed_s=5.5,
            arrived_s=6.0,
            prebuilt_s=7.0,
            second_token_s=8.0,
        )

    run(story)


def test_after_the_first_token_it_fails() -> None:
    async def story(world: World) -> None:
        stream, first = await world.submit()
        first.token()
        assert (await stream.next()).token_ids == (42,)
        await world.kill(first)
        with pytest.raises(RequestRejected, match=r"decode-\d is gone") as failure:
            await stream.next()
        assert failure.value.status == 503
        assert world.retried() == 0
        assert world.nodes[0].heard == []

    run(story)


@pytest.mark.parametrize("end", [leave, die])
def test_each_has_it_once_and_then_the_client_is_told(end: Ending) -> None:
    async def story(world: World) -> None:
        stream, node = await world.submit()
        seen = [node]
        for _ in range(2):
            await end(world, node)
            node = await world.holder(*seen)
            seen.append(node)
        await end(world, node)
        with pytest.raises(RequestRejected) as failure:
            await stream.next()
        assert (failure.value.status, failure.value.retry_after_s) == (503, 1)
        assert world.retried() == 2

    run(story, num_nodes=3)


def test_other_refusals_are_the_clients() -> None:
    async def story(world: World) -> None:
        stream, node = await world.submit()
        node.say(Refused(1, 429, "too many wait", retry_after_s=1))
        with pytest.raises(RequestRejected) as failure:
            await stream.next()
        assert failure.value.status == 429
        assert world.retried() == 0

    run(story)


def test_what_the_first_still_says_goes_nowhere_and_an_abort_to_the_second() -> None:
    async def story(world: World) -> None:
        stream, first = await world.submit()
        await leave(world, first)
        second = await world.holder(first)
        first.token()
        late = world.client.counters()["messages_late"]
        await world.until(lambda: world.client.counters()["messages_late"] == late + 1)
        stream.abort()
        await world.until(lambda: second.heard[-1] == Abort(1))
        assert first.heard == [Submit(1, SAMPLING, PROMPT)]

    run(story)


def test_a_gateway_that_leaves_tells_all_and_takes_nothing_new() -> None:
    async def story(world: World) -> None:
        stream, node = await world.submit()
        world.client.end_requests()
        for call in (stream.next(), asyncio.to_thread(world.client.submit, PROMPT, SAMPLING)):
            with pytest.raises(RequestRejected, match="about to stop") as failure:
                await call
            assert failure.value.status == 503
        await world.until(lambda: node.heard[-1] == Abort(1))

    run(story)
