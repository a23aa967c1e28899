"""The process of `baton gateway`: the HTTP server and the links to the nodes, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from pathlib import Path
from typing import Any

from common.addresses import check_reach
from common.api_key import read_api_key
from common.config import DrainConfig, GatewayConfig, ListenConfig, ModelConfig, replace
from common.context import open_context
from common.drain import Drain
from common.host import this_process
from common.http_port import bind_http
from common.keys import Keys, load_keys
from common.messages import Hello, Role
from common.model.spec import ModelSpec, load_spec
from common.node import ALIVE_EVERY_S, private_address, remove_socket_at_exit
from common.peer import new_epoch
from common.supervision.lifeline import Lifeline
from gateway.app import build_app
from gateway.client import NodeClient
from gateway.connections import ConnectionLimits, make_room_for
from gateway.limits import ModelLimits
from gateway.live_requests import gateway_id
from gateway.server import GatewayServer
from gateway.text import TextPipeline
from gateway.tracing import Tracing, open_tracing

log = logging.getLogger("baton.gateway")


async def _serve(
    http: socket.socket,
    nodes_address: str,
    keys: Keys | None,
    spec: ModelSpec,
    text: TextPipeline,
    config: GatewayConfig,
    model_name: str,
    drain_grace_s: float,
    lifeline: Lifeline,
    tracing: Tracing | None,
) -> None:
    context = open_context(keys)
    hello = Hello(gateway_id(), Role.GATEWAY, this_process(), spec.fingerprint)
    client = NodeClient(context, nodes_address, hello, new_epoch())
    loop = asyncio.get_running_loop()

    def on_notice(notice: dict[str, Any]) -> None:  # in the lifeline's thread
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are ending
            loop.call_soon_threadsafe(client.take_notice, notice)

    lifeline.subscribe(on_notice)
    limits = ModelLimits(spec.context_length, spec.vocab_size)
    app = build_app(client, text, config, model_name, limits, tracing)
    drain = Drain(drain_grace_s, is_supervised=lifeline.is_supervised)
    connections = ConnectionLimits(config.max_connections, config.client_timeout)
    server = GatewayServer(app, drain, client.end_requests, connections, client.drain)
    port = http.getsockname()[1]
    log.info("listening on http://%s:%d; nodes join %s", config.host, port, client.address)
    lifeline.ready(port=port)

    async def stay_alive() -> None:
        while True:
            lifeline.usable(client.usable())
            app.state.metrics.catch_up(client.counters())  # what others show must not lag far behind
            lifeline.alive()
            await asyncio.sleep(ALIVE_EVERY_S / 2)

    gc.collect()
    gc.freeze()  # what is here stays: a walk of the collector over all of it would hold every stream up
    alive = asyncio.create_task(stay_alive())
    try:
        await server.serve(sockets=[http])
    finally:
        alive.cancel()
        if tracing is not None:
            tracing.close()
        client.close()
        context.destroy(linger=0)


def run_gateway(
    model: ModelConfig, gateway: GatewayConfig, listen: ListenConfig, drain: DrainConfig, lifeline: Lifeline
) -> None:
    """Run the gateway until it is told to end, and its requests are over; `model.model` is a folder.

    Raises:
        ConfigError: the port is taken, or the model folder, a key, an address or tracing does not work.
    """
    keys = load_keys(listen.keys)
    if listen.nodes is not None:
        check_reach(listen.nodes, keys)
    gateway = replace(gateway, api_key=read_api_key(gateway.api_key))
    http = bind_http(gateway.host, gateway.port, is_shared=gateway.shares_port)
    tracing = open_tracing(gateway.otlp_traces_endpoint)
    make_room_for(gateway.max_connections)
    http.setblocking(False)
    folder = Path(model.model)
    spec = load_spec(folder, model.load_format)
    text = TextPipeline.load(folder, optional=model.load_format == "dummy")
    nodes = listen.nodes or private_address("ipc://", "gateway", lifeline)
    remove_socket_at_exit(nodes, lifeline)
    name = gateway.served_model_name or folder.name
    try:
        with contextlib.suppress(KeyboardInterrupt):
            grace_s = drain.drain_grace
            asyncio.run(_serve(http, nodes, keys, spec, text, gateway, name, grace_s, lifeline, tracing))
    finally:
        lifeline.close()
