"""The decoder: token ids of a step in, logits out, keys and values in the pool.

Knows no request, no schedule and no sampling. The tokens of all requests of a step are one flat dimension;
which token is whose only the attention backend needs to know.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionInputs
from common.attention.sdpa import SdpaAttention
from common.kv.pool import TORCH_DTYPES, KVPool
from common.model.layers import mlp, rms_norm, rope_table, rotate
from common.model.spec import ModelSpec
from common.model.weights import LayerWeights, ModelWeights, load_weights


class Decoder:
    """A Llama model over a paged KV pool."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, attention: AttentionBackend, dtype: str
    ) -> None:
        self.spec = spec
        self._weights = weights
        self._attention = attention
        table = rope_table(spec.head_dim, spec.rope_theta, spec.context_length, TORCH_DTYPES[dtype])
        self._rope = table.to(weights.embed.device)  # [context_length, 2, head_dim]

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, positions: Tensor, inputs: AttentionInputs, logits_indices: Tensor
    ) -> Tensor:
        """Compute one step.

        Args:
            input_ids: [tokens] i64.
            positions: [tokens] i64, each below the context length.
            inputs: where the tokens' KV is and goes.
            logits_indices: [n] i64, the tokens whose logits are wanted.

        Returns:
            [n, vocab_size] f32, an inference tensor (in-place changes need `torch.inference_mode` too).
        """
        self._attention.plan(inputs)
        cos, sin = self._rope.index_select(0, positions).unsqueeze(2).unbind(1)
        hidden = F.embedding(input_ids, self._weights.embed)
        for index, layer in enumerate(self._weights.layers):
            hidden = hidden + self._attend(index, layer, hidden, cos, sin)
            normed = rms_norm(hidden, layer.post_norm, self.spec.rms_eps)
            hidden = hidden + mlp(normed, layer.gate_up, layer.down)
        wanted = rms_norm(hidden.index_select(0, logits_indices), self._weights.norm, self.spec.rms_eps)
        return F.linear(wanted, self._weights.lm_head).float()

    def _attend(self, index: int, layer: LayerWeights, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, kv_heads = self.spec.heads, self.spec.kv_heads
        qkv = F.linear(rms_norm(hidden, layer.input_norm, self.spec.rms_eps), layer.qkv)
        qkv = qkv.view(-1, heads + 2 * kv_heads, self.spec.head_dim)
        qk, v = qkv.split_with_sizes((heads + kv_heads, kv_heads), 1)
        q, k = rotate(qk, cos, sin).split_with_sizes((heads, kv_heads), 1)
        out = self._attention.forward(index, q, k, v)
        return F.linear(out.reshape(-1, heads * self.spec.head_dim), layer.o)


def load_decoder(folder: Path, spec: ModelSpec, dtype: str, pool: KVPool) -> Decoder:
    """Load a folder's weights onto the pool's device, with the reference attention over the pool.

    Raises:
        ConfigError: as `load_weights`.
    """
    weights = load_weights(folder, spec, dtype, pool.device)
    return Decoder(spec, weights, SdpaAttention(pool, spec.heads), dtype)
