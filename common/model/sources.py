"""Where a model's tensors come from: the safetensors files of a folder, or random numbers.

Knows no model: names and shapes are given.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import ConfigError
from common.model.checkpoint import TensorEntry, read_entries

Shapes = Mapping[str, tuple[int, ...]]

_FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")
# Random tensors repeat a block of this many numbers (a prime: rows differ). Drawing every number anew would
# take minutes for a model of billions.
_BLOCK = 4_194_301


class SafetensorsSource:
    """The tensors of a folder; what is read is mapped from its file, not copied.

    Raises:
        ConfigError: a tensor is missing, unexpected, of another shape, or not of floats.
    """

    def __init__(self, folder: Path, shapes: Shapes) -> None:
        self._entries = read_entries(folder)
        _check(self._entries, shapes)
        self._files: dict[Path, Any] = {}

    def read(self, name: str) -> Tensor:
        """See TensorSource."""
        path = self._entries[name].file
        try:
            if path not in self._files:
                self._files[path] = safe_open(path, framework="pt")
            tensor: Tensor = self._files[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        return tensor


class DummySource:
    """Numbers drawn from normal(0, `spread`), the same wherever they are made; norms are 1 and biases 0."""

    def __init__(self, shapes: Shapes, spread: float, device: torch.device) -> None:
        """Make them on `device`: billions of numbers take a CPU minutes."""
        self._shapes = shapes
        block = torch.empty(_BLOCK).normal_(0, spread, generator=torch.Generator().manual_seed(0))
        self._block = block.to(device)

    def read(self, name: str) -> Tensor:
        """See TensorSource."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.full(shape, float(name.endswith("norm.weight")))
        tensor = torch.empty(shape, device=self._block.device)
        # Where in the block a tensor begins follows from its name.
        start = zlib.crc32(name.encode()) % _BLOCK
        block, flat = self._block.roll(-start), tensor.view(-1)
        for at in range(0, len(flat), _BLOCK):
            flat[at : at + _BLOCK] = block[: len(flat) - at]
        return tensor


def _check(entries: Mapping[str, TensorEntry], shapes: Shapes) -> None:
    if missing := sorted(shapes.keys() - entries.keys()):
        raise ConfigError(f"the model's weights lack {missing[0]}{_more(missing)}")
    # Old checkpoints carry the rotary frequencies; a tied model may carry its embedding a second time.
    unexpected = sorted(
        name
        for name in entries.keys() - shapes.keys()
        if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq")
    )
    if unexpected:
        raise ConfigError(f"the model's weights hold an unexpected {unexpected[0]}{_more(unexpected)}")
    for name, shape in shapes.items():
        entry = entries[name]
        if entry.shape != shape:
            raise ConfigError(f"{name} has shape {list(entry.shape)}, but config.json says {list(shape)}")
        if entry.dtype not in _FLOAT_DTYPES:
            raise ConfigError(f"{name} is {entry.dtype}; only {', '.join(_FLOAT_DTYPES)} are supported")


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
