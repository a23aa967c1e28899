"""A call to one of the two generating endpoints, from its body to its last byte.

1. Read the body (bounded), parse it, render and tokenize in a worker thread. From here on its time runs.
2. Check it against the model and the nodes.
3. Submit every prompt as a request of its own; all of them or none.
4. Follow them, and write one body or a stream of chunks.
5. Whatever ends the call (success, a failure, a client that left, a server that stops): abort what is left.

The client is watched from the end of its body on, so that one that leaves is noticed while nothing is
written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import RequestRejected
from common.request import SamplingParams
from gateway.answer import Answer, Delta, TextRules
from gateway.body import parse_object, read_body
from gateway.chunks import ChunkWriter
from gateway.disconnect import run_while_connected
from gateway.endpoints import Endpoint
from gateway.errors import INTERNAL_ERROR, deadline_exceeded
from gateway.failures import Failure, failure_of
from gateway.limits import ModelLimits
from gateway.live_requests import LiveCall, LiveRequests
from gateway.metrics import Outcome, RequestMetrics
from gateway.nodes import Nodes
from gateway.openai_api import GenerationRequest
from gateway.prompts import Prompt, check_model, check_prompts
from gateway.rendering import Renderer
from gateway.reply import RECEIVED, Reply, event_of
from gateway.text import TextPipeline
from gateway.timeline import GatewayStamps
from gateway.tracing import Tracing

logger = logging.getLogger("baton.gateway")

# Threads of their own, for xgrammar may read one for seconds: other prompts must not wait behind them.
WITH_GRAMMAR = ThreadPoolExecutor(2, "grammar")
UNREAD_S = 3.0  # beyond its deadline a call whose client does not read is over; the nodes have 1 s to say so


@dataclass(frozen=True, slots=True)
class Service:
    """What every call uses."""

    nodes: Nodes
    text: TextPipeline
    limits: ModelLimits
    model_name: str
    max_body_bytes: int
    request_timeout_s: float
    metrics: RequestMetrics
    requests: LiveRequests
    body_timeout_s: float = 60.0  # in which a client must have sent its body
    tracing: Tracing | None = None


class GenerationCall(Response):
    """The response of a generating endpoint; it reads the request's body itself."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        super().__init__()
        self._service = service
        self._endpoint = endpoint
        self._id = endpoint.id_prefix + uuid.uuid4().hex
        self._created = int(time.time())
        self._call = LiveCall(self._id, endpoint.path, GatewayStamps(time.monotonic()))
        self._answers = self._call.answers
        self._sampling: SamplingParams | None = None  # of a call that was read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the call; every failure becomes an error object."""
        reply = Reply(self._id, scope, receive, send)
        metrics = self._service.metrics
        outcome, said = Outcome.FAILED, None
        metrics.call_began()
        if (received := scope.get("extensions", {}).get(RECEIVED)) is not None:
            self._call.begun = GatewayStamps(received["at_s"])
        self._service.requests.begin(self._call)
        try:
            body = await self._read_body(Request(scope, receive))
            await run_while_connected(self._serve(body, reply), receive)
            outcome = Outcome.SUCCESS
        except ClientDisconnect:
            outcome = Outcome.CLIENT_GONE
            metrics.failed(Failure.CLIENT_GONE)
        except RequestRejected as error:
            outcome = Outcome.FAILED if error.status >= 500 else Outcome.REJECTED
            said = error.message
            if (kind := failure_of(error)) is not None:
                metrics.failed(kind)
            # A client's mistake is counted; it is no news for whoever runs the server.
            level = logging.WARNING if error.status >= 500 else logging.DEBUG
            logger.log(level, "%s failed: %d %s", self._id, error.status, error.message)
            await self._fail(reply, error)
        except Exception:  # the top of a request: our own bug must not take others with it
            logger.exception("%s failed", self._id)
            metrics.failed(Failure.INTERNAL)
            said = INTERNAL_ERROR.message
            await self._fail(reply, INTERNAL_ERROR)
        finally:
            reply.close()
            records = self._service.requests.end(self._call, outcome, said)
            metrics.call_ended(outcome, self._answers)
            if (tracing := self._service.tracing) is not None:
                tracing.add(records, self._service.model_name, self._sampling, scope["headers"])

    async def _fail(self, reply: Reply, error: RequestRejected) -> None:
        with contextlib.suppress(TimeoutError):  # who reads nothing does not hear why
            async with asyncio.timeout(UNREAD_S):
                await reply.fail(error)

    async def _read_body(self, request: Request) -> bytes:
        service = self._service
        try:
            async with asyncio.timeout(service.body_timeout_s):
                return await read_body(request, service.max_body_bytes)
        except TimeoutError:
            raise RequestRejected(
                "the request's body did not come in time", status=408, code="request_timeout"
            ) from None

    async def _serve(self, body: bytes, reply: Reply) -> None:
        service = self._service
        loop = asyncio.get_running_loop()
        now = loop.time()
        request, encode = self._endpoint.parse(parse_object(body))
        check_model(request.model, service.model_name)
        due_s = now + min(request.timeout or math.inf, service.request_timeout_s)
        try:
            async with asyncio.timeout_at(due_s):
                threads = None if request.grammar is None else WITH_GRAMMAR
                context_length = service.limits.context_length
                ids = await loop.run_in_executor(threads, encode, service.text, context_length)
        except TimeoutError:
            raise deadline_exceeded("the request did not end in time: not yet tokenized") from None
        self._call.begun = replace(self._call.begun, tokenized_s=time.monotonic())
        prompts = check_prompts(
            request, ids, self._endpoint.prompt_param, service.limits, service.nodes.capacity_tokens()
        )
        self._sampling = prompts[0].sampling
        renderer = Renderer(
            self._endpoint,
            request,
            {"id": self._id, "created": self._created, "model": service.model_name},
            service.text.token_texts,
            prompts,
        )
        try:
            for prompt in prompts:
                self._submit(prompt, request, due_s)
            async with asyncio.timeout_at(due_s + UNREAD_S):
                await (self._stream if request.stream else self._collect)(renderer, reply)
        except TimeoutError:
            raise ClientDisconnect from None  # it reads nothing: the deadline's own error did not get through
        finally:
            for answer in self._answers:
                answer.abort()

    def _submit(self, prompt: Prompt, request: GenerationRequest, due_s: float) -> None:
        service = self._service
        left_s = max(0.0, due_s - asyncio.get_running_loop().time())
        rules = TextRules(request.stop, request.min_tokens)
        begun = replace(self._call.begun, submitted_s=time.monotonic())
        for stream in service.nodes.submit(prompt.ids, prompt.sampling, left_s):
            detokenizer = service.text.detokenizer()
            answer = Answer(len(self._answers), prompt.ids, stream, detokenizer, rules, begun)
            self._answers.append(answer)
        service.metrics.prompt_submitted(len(prompt.ids))

    async def _collect(self, renderer: Renderer, reply: Reply) -> None:
        deltas: list[list[Delta]] = [[] for _ in self._answers]

        def keep(answer: Answer, delta: Delta) -> None:
            if not deltas[answer.index]:
                answer.note_first_token()
            deltas[answer.index].append(delta)

        await self._follow(keep)
        await reply.body(renderer.body(self._answers, deltas))

    async def _stream(self, renderer: Renderer, reply: Reply) -> None:
        def first_written(answer: Answer) -> None:
            reply.when_written(answer.note_first_token)

        chunks = ChunkWriter(renderer, self._answers, reply.write, first_written)
        await self._follow(chunks.add)
        usage = renderer.usage_chunk(self._answers)
        if usage is not None:
            reply.write(event_of(usage))
        await reply.done()

    async def _follow(self, emit: Callable[[Answer, Delta], None]) -> None:
        """Have `emit` called with all that comes; whatever fails first ends the call."""
        all_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        num_open = len(self._answers)

        def ended(failure: Exception | None) -> None:
            nonlocal num_open
            num_open -= 1
            if all_ended.done():
                return
            if failure is not None:
                all_ended.set_exception(failure)
                for answer in self._answers:
                    answer.abort()  # the others must not write behind the error
            elif not num_open:
                all_ended.set_result(None)

        for answer in self._answers:
            answer.follow(emit, ended, self._service.metrics.token_times)
        await all_ended
