"""Sockets of this host: the folder for private ones, loopback, the HTTP port. Really bound, then closed."""

from __future__ import annotations

import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.errors import ConfigError
from common.http_port import check_port
from common.supervision.serve import MAX_TEMP_DIR_CHARS, base_url, short_temp_dir
from doctor.asked import Asked, Check
from doctor.finding import Finding, ok, problem, warning

_PATIENCE_S = 3.0
_LISTENING = "0A"  # st in /proc/net/tcp
_MOST_COMMAND = 80
_SECRET = re.compile(r"(--[\w-]*(?:key|token|password|secret)[ =])(?!@)\S+")  # @FILE is none


def try_socket_folder() -> Finding:
    """Make a folder as `baton serve` does, and a socket in it that a message goes through."""
    import zmq

    wanted = Path(tempfile.gettempdir())
    folder = Path(short_temp_dir())
    remedy = "set TMPDIR to a folder that you can write, on a file system of this host"
    try:
        with tempfile.TemporaryDirectory(prefix="baton-", dir=folder) as private, zmq.Context() as context:
            address = f"ipc://{private}/doctor.sock"
            with context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
                for one in (here, there):
                    one.setsockopt(zmq.LINGER, 0)
                here.bind(address)
                there.connect(address)
                there.send(b"baton")
                if not here.poll(int(_PATIENCE_S * 1000)):
                    return problem(f"nothing comes through a socket in {folder}", remedy)
    except (OSError, zmq.ZMQError) as error:
        return problem(f"no socket can be made in {folder}: {error.strerror}", remedy)
    if folder != wanted:
        return warning(
            f"{folder} is used: paths in {wanted} are too long for sockets (over {MAX_TEMP_DIR_CHARS} "
            "characters)",
            "set TMPDIR to a short path, if it matters to you where private sockets are",
        )
    return ok(f"private sockets can be made in {folder}")


def try_loopback() -> Finding:
    """Send some bytes over loopback."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_PATIENCE_S)
            with socket.create_connection(server.getsockname(), _PATIENCE_S) as client:
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(b"baton")
                    accepted.settimeout(_PATIENCE_S)
                    accepted.recv(5)
    except OSError as error:
        return problem(
            f"nothing goes over 127.0.0.1: {error.strerror or error}",
            "bring loopback up: ip link set lo up; and see that no firewall drops what goes over it",
        )
    return ok("127.0.0.1 works")


def listeners(port: int, proc: Path = Path("/proc")) -> list[str]:
    """Return who listens on a TCP port, as "pid 12 (command line)", as far as we may see it."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            rows = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for words in (row.split() for row in rows):
            if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{words[9]}]")
    found = []
    for process in proc.glob("[0-9]*"):
        try:
            if any(str(link.readlink()) in inodes for link in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                command = _SECRET.sub(r"\1***", command.strip())
                found.append(f"pid {process.name} ({command[:_MOST_COMMAND]})")
        except OSError:
            continue  # another user's, or gone
    return found


def _socket_folder(asked: Asked) -> Iterator[Finding]:
    yield try_socket_folder()


def _loopback(asked: Asked) -> Iterator[Finding]:
    yield try_loopback()


def _port(asked: Asked) -> Iterator[Finding]:
    host, port = asked.config.gateway.host, asked.config.gateway.port
    try:
        check_port(host, port)
    except ConfigError as error:
        if "is taken" not in str(error):
            yield problem(
                str(error),
                "give --host one of this machine's addresses, and --port 1024 to 65535 (below only as root)",
            )
            return
        who = listeners(port)
        by = f" by {' and '.join(who)}" if who else "; who has it cannot be seen"
        yield problem(
            f"port {port} of {host} is taken{by}",
            "end that process, or choose another port with --port (0 lets the system pick one)",
        )
        return
    where = "a port that the system picks" if port == 0 else base_url(host, port)
    yield ok(f"{where} is free" if port else f"{host}: {where}")


CHECKS = (
    Check(
        "socket-folder",
        "A private folder for sockets, and a socket in it that a message goes through.",
        "The path of TMPDIR is too long for sockets: /tmp is used.",
        "It cannot be made or written.",
        _socket_folder,
    ),
    Check(
        "loopback",
        "A connection over 127.0.0.1.",
        "",
        "It cannot be made.",
        _loopback,
    ),
    Check(
        "port",
        "Whether the HTTP server can listen at `--host` and `--port`, and who does where it cannot.",
        "",
        "The port is taken, is not permitted, or the address is not this machine's.",
        _port,
    ),
)
