"""The key of a cluster: made by `baton keys`, held by each of its processes, asked for between hosts.

One CURVE key pair for all of them. Whoever connects proves that it holds the secret key, and so does whoever
bound the address (RFC 26, CurveZMQ); every message between them is encrypted and authenticated. Members of a
cluster are not protected from each other.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from common.errors import ConfigError

KEY_FILE = "cluster.key"


@dataclass(frozen=True, slots=True)
class Keys:
    """A CURVE key pair, as Z85 text of 40 characters each. The public key is told to nobody, either."""

    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)


def make_keys(folder: Path) -> Path:
    """Make the key of a new cluster in a folder that only this user can enter; returns its file.

    Raises:
        ConfigError: there is a key already, or the folder cannot be written.
    """
    path = folder / KEY_FILE
    _, secret = zmq.curve_keypair()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} exists: remove it first, or choose another folder") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    with os.fdopen(fd, "wb") as file:
        file.write(secret + b"\n")
    return path


def load_keys(folder: str | None) -> Keys | None:
    """Read a cluster's key; None where no folder is given.

    Raises:
        ConfigError: there is none, others can read it, or it is not a key.
    """
    if folder is None:
        return None
    path = Path(folder) / KEY_FILE
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read(4096).strip()
    except OSError as error:
        raise ConfigError(f"--keys: cannot read {path}: {error.strerror}; `baton keys` makes it") from None
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"--keys: others may read or change {path}: chmod 600, and own it")
    try:
        return Keys(zmq.curve_public(secret), secret)
    except (ValueError, zmq.ZMQError):
        raise ConfigError(f"--keys: {path} is no key; `baton keys` makes one") from None
