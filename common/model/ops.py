"""The pointwise work of a layer, between its matrix products: plain operations of torch, on any device.

`fused_ops.py` does the same in one kernel each, on GPUs. The order of operations and the precision of each
step are those of `transformers` (models/llama/modeling_llama.py), which is the oracle of the tests. Knows no
weights' names, no request and no schedule.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from common.attention.base import AttentionInputs
from common.kv.pool import KVPool
from common.model.linear import Linear
from common.model.rotary import rotate

Norms = tuple[Tensor, Tensor]  # weights of the norms of queries and of keys, [head_dim] each


class LayerOps(Protocol):
    """What a decoder does between matrix products."""

    def plan(self, inputs: AttentionInputs) -> None:
        """Prepare what all layers share; called once a step."""
        ...

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x [tokens, width] normalized, times weight [width]."""
        ...

    def project_norm(
        self, linear: Linear, x: Tensor, residual: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return linear(x) + residual, normalized, and the sum; `residual` [tokens, width] may be changed."""
        ...

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        """Return linear(x) for `rotate_append`, which knows what shape it has."""
        ...

    def gated(self, gate_up: Linear, x: Tensor) -> Tensor:
        """Return silu(gate) * up, [tokens, width], of gate_up(x): gate, then up."""
        ...

    def rotate_append(self, layer: int, qkv: Tensor, norms: Norms | None) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize and rotate queries and keys, and write keys and values into the pool.

        Args:
            layer: index of the layer.
            qkv: of `product`, of width (heads + 2 * kv_heads) * head_dim.
            norms: of queries and keys, or None.

        Returns:
            q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim].
        """
        ...


class TorchOps:
    """LayerOps in plain operations."""

    def __init__(self, pool: KVPool, rope: Tensor, eps: float) -> None:
        """Args: the pool, `rope_table`'s [positions, 2, head_dim] on its device, and the norms' epsilon."""
        self._page_size = pool.layout.page_size
        self._kv_heads = pool.layout.kv_heads
        self._tokens = pool.data.view(
            pool.layout.layers, -1, pool.layout.kv_heads, pool.layout.head_dim
        ).unbind(0)
        self._rope = rope
        self._eps = eps
        self._cos = self._sin = self._written = torch.empty(0)

    def plan(self, inputs: AttentionInputs) -> None:
        """See LayerOps."""
        self._cos, self._sin = self._rope.index_select(0, inputs.positions).unsqueeze(2).unbind(1)
        loc = inputs.out_cache_loc
        k_tokens = loc + loc // self._page_size * self._page_size
        self._written = torch.cat((k_tokens, k_tokens + self._page_size))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """See LayerOps."""
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def project_norm(
        self, linear: Linear, x: Tensor, residual: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See LayerOps."""
        total = residual + linear(x)
        return self.norm(total, weight), total

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        """See LayerOps; [tokens, out]."""
        return linear(x)

    def gated(self, gate_up: Linear, x: Tensor) -> Tensor:
        """See LayerOps."""
        gate, up = gate_up(x).chunk(2, -1)
        return F.silu(gate).mul_(up)

    def rotate_append(self, layer: int, qkv: Tensor, norms: Norms | None) -> tuple[Tensor, Tensor, Tensor]:
        """See LayerOps."""
        kv_heads = self._kv_heads
        qkv = qkv.view(len(qkv), -1, self._rope.shape[-1])
        heads = qkv.shape[1] - 2 * kv_heads
        qk, v = qkv.split_with_sizes((heads + kv_heads, kv_heads), 1)
        if norms is not None:
            q, k = qk.split_with_sizes((heads, kv_heads), 1)
            qk = torch.cat((self.norm(q, norms[0]), self.norm(k, norms[1])), 1)
        q, k = rotate(qk, self._cos, self._sin).split_with_sizes((heads, kv_heads), 1)
        self._tokens[layer].index_copy_(0, self._written, torch.cat((k, v)))
        return q, k, v
