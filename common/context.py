"""A ZMQ context whose sockets have the cluster's key, and that lets in nobody without it.

libzmq asks whoever is bound to a fixed address of the context (RFC 27, ZAP) about each client that proved to
have some key. The answer comes from a thread of its own, so it never waits for a node's step.
"""

from __future__ import annotations

import hmac
import threading

import zmq
from zmq.utils import z85

from common.keys import Keys

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"baton"


class NodeContext(zmq.Context[zmq.Socket[bytes]]):
    """A context with keys, or without (None): then its sockets are for local addresses alone."""

    keys: Keys | None = None


def open_context(keys: Keys | None) -> NodeContext:
    """Make the context of a process; `destroy` ends it."""
    context = NodeContext()
    context.keys = keys
    if keys is not None:
        # By a shadow: `destroy` closes the sockets of the context itself, from another thread.
        shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        zap = shadow.socket(zmq.REP)
        zap.bind(ZAP_ADDRESS)
        threading.Thread(target=_answer, args=(zap, keys), name="zap", daemon=True).start()
    return context


def keys_of(context: zmq.Context[zmq.Socket[bytes]]) -> Keys | None:
    """Return the keys of a context; a plain one has none."""
    return context.keys if isinstance(context, NodeContext) else None


def secure(socket: zmq.Socket[bytes], keys: Keys, *, binds: bool) -> None:
    """Have a socket prove its key, and ask its peer for it."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    if binds:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody answers: nobody is let in
    else:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)


def _answer(zap: zmq.Socket[bytes], keys: Keys) -> None:
    expected = z85.decode(keys.public)
    try:
        while True:
            version, request_id, domain, _, _, mechanism, *credentials = zap.recv_multipart()
            known = (
                (domain, mechanism) == (ZAP_DOMAIN, b"CURVE")
                and len(credentials) == 1
                and hmac.compare_digest(credentials[0], expected)
            )
            status = (b"200", b"OK") if known else (b"400", b"unknown key")
            zap.send_multipart([version, request_id, *status, b"", b""])
    except zmq.ContextTerminated:
        zap.close(linger=0)
