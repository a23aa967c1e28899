"""The HTTP routes. What a route answers is put together elsewhere; the OpenAPI page is true to the errors."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route

from common.config import GatewayConfig
from common.errors import RequestRejected
from gateway.api_key import ApiKeyCheck
from gateway.endpoints import CHAT, COMPLETIONS, Endpoint
from gateway.errors import INTERNAL_ERROR, ErrorBody, from_http
from gateway.exposition import exposition
from gateway.failures import Failure
from gateway.generation import GenerationCall, Service
from gateway.limits import ModelLimits
from gateway.live_requests import LiveRequests, gateway_id
from gateway.metrics import RequestMetrics
from gateway.nodes import Nodes
from gateway.page import answer_content, request_schema
from gateway.page_files import PageFiles
from gateway.prompts import check_model
from gateway.reply import JSONBody, error_response
from gateway.rows import to_json_in_slices
from gateway.text import TextPipeline
from gateway.tracing import Tracing

MIB = 1 << 20
Handler = Callable[[Request], Awaitable[Response]]
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "A field is wrong, unknown or not supported (`param`)."},
    401: {"model": ErrorBody, "description": "The API key is missing, or not the server's."},
    404: {"model": ErrorBody, "description": "No such model."},
    408: {"model": ErrorBody, "description": "The request did not come in time."},
    413: {"model": ErrorBody, "description": "The body is larger than the limit."},
    431: {"model": ErrorBody, "description": "The headers are larger than the limit."},
    429: {"model": ErrorBody, "description": "Too many requests wait; see Retry-After."},
    500: {"model": ErrorBody, "description": "A failure of the server."},
    503: {
        "model": ErrorBody,
        "description": "No nodes to serve it now, or too many connections; see Retry-After.",
    },
    504: {"model": ErrorBody, "description": "It did not end within its `timeout`, or the server's."},
}


class Routes:
    """The handlers of all routes."""

    def __init__(self, service: Service, *, shares_port: bool) -> None:
        self._service = service
        self._shares_port = shares_port
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """List the models: one."""
        return JSONBody({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Describe a model."""
        check_model(request.path_params["model"], self._service.model_name)
        return JSONBody(self._model())

    async def completions(self, request: Request) -> Response:
        """Continue a prompt."""
        return GenerationCall(self._service, COMPLETIONS)

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        return GenerationCall(self._service, CHAT)

    async def health(self, request: Request) -> Response:
        """Say whether the processes do what they should: 503 when a node has work and makes no step."""
        stalled = self._service.nodes.stalled()
        if stalled:
            return JSONBody({"status": "stalled", "nodes": list(stalled)}, 503, {"Retry-After": "1"})
        return JSONBody({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Say whether a request could be served now: 503 until there is a usable pair of nodes."""
        if not self._service.nodes.usable():
            return JSONBody({"status": "not ready"}, 503, {"Retry-After": "1"})
        return JSONBody({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """Show the metrics as Prometheus text."""
        text = await exposition(self._service.metrics, self._service.nodes)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def debug_kv(self, request: Request) -> Response:
        """Show every node's KV pages by state, asked of the nodes now; always 200."""
        nodes, missing = await self._service.nodes.snapshot()
        ledgers = [
            {"id": node.node_id, "role": node.role.value, "epoch": node.epoch, "pages": asdict(node.pages)}
            for node in nodes
        ]
        return JSONBody({"nodes": ledgers, "missing": list(missing)})

    async def debug_requests(self, request: Request) -> Response:
        """Show this gateway's requests, those that live and the last that ended: where their time went."""
        data = await to_json_in_slices(self._service.requests.to_json())
        # A client that asks again and again is to hear of all gateways that share the port, each in its turn.
        headers = {"Connection": "close"} if self._shares_port else None
        return Response(data, headers=headers, media_type=JSONBody.media_type)

    def _model(self) -> dict[str, Any]:
        name = self._service.model_name
        return {"id": name, "object": "model", "created": self._created, "owned_by": "baton"}


async def _on_rejected(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRejected)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(from_http(error), dict(error.headers or {}))


async def _on_exception(request: Request, error: Exception) -> Response:
    request.app.state.metrics.failed(Failure.INTERNAL)
    return error_response(INTERNAL_ERROR)  # starlette raises it again, and uvicorn logs it


def _add_generation(app: FastAPI, endpoint: Endpoint, handler: Handler, model_name: str) -> None:
    schema = request_schema(endpoint.request_type, endpoint.unsupported, model_name)
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    app.add_api_route(
        endpoint.path,
        handler,
        methods=["POST"],
        response_model=None,
        responses={**_ERRORS, 200: {"content": answer_content(endpoint.body_object)}},
        openapi_extra={"requestBody": body},
    )


def _add_get(
    app: FastAPI,
    path: str,
    handler: Handler,
    responses: dict[int | str, dict[str, Any]],
    answers_with: type[Response] = JSONResponse,
) -> None:
    app.add_api_route(path, handler, response_model=None, responses=responses, response_class=answers_with)
    # Load balancers ask with HEAD.
    app.add_api_route(path, handler, methods=["HEAD"], response_model=None, include_in_schema=False)


def build_app(
    nodes: Nodes,
    text: TextPipeline,
    config: GatewayConfig,
    model_name: str,
    limits: ModelLimits,
    tracing: Tracing | None = None,
) -> FastAPI:
    """Build the application that serves one model."""
    max_body_bytes, metrics = config.max_body_mib * MIB, RequestMetrics()
    service = Service(
        nodes,
        text,
        limits,
        model_name,
        max_body_bytes,
        config.request_timeout,
        metrics,
        LiveRequests(gateway_id()),
        config.client_timeout,
        tracing,
    )
    routes = Routes(service, shares_port=config.shares_port)
    metrics.catch_up(nodes.counters())
    # Without the pages /docs and /redoc: they load scripts from elsewhere.
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.metrics = metrics
    _add_generation(app, COMPLETIONS, routes.completions, model_name)
    _add_generation(app, CHAT, routes.chat, model_name)
    always: dict[int | str, dict[str, Any]] = {s: _ERRORS[s] for s in (401, 408, 431, 503)}
    missing = always | {404: _ERRORS[404]}
    unavailable: dict[int | str, dict[str, Any]] = {503: {"description": "Not now; see Retry-After."}}
    _add_get(app, "/v1/models", routes.models, always)
    _add_get(app, "/v1/models/{model:path}", routes.model, missing)
    _add_get(app, "/health", routes.health, unavailable)
    _add_get(app, "/ready", routes.ready, unavailable)
    _add_get(app, "/metrics", routes.metrics, always, PlainTextResponse)
    _add_get(app, "/debug/kv", routes.debug_kv, always)
    _add_get(app, "/debug/requests", routes.debug_requests, always)
    page = PageFiles()
    app.router.routes += [Route("/", page, methods=["GET"], include_in_schema=False), Mount("/web", page)]
    app.add_exception_handler(RequestRejected, _on_rejected)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_exception)
    if config.api_key is not None:
        app.add_middleware(ApiKeyCheck, key=config.api_key)
    return app
