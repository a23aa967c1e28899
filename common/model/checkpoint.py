"""What a model folder's safetensors files hold, from their headers alone, and the model's fingerprint.

Knows no architecture and loads no tensor: `weights.py` does. Imports no torch, so that a process without a
model can name the one it serves.

File format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError

# Whole tensors would take as long as loading them. Training, fine-tuning and merging change nearly every
# element of a tensor, so a few places of each tell models apart.
_SAMPLE_BYTES = 256
_SAMPLES = 4
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies."""

    file: Path
    dtype: str  # the format's word, for example F32 or BF16
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int


def read_entries(folder: Path) -> dict[str, TensorEntry]:
    """List all tensors of the folder by name.

    Raises:
        ConfigError: there is no safetensors file, or one is broken.
    """
    entries: dict[str, TensorEntry] = {}
    for file in _weight_files(folder):
        try:
            entries.update(_read_header(file))
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} is not a whole safetensors file") from error
    return entries


def fingerprint(facts: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> str:
    """Name a model by its settings and its weights: the same on every machine, whatever the file names.

    Every tensor counts with its name, type, shape and a sample of its bytes.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(entries):
        entry = entries[name]
        digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
        with entry.file.open("rb") as file:
            for i in range(_SAMPLES):
                last_start = max(0, entry.num_bytes - _SAMPLE_BYTES)
                file.seek(entry.offset + last_start * i // (_SAMPLES - 1))
                digest.update(file.read(min(_SAMPLE_BYTES, entry.num_bytes)))
    return digest.hexdigest()[:32]


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that make up the model: some folders hold a second copy under other names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        try:
            return [
                folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
            ]
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise ConfigError(f"{index} is not a whole index of safetensors files") from error
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(file.name for suffix in ("bin", "pt", "pth") for file in folder.glob(f"*.{suffix}"))
        only = f": {pickles[0]} is a pickle, which could run code when it is read" if pickles else ""
        raise ConfigError(f"{folder} has no *.safetensors file{only}")
    return files


def _read_header(path: Path) -> dict[str, TensorEntry]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError("header too long")
        header = json.loads(file.read(length))
    entries: dict[str, TensorEntry] = {}
    end_of_data = 8 + length
    for name, item in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + int(offset) for offset in item["data_offsets"])
        shape = tuple(int(n) for n in item["shape"])
        entries[name] = TensorEntry(path, str(item["dtype"]), shape, begin, end - begin)
        end_of_data = max(end_of_data, end)
    if end_of_data != path.stat().st_size:
        raise ValueError("cut short")
    return entries
