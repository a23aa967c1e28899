"""The network side of the gateway: `Nodes` over links to real nodes, in the event loop of the HTTP server.

A ZMQ descriptor is edge-triggered, and a send may swallow the edge: so everything is read whenever it fires,
and once more after each send.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import zmq

from common.acceptor import Acceptor
from common.codec import IntArray
from common.errors import RequestRejected
from common.messages import (
    NODE_DRAINING,
    Abort,
    Failed,
    Granted,
    Hello,
    Peers,
    PromptLogprobs,
    Refused,
    Role,
    Stats,
    Status,
    Tokens,
)
from common.peer import Peer, PeerDown, PeerMessage, PeerUp
from common.request import FinishReason, LogprobArrays, SamplingParams
from gateway.errors import deadline_exceeded
from gateway.nodes import NodeSnapshot, RequestStream, TokenEvent
from gateway.queries import NodeQueries
from gateway.router import Node, Router
from gateway.stream import Stream
from gateway.submission import Submission

log = logging.getLogger("baton.gateway")

RETRY_AFTER_S = 1
MOST_MESSAGES = 16  # read in one go; then whatever else the loop has to do gets on
OVERDUE_AFTER_S = 1.0  # beyond a request's deadline: the decode node, which knows more, should say so itself


def _leaving() -> RequestRejected:
    return RequestRejected("the server is about to stop", status=503, retry_after_s=RETRY_AFTER_S)


class NodeClient:
    """All links of the gateway. To be made, used and closed in one event loop."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, hello: Hello, epoch: int
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(context, address, hello, epoch, self._status, clock=self._loop.time)
        self._router = Router()
        self._streams: dict[int, Stream] = {}
        self._next_id = 1  # of a request
        self._queries = NodeQueries()
        self._timer: asyncio.TimerHandle | None = None
        self._pidfds: dict[int, int] = {}
        self._is_closed = False
        self._is_draining = False
        self._is_leaving = False
        self._pump_is_due = False
        self._restarts: dict[str, dict[str, int]] = {}
        self._counters: Counter[str] = Counter()
        for fd in self._acceptor.socket.filenos():
            self._loop.add_reader(fd, self._pump)
        self._pump()

    @property
    def address(self) -> str:
        """Where nodes join."""
        return self._acceptor.address

    # Nodes (the seam) ---------------------------------------------------------------------------------------

    def submit(
        self, prompt_ids: IntArray, sampling: SamplingParams, timeout_s: float | None = None
    ) -> tuple[RequestStream, ...]:
        """Hand a request to a decode node; raises RequestRejected(503) when there is no usable one."""
        if self._is_leaving:
            raise _leaving()
        node = self._router.choose()
        if node is None:
            self._counters["requests_without_nodes"] += 1
            raise RequestRejected(
                "no pair of prefill and decode nodes is ready: come again soon",
                status=503,
                retry_after_s=RETRY_AFTER_S,
            )
        deadline_s = None if timeout_s is None else self._loop.time() + timeout_s
        submission = Submission(self._next_id, prompt_ids, sampling, deadline_s, self._abort)
        self._next_id += sampling.num_choices
        for stream in submission.streams:
            if deadline_s is not None:
                stream.timer = self._loop.call_at(deadline_s + OVERDUE_AFTER_S, self._overdue, stream)
            self._streams[stream.request_id] = stream
        self._give_to(node, submission, submission.streams)
        return submission.streams

    def capacity_tokens(self) -> int | None:
        """Tokens that every decode node's pool holds."""
        return self._router.capacity_tokens()

    def usable(self) -> bool:
        """Whether a decode node can take a request now."""
        return any(n.status is not None and n.status.usable for n in self._router.decode_nodes())

    def stalled(self) -> tuple[str, ...]:
        """Nodes that have work and made no step for 30 s."""
        return self._router.stalled(self._loop.time())

    async def snapshot(self) -> tuple[tuple[NodeSnapshot, ...], tuple[str, ...]]:
        """Ask all nodes at once; those that do not answer within 2 s, or are down, are named."""
        answers, missing = await self._queries.ask(list(self._router.nodes()), self._pump_soon)
        present = {snapshot.node_id for snapshot in answers} | set(missing)
        missing += [name for name in self._router.gone(self._loop.time()) if name not in present]
        return tuple(answers), tuple(missing)

    def counters(self) -> dict[str, int]:
        """What was counted here, and by the links."""
        return self._counters + self._acceptor.counters

    def restarts(self) -> dict[str, dict[str, int]]:
        """Restarts by role and reason, as the supervisor counts them."""
        return self._restarts

    # ----------------------------------------------------------------------------------------------------

    def take_notice(self, notice: dict[str, Any]) -> None:
        """What the supervisor says."""
        if isinstance(restarts := notice.get("restarts"), dict):
            self._restarts = restarts

    def drain(self) -> None:
        """Tell all nodes that this process is about to leave: then they do not take it for dead."""
        self._is_draining = True
        for node in self._router.nodes():
            node.peer.send(self._status(node.peer))
        self._pump_soon()

    def end_requests(self) -> None:
        """End what is open with an error, and take nothing more: this process is about to leave."""
        self._is_leaving = True
        for stream in list(self._streams.values()):
            stream.node.peer.send(Abort(stream.request_id))
            self._fail(stream, _leaving())
        self._pump_soon()

    def close(self) -> None:
        """Close all links; what is still open is given up, and nobody is told."""
        self._is_closed = True
        for fd in (*self._acceptor.socket.filenos(), *self._pidfds):
            self._loop.remove_reader(fd)
        if self._timer is not None:
            self._timer.cancel()
        for stream in self._streams.values():
            stream.stop_timer()
        self._acceptor.close()

    def _give_to(self, node: Node, submission: Submission, streams: Sequence[Stream]) -> None:
        """Submit a prompt; of its choices these are wanted."""
        seq = node.peer.send(submission.given_to(node, streams, self._loop.time()))
        for stream in submission.streams:
            if stream in streams:
                node.reconciler.opened(stream.request_id, seq)
            else:
                node.peer.send(Abort(stream.request_id))
        self._pump_soon()

    def _retry(self, stream: Stream, error: RequestRejected) -> None:
        """Its decode node does not go on: before the first token another may have it, never after.

        All choices of its prompt that have no token yet move together.
        """
        old, submission = stream.node, stream.submission
        node = None if stream.received else self._router.choose(submission.tried)
        if node is None:
            self._fail(stream, error)
            return
        moved = [s for s in submission.streams if s.open and not s.received and s.node is old]
        self._counters["requests_retried"] += len(moved)
        for each in moved:
            old.reconciler.closed(each.request_id)
            if each is not stream and self._router.of(old.peer) is old:
                old.peer.send(Abort(each.request_id))
        self._give_to(node, submission, moved)

    def _abort(self, stream: Stream) -> None:
        self._end(stream)
        if self._is_closed:
            return
        stream.node.peer.send(Abort(stream.request_id))
        self._pump_soon()

    def _overdue(self, stream: Stream) -> None:
        """The decode node is silent about a deadline: it is stopped, or what it said was lost."""
        self._abort(stream)
        node_id = stream.node.peer.node_id
        stream.put(deadline_exceeded(f"the request did not end in time: {node_id} says nothing"))

    def _end(self, stream: Stream) -> None:
        stream.open = False
        stream.stop_timer()
        self._streams.pop(stream.request_id, None)
        stream.node.reconciler.closed(stream.request_id)

    def _fail(self, stream: Stream, error: RequestRejected) -> None:
        self._end(stream)
        stream.put(error)

    def _status(self, peer: Peer) -> Status:
        node = self._router.of(peer)
        open_ids = () if node is None else node.reconciler.open_ids()
        return Status(last_seq_seen=0, open_ids=open_ids, draining=self._is_draining)

    # The loop -------------------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        if not self._pump_is_due:
            self._pump_is_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Read everything, do what is due, and plan the next time."""
        self._pump_is_due = False
        if self._is_closed:
            return
        now = self._loop.time()
        for event in self._acceptor.poll(now, MOST_MESSAGES):
            match event:
                case PeerUp(peer):
                    self._up(peer, now)
                case PeerDown(peer, reason):
                    self._down(peer, reason, now)
                case PeerMessage(peer, message):
                    if (node := self._router.of(peer)) is not None:
                        self._message(node, message, now)
        self._watch_pidfds()
        if self._acceptor.socket.is_readable():  # what was sent in here may have swallowed the edge
            self._pump_soon()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (deadline := self._acceptor.deadline()) is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - self._loop.time()), self._pump)

    def _watch_pidfds(self) -> None:
        pidfds = self._acceptor.pidfds()
        # Compared with the peer that it is for: the number of a closed one is given out again.
        for fd, _ in self._pidfds.items() - pidfds.items():
            self._loop.remove_reader(fd)
        for fd, _ in pidfds.items() - self._pidfds.items():
            self._loop.add_reader(fd, self._pump)
        self._pidfds = pidfds

    def _up(self, peer: Peer, now: float) -> None:
        log.info("%s joined", peer.node_id)
        self._router.add(peer, now)
        if peer.hello.role is Role.PREFILL:
            self._tell_peers()
        else:
            peer.send(Peers(self._router.prefill_infos()))

    def _down(self, peer: Peer, reason: str, now: float) -> None:
        node = self._router.remove(peer, now)
        self._queries.gone(peer)
        if node is None:
            return
        was_heard = node.status is not None  # else it may have died before its greeting was read
        self._counters["decode_nodes_lost"] += node.is_decode and was_heard and not node.is_draining
        for request_id in node.reconciler.open_ids():
            stream = self._streams.get(request_id)
            if stream is not None and stream.node is node:  # else it moved with another choice
                gone = f"{peer.node_id} is gone: {reason}"
                self._retry(stream, RequestRejected(gone, status=503, retry_after_s=RETRY_AFTER_S))
        if peer.hello.role is Role.PREFILL:
            self._tell_peers()

    def _tell_peers(self) -> None:
        for node in self._router.decode_nodes():
            node.peer.send(Peers(self._router.prefill_infos()))

    def _message(self, node: Node, message: object, now: float) -> None:
        match message:
            case Tokens():
                self._tokens(node, message)
            case Granted(request_ids=request_ids):
                for known in self._known(node, request_ids):
                    known.note_granted(message)
            case PromptLogprobs(request_id=request_id):
                if (stream := self._stream(node, request_id)) is not None and not stream.received:
                    stream.scores = LogprobArrays(message.logprobs, message.top_ids, message.top_logprobs)
            case Refused():
                self._refused(node, message)
            case Failed(id=request_id, status=status, reason=reason, retry_after_s=retry_after_s):
                if (stream := self._stream(node, request_id)) is not None:
                    if status == 500 and not stream.submission.is_broken:  # each choice is told of it
                        stream.submission.is_broken = True
                        self._counters["requests_broken"] += 1
                    error = RequestRejected(reason, status=status, retry_after_s=retry_after_s)
                    self._fail(stream, deadline_exceeded(reason) if status == 504 else error)
            case Status():
                node.take_status(message, now)
                if node.peer.hello.role is Role.DECODE and not message.usable:
                    node.peer.send(Peers(self._router.prefill_infos()))  # the last one may have been lost
                for known in self._known(node, message.open_ids):
                    known.note_taken()
                self._lost(node, node.reconciler.on_status(message.last_seq_seen, message.open_ids))
            case Stats():
                self._queries.answered(node.peer, message)
            case _:
                self._counters["messages_misplaced"] += 1

    def _stream(self, node: Node, request_id: int) -> Stream | None:
        stream = self._streams.get(request_id)
        if stream is None or stream.node is not node:
            self._counters["messages_late"] += 1
            return None
        return stream

    def _known(self, node: Node, request_ids: Sequence[int]) -> list[Stream]:
        """Those of them that a node still has; the others' clients left, or a choice was not wanted."""
        streams = map(self._streams.get, request_ids)
        return [stream for stream in streams if stream is not None and stream.node is node]

    def _tokens(self, node: Node, message: Tokens) -> None:
        for begun in message.begun:
            for known in self._known(node, begun.granted.request_ids):
                known.note_begun(begun)
        finishes = {finish.request_id: finish for finish in message.finished}
        logprobs = {item.request_id: item.tokens for item in message.logprobs}
        ids = message.token_ids.tolist()
        at = 0
        has_gap = False
        for request_id, first, count in zip(message.request_ids, message.first, message.counts, strict=True):
            token_ids = tuple(ids[at : at + count])
            at += count
            if (stream := self._stream(node, request_id)) is None:
                continue
            if first != stream.received or (not first and stream.lacks_scores()):
                has_gap = True
                stream.node.peer.send(Abort(request_id))
                self._fail(stream, RequestRejected("tokens were lost on the way: ask again", status=500))
                continue
            finish = finishes.get(request_id)
            stream.received += count
            reason: FinishReason | None = None if finish is None else finish.reason
            if finish is not None:
                stream.note_finished(finish)
                self._end(stream)
            stream.put(TokenEvent(token_ids, reason, logprobs.get(request_id, ())))
        self._counters["requests_lost"] += has_gap  # one message, whoever's tokens were in it

    def _refused(self, node: Node, message: Refused) -> None:
        if (stream := self._stream(node, message.request_id)) is not None:
            error = RequestRejected(
                message.message,
                status=message.status,
                code=message.code,
                param=message.param,
                retry_after_s=message.retry_after_s,
            )
            (self._retry if message.code == NODE_DRAINING else self._fail)(stream, error)

    def _lost(self, node: Node, request_ids: Sequence[int]) -> None:
        """A node does not know these requests."""
        streams = self._known(node, request_ids)
        # The choices of a prompt were in one message.
        self._counters["requests_lost"] += len({id(stream.submission) for stream in streams})
        for request_id in request_ids:
            node.reconciler.closed(request_id)
        for stream in streams:
            if stream.node is node:  # else it moved with another choice
                self._retry(
                    stream, RequestRejected("the decode node lost the request: ask again", status=500)
                )
