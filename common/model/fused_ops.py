"""The pointwise work of a layer in one kernel each, on GPUs (LayerOps of ops.py).

The kernels are Triton's, which torch's CUDA builds bring along; they round where the plain operations do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.attention.base import AttentionInputs
from common.kernels.activation import silu_mul
from common.kernels.norm import add_rms_norm, rms_norm
from common.kernels.rotary import rotate_append
from common.kernels.skinny import can_multiply, gated, product
from common.kv.pool import KVPool
from common.model.linear import Linear
from common.model.ops import Norms

_ADDED_BY_CUBLAS = 1024  # tokens; below, the sum costs nothing


class FusedOps:
    """LayerOps in fused kernels."""

    def __init__(self, pool: KVPool, rope: Tensor, eps: float) -> None:
        """See TorchOps."""
        self._kv_heads, self._head_dim = pool.layout.kv_heads, pool.layout.head_dim
        self._pool = pool.data.unbind(0)
        self._rope = rope
        self._eps = eps
        self._positions = self._cache_loc = torch.empty(0)
        self._keep_k = False

    def plan(self, inputs: AttentionInputs) -> None:
        """See LayerOps."""
        self._positions, self._cache_loc = inputs.positions, inputs.out_cache_loc
        # Decoding reads keys from the pool alone; prompts may read what is given to attention.
        self._keep_k = inputs.num_decode < len(inputs.extend_lens_cpu)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """See LayerOps."""
        return rms_norm(x, weight, self._eps)

    def project_norm(
        self, linear: Linear, x: Tensor, residual: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See LayerOps; `residual` becomes the sum."""
        if len(x) >= _ADDED_BY_CUBLAS and linear.bias is None:
            # A product adds for nothing what the norm would have to read and write again.
            residual.addmm_(x, linear.weight.t())
            return self.norm(residual, weight), residual
        return add_rms_norm(self.product(linear, x), residual, weight, self._eps), residual

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        """See LayerOps; [parts, tokens, out] f32 where `x` is a few tokens."""
        if self._is_skinny(linear, x):
            return product(x, linear.weight)
        return linear(x)

    def gated(self, gate_up: Linear, x: Tensor) -> Tensor:
        """See LayerOps."""
        if self._is_skinny(gate_up, x):
            return gated(x, gate_up.weight)
        return silu_mul(gate_up(x))

    def rotate_append(self, layer: int, qkv: Tensor, norms: Norms | None) -> tuple[Tensor, Tensor, Tensor]:
        """See LayerOps. In a step that only decodes k and v are the queries' buffer: nobody reads them."""
        heads = qkv.shape[-1] // self._head_dim - 2 * self._kv_heads
        q, k = rotate_append(
            qkv,
            self._rope,
            self._positions,
            self._cache_loc,
            self._pool[layer],
            norms,
            self._eps,
            heads,
            keep_k=self._keep_k,
        )
        if k is None:
            return q, q, q
        v = qkv.view(len(qkv), -1, self._head_dim)[:, heads + self._kv_heads :]
        return q, k, v

    def _is_skinny(self, linear: Linear, x: Tensor) -> bool:
        """A step that extends wants v as it is, and has more tokens in general."""
        return not self._keep_k and linear.bias is None and can_multiply(len(x), linear.weight)
