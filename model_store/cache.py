"""Folders that are made once and are whole or not there, whoever is killed while making them.

1. A folder whose manifest agrees with its files is whole; nothing else is done.
2. Otherwise take the lock file (flock: the system frees it with the process) and look again: another process
   may have finished meanwhile.
3. Clear temporary folders: whoever made them held the lock, so he is gone.
4. Build in a temporary folder beside the target.
5. Write the manifest, fsync everything, rename.

Knows nothing of what is built.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ConfigError

Say = Callable[[str], None]  # shows one line of progress to the user

_MANIFEST = "baton-manifest.json"  # {file name: bytes}; the last file written


def default_cache_dir() -> Path:
    """Return where converted models are kept when the user names no other place."""
    return Path("~/.cache/baton").expanduser()


def cached(target: Path, build: Callable[[Path, Path], None], say: Say) -> Path:
    """Return `target`, made if it is not there.

    Args:
        build: makes its second argument; the first is a folder for what it needs meanwhile.

    Raises:
        ConfigError: it cannot be written; and what `build` raises.
    """
    if is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f"{target.name}.lock"), target.name, say):
            if not is_whole(target):
                _make(target, build)
                say(f"{target.name} is in {target}")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot prepare {target.name} in {target.parent}: {reason}") from error
    return target


def is_whole(folder: Path) -> bool:
    """Say whether the folder has every file of its manifest in full length."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        return all((folder / name).stat().st_size == size for name, size in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


@contextmanager
def _locked(path: Path, name: str, say: Say) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that prepares {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(target: Path, build: Callable[[Path, Path], None]) -> None:
    prefix = f".{target.name}."
    for left_over in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        made = work / "model"
        build(work, made)
        _seal(made)
        if target.exists():  # damaged: its manifest does not agree
            target.rename(work / "damaged")
        made.rename(target)
        _fsync(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _seal(folder: Path) -> None:
    """Write the manifest, and bring every byte to the disk before the folder gets its name."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / _MANIFEST).write_text(json.dumps(sizes, indent=1))
    for path in folder.iterdir():
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
