"""The HTTP port: bound by the gateway, tried by `baton serve` before anything that takes time."""

from __future__ import annotations

import errno
import socket

from common.errors import ConfigError

MAX_PORT = 65535
BACKLOG = 2048


def bind_http(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Bind the HTTP port and listen; the caller closes it.

    Args:
        is_shared: several processes bind it so, and the kernel spreads connections over those that listen.
            This does not listen yet: whoever is not ready is given none.

    Raises:
        ConfigError: it is taken, or the address is not ours.
    """
    if port > MAX_PORT:  # getaddrinfo would take it, modulo 65536
        raise ConfigError(f"--port {port} is no port: the largest is {MAX_PORT}")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        http = socket.socket(family, kind, proto)
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"--host {host} is no address") from None
    try:
        http.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            http.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        http.bind(address)
        if not is_shared:
            http.listen(BACKLOG)
    except OSError as error:
        http.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} is taken: choose another with --port (0 lets the system pick one)"
            ) from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return http


def check_port(host: str, port: int) -> None:
    """Raise ConfigError when the HTTP server could not listen there."""
    bind_http(host, port).close()
