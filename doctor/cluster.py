"""What several hosts share: the cluster's key, and a gateway that answers.

The gateway is greeted as by another gateway, which it refuses whatever else is true: it says who it is, and
takes nobody for a node that has joined. It logs a refused link.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from common.addresses import check_reach, host_of, is_local, listen_towards
from common.codec import Envelope
from common.errors import ConfigError, OtherVersion, RemoteProtocolError
from common.keys import KEY_FILE, Keys, load_keys
from common.messages import CODEC, Hello, HelloAck, Role
from doctor.asked import Asked, Check
from doctor.finding import Finding, ok, problem
from doctor.model import known_model

_PATIENCE_S = 5.0


class NoAnswer(Exception):
    """Nobody answers a greeting as one of ours would; the text says why."""


def why_unreachable(address: str) -> str | None:
    """Connect as a plain socket does; returns why that fails.

    ZeroMQ would try for ever, and say nothing of it.
    """
    try:
        if address.startswith("ipc://"):
            with socket.socket(socket.AF_UNIX) as plain:
                plain.settimeout(_PATIENCE_S)
                plain.connect(address.removeprefix("ipc://"))
        else:
            port = address.rpartition(":")[2]
            socket.create_connection((host_of(address), int(port)), _PATIENCE_S).close()
    except ValueError:
        return f"{address!r} has no port"
    except OSError as error:
        return str(error.strerror or error)
    return None


def greet(address: str, keys: Keys | None, patience_s: float = _PATIENCE_S) -> tuple[HelloAck, float]:
    """Send a Hello; return the answer, and the seconds that it took.

    Raises:
        NoAnswer: whoever is there has other keys, or is of another version, or says nothing.
    """
    from common.context import open_context
    from common.host import this_process
    from common.peer import new_epoch
    from common.sockets import FrameSocket, wait

    hello = Hello(f"doctor-{os.getpid()}", Role.GATEWAY, this_process(), "none")
    context = open_context(keys)
    try:
        link = FrameSocket.dealer(context, address)
        try:
            begun_s = time.monotonic()
            link.send(CODEC.encode(Envelope(new_epoch(), 1, hello)))
            while (left_s := begun_s + patience_s - time.monotonic()) > 0:
                wait(link.pollables(), left_s)
                if (refused := link.refused()) is not None:
                    raise NoAnswer(refused)
                while (received := link.receive()) is not None:
                    message = CODEC.decode(received.frames).message
                    if isinstance(message, HelloAck):
                        return message, time.monotonic() - begun_s
        except OtherVersion as error:
            raise NoAnswer(f"{address} is of another version: {error}") from None
        except RemoteProtocolError as error:
            raise NoAnswer(f"what answers at {address} is no Baton: {error}") from None
        finally:
            link.close()
    finally:
        context.destroy(linger=0)
    raise NoAnswer(f"something at {address} takes connections, and says nothing within {patience_s:g} s")


def judge_answer(address: str, hello: Hello, took_s: float, model: str | None) -> Finding:
    """Say what a gateway told of itself. `model`: the fingerprint of the model here, where it is known."""
    found = f"{hello.node_id} answers at {address} in {took_s * 1000:.0f} ms"
    if hello.role is not Role.GATEWAY:
        return problem(
            f"{found}, but it is a {hello.role.value} node",
            "--join takes the address that `baton gateway` prints (--nodes)",
        )
    if model is not None and model != hello.model:
        return problem(
            f"{found}; it serves model {hello.model[:12]}, and the one here is {model[:12]}",
            "give the same MODEL and --load-format as there; where both name it so, one copy is another "
            "model",
        )
    served = f"the model here, {hello.model[:12]}" if model is not None else f"model {hello.model[:12]}"
    back = ""
    if address.startswith("tcp://") and not is_local(address):
        own = listen_towards(address)
        back = f"; a prefill node here would listen at {own}, where decode nodes must reach it"
    return ok(f"{found}; same version, it serves {served}{back}", round_trip_ms=round(took_s * 1000, 3))


def _keys(asked: Asked) -> Iterator[Finding]:
    folder = asked.config.supervisor.keys
    if folder is None:
        return
    try:
        load_keys(folder)
    except ConfigError as error:
        yield problem(str(error), "do what the message says; all processes of a cluster have the same file")
        return
    yield ok(f"{Path(folder) / KEY_FILE} is a key, and nobody else can read it")


def _gateway(asked: Asked) -> Iterator[Finding]:
    from common.node import gateways_of

    if not asked.doctor.join:
        return
    try:
        keys = load_keys(asked.config.supervisor.keys)
    except ConfigError as error:
        yield problem(f"not greeted: {error}", "see the check keys")
        return
    for address in gateways_of(asked.doctor.join):
        yield _greeted(asked, address, keys)


def _greeted(asked: Asked, address: str, keys: Keys | None) -> Finding:
    try:
        check_reach(address, keys)
    except ConfigError as error:
        return problem(str(error), "do what the message says")
    if (why := why_unreachable(address)) is not None:
        return problem(
            f"{address} cannot be reached: {why}",
            "start the gateway there (baton gateway --nodes ADDRESS), and let the port through firewalls",
        )
    try:
        ack, took_s = greet(address, keys)
    except NoAnswer as error:
        return problem(str(error), "start both with the same version of Baton and the same --keys")
    return judge_answer(address, ack.hello, took_s, _fingerprint(asked))


def _fingerprint(asked: Asked) -> str | None:
    from common.model.spec import load_spec

    model = known_model(asked)
    try:
        return None if model is None else load_spec(model.folder, asked.config.model.load_format).fingerprint
    except ConfigError:
        return None


CHECKS = (
    Check(
        "keys",
        "With `--keys`: the cluster's key, and who else can read it.",
        "",
        "It is missing, no key, or others can read or change it.",
        _keys,
    ),
    Check(
        "gateway",
        "With `--join`: the gateway at each address, by a connection and a Hello: its name, its version, and "
        "whether "
        "it serves the model that is here. It logs a link that it refused.",
        "",
        "It cannot be reached, has other keys, is of another version, is no gateway, or serves another "
        "model.",
        _gateway,
        limit_s=60.0,
    ),
)
