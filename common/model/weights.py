"""The weights of a Llama model: streamed from safetensors into fused tensors.

Knows no arithmetic. One tensor at a time is read from the (memory-mapped) files, so that loading takes no
more memory than the weights themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import ConfigError
from common.kv.pool import TORCH_DTYPES
from common.model.checkpoint import TensorEntry, read_entries
from common.model.spec import ModelSpec

_FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; projections as [out, in]."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden], q then k then v
    o: Tensor  # [hidden, heads * head_dim]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden], gate then up
    down: Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All layers, and what is before and after them."""

    embed: Tensor  # [vocab_size, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab_size, hidden], `embed` itself when they are tied


def load_weights(folder: Path, spec: ModelSpec, dtype: str, device: torch.device) -> ModelWeights:
    """Read the folder's safetensors as `dtype` onto `device`.

    Raises:
        ConfigError: a tensor is missing, unexpected, of another shape, or not of floats.
    """
    entries = read_entries(folder)
    weights = _allocate(spec, TORCH_DTYPES[dtype], device)
    targets = _targets(spec, weights)
    _check(entries, targets, spec)
    for file in sorted({entry.file for entry in entries.values()}):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    if name in targets:
                        targets[name].copy_(tensors.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from error
    return weights


def _allocate(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    layers = tuple(
        LayerWeights(
            input_norm=empty(spec.hidden),
            qkv=empty((spec.heads + 2 * spec.kv_heads) * spec.head_dim, spec.hidden),
            o=empty(spec.hidden, spec.heads * spec.head_dim),
            post_norm=empty(spec.hidden),
            gate_up=empty(2 * spec.intermediate, spec.hidden),
            down=empty(spec.hidden, spec.intermediate),
        )
        for _ in range(spec.layers)
    )
    embed = empty(spec.vocab_size, spec.hidden)
    lm_head = embed if spec.tie_word_embeddings else empty(spec.vocab_size, spec.hidden)
    return ModelWeights(embed=embed, layers=layers, norm=empty(spec.hidden), lm_head=lm_head)


def _targets(spec: ModelSpec, weights: ModelWeights) -> dict[str, Tensor]:
    """Map a checkpoint's tensor names to (parts of) our tensors."""
    targets = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.norm}
    if not spec.tie_word_embeddings:
        targets["lm_head.weight"] = weights.lm_head
    kv_rows = spec.kv_heads * spec.head_dim
    for i, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split_with_sizes((spec.heads * spec.head_dim, kv_rows, kv_rows))
        gate, up = layer.gate_up.chunk(2)
        parts = {
            "input_layernorm": layer.input_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.o,
            "post_attention_layernorm": layer.post_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        targets |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in parts.items()}
    return targets


def _check(entries: dict[str, TensorEntry], targets: dict[str, Tensor], spec: ModelSpec) -> None:
    if missing := sorted(targets.keys() - entries.keys()):
        raise ConfigError(f"the model's weights lack {missing[0]}{_more(missing)}")
    # Old checkpoints carry the rotary frequencies; a tied model may carry its embedding a second time.
    known = {"lm_head.weight"} if spec.tie_word_embeddings else set()
    unexpected = sorted(
        name for name in entries.keys() - targets.keys() - known if not name.endswith("rotary_emb.inv_freq")
    )
    if unexpected:
        raise ConfigError(f"the model's weights hold an unexpected {unexpected[0]}{_more(unexpected)}")
    for name, target in targets.items():
        entry = entries[name]
        if entry.shape != tuple(target.shape):
            raise ConfigError(
                f"{name} has shape {list(entry.shape)}, but config.json says {list(target.shape)}"
            )
        if entry.dtype not in _FLOAT_DTYPES:
            raise ConfigError(f"{name} is {entry.dtype}; only {', '.join(_FLOAT_DTYPES)} are supported")


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
