"""The weights of a model: read a tensor at a time from a source, and fused as they are computed with.

Knows no arithmetic and no file format. A tensor is copied into its place and let go before the next is read,
so that loading takes the memory of the weights and of about one of them. (Tied embeddings are there twice: as
a table, and packed for the output.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.kv.pool import TORCH_DTYPES
from common.model.linear import Linear
from common.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # hidden -> (heads + 2 * kv_heads) * head_dim: q, k, v
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Linear  # heads * head_dim -> hidden
    post_norm: Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 * intermediate: gate, up
    down: Linear  # intermediate -> hidden


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All layers, and what is before and after them."""

    embed: Tensor  # [vocab_size, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    lm_head: Linear  # hidden -> vocab_size


class TensorSource(Protocol):
    """Where tensors come from, by their names in a checkpoint."""

    def read(self, name: str) -> Tensor:
        """Return a tensor of the shape in `tensor_shapes`, of any floating type."""
        ...


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a model consists of, by their names in a checkpoint."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (spec.hidden,),
        "self_attn.q_proj.weight": (q, spec.hidden),
        "self_attn.k_proj.weight": (kv, spec.hidden),
        "self_attn.v_proj.weight": (kv, spec.hidden),
        "self_attn.o_proj.weight": (spec.hidden, q),
        "post_attention_layernorm.weight": (spec.hidden,),
        "mlp.gate_proj.weight": (spec.intermediate, spec.hidden),
        "mlp.up_proj.weight": (spec.intermediate, spec.hidden),
        "mlp.down_proj.weight": (spec.hidden, spec.intermediate),
    }
    if spec.qkv_bias:
        layer |= {f"self_attn.{x}_proj.bias": (rows,) for x, rows in (("q", q), ("k", kv), ("v", kv))}
    if spec.o_bias:
        layer["self_attn.o_proj.bias"] = (spec.hidden,)
    if spec.qk_norm:
        layer |= {f"self_attn.{x}_norm.weight": (spec.head_dim,) for x in "qk"}
    shapes = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden),
        "model.norm.weight": (spec.hidden,),
    }
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden)
    for i in range(spec.layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


class _Reader:
    """Fuses what a source gives, as `dtype` on `device`."""

    def __init__(
        self, source: TensorSource, spec: ModelSpec, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._source = source
        self._shapes = tensor_shapes(spec)
        self._dtype = dtype
        self._device = device

    def tensor(self, *names: str) -> Tensor:
        """Join tensors along their rows."""
        rows = [self._shapes[name][0] for name in names]
        joined = torch.empty((sum(rows), *self._shapes[names[0]][1:]), dtype=self._dtype, device=self._device)
        for name, part in zip(names, joined.split_with_sizes(rows), strict=True):
            part.copy_(self._source.read(name))
        return joined

    def optional(self, *names: str) -> Tensor | None:
        return self.tensor(*names) if names[0] in self._shapes else None

    def linear(self, prefix: str, names: Sequence[str]) -> Linear:
        bias = self.optional(*(f"{prefix}{name}.bias" for name in names))
        return Linear(self.tensor(*(f"{prefix}{name}.weight" for name in names)), bias)

    def layer(self, prefix: str) -> LayerWeights:
        return LayerWeights(
            input_norm=self.tensor(f"{prefix}input_layernorm.weight"),
            qkv=self.linear(f"{prefix}self_attn.", ("q_proj", "k_proj", "v_proj")),
            q_norm=self.optional(f"{prefix}self_attn.q_norm.weight"),
            k_norm=self.optional(f"{prefix}self_attn.k_norm.weight"),
            o=self.linear(f"{prefix}self_attn.", ("o_proj",)),
            post_norm=self.tensor(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self.linear(f"{prefix}mlp.", ("gate_proj", "up_proj")),
            down=self.linear(f"{prefix}mlp.", ("down_proj",)),
        )


def load_weights(source: TensorSource, spec: ModelSpec, dtype: str, device: torch.device) -> ModelWeights:
    """Read a model as `dtype` onto `device`, each tensor once."""
    reader = _Reader(source, spec, TORCH_DTYPES[dtype], device)
    embed = reader.tensor("model.embed_tokens.weight")
    return ModelWeights(
        embed=embed,
        layers=tuple(reader.layer(f"model.layers.{i}.") for i in range(spec.layers)),
        norm=reader.tensor("model.norm.weight"),
        lm_head=Linear(embed) if spec.tie_word_embeddings else reader.linear("", ("lm_head",)),
    )
