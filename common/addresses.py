"""Addresses of sockets: which there are, and who can reach them.

What only this user's processes on this host can reach is local, and needs no keys: a socket in a directory
that only the user can enter, or loopback (where keys do no harm, if other users of the host are not trusted).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from pathlib import Path

from common.errors import ConfigError
from common.keys import Keys

MAX_IPC_PATH = 107  # sizeof(sockaddr_un.sun_path) - 1
WILDCARDS = ("*", "0.0.0.0", "::")


def check_address(address: str) -> str:
    """Return the address.

    Raises:
        ConfigError: it is not one that a node can use.
    """
    scheme, _, rest = address.partition("://")
    if scheme not in ("ipc", "tcp") or not rest:
        raise ConfigError(f"{address!r} is no address: use ipc:///path or tcp://host:port")
    if scheme == "ipc" and rest.startswith("@"):
        raise ConfigError(f"{address!r} is open to all users of this host: use ipc:///path")
    if scheme == "ipc" and len(rest.encode()) > MAX_IPC_PATH:
        raise ConfigError(f"socket path {rest!r} is longer than {MAX_IPC_PATH} bytes: choose a shorter one")
    return address


def check_reach(address: str, keys: Keys | None) -> None:
    """Check that nobody reaches an address, or is reached there, who should not.

    Raises:
        ConfigError: it is not local and there are no keys, or others can enter the directory of the socket.
    """
    check_address(address)
    if address.startswith("ipc://"):
        _check_directory(address)
    elif keys is None and not is_local(address):
        raise ConfigError(
            f"{address} can be reached from other hosts, and needs keys: make them with `baton keys FOLDER`, "
            "copy the folder to every host, and start all processes with --keys FOLDER"
        )


def host_of(address: str) -> str:
    """Return the host of a tcp address, an IPv6 address without its brackets."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_local(address: str) -> bool:
    """Say whether a tcp address is on loopback."""
    host = host_of(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen_towards(join: str) -> str:
    """Choose the address for others to connect to: on the interface that leads to the gateway.

    Raises:
        ConfigError: no interface does.
    """
    if is_local(join):
        return "tcp://127.0.0.1:*"
    host, port = host_of(join), join.rpartition(":")[2]
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # chooses a route; sends nothing
            own = str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"no way to {join} ({error}): say the own address with --listen") from None
    return f"tcp://[{own}]:*" if family == socket.AF_INET6 else f"tcp://{own}:*"


def check_listen(address: str) -> None:
    """Check an address that others are told to connect to; raises ConfigError when they could not."""
    if check_address(address).startswith("tcp://") and host_of(address) in WILDCARDS:
        raise ConfigError(
            f"--listen {address}: decode nodes connect to it: name this host's own address instead"
        )


def _check_directory(address: str) -> None:
    directory = Path(address.removeprefix("ipc://")).absolute().parent
    try:
        status = directory.stat()
    except OSError:
        return  # a node may be there before its gateway's directory; binding says what is wrong
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{address}: others may enter {directory}: use a directory of your own (mkdir -m 700)"
        )
