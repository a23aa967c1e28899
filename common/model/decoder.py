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
from common.model.layers import mlp, rope_frequencies, rope_table, rotate
from common.model.sources import DummySource, SafetensorsSource
from common.model.spec import ModelSpec
from common.model.weights import LayerWeights, ModelWeights, load_weights, tensor_shapes


class Decoder:
    """A model of the Llama family (Llama, Mistral, Qwen2, Qwen3) over a paged KV pool."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, attention: AttentionBackend, dtype: str
    ) -> None:
        self.spec = spec
        self._weights = weights
        self._attention = attention
        frequencies = rope_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
        table = rope_table(frequencies, spec.context_length, TORCH_DTYPES[dtype])
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
            hidden = hidden + mlp(self._norm(hidden, layer.post_norm), layer.gate_up, layer.down)
        wanted = self._norm(hidden.index_select(0, logits_indices), self._weights.norm)
        return self._weights.lm_head(wanted).float()

    def _attend(self, index: int, layer: LayerWeights, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, kv_heads = self.spec.heads, self.spec.kv_heads
        qkv = layer.qkv(self._norm(hidden, layer.input_norm))
        qkv = qkv.view(-1, heads + 2 * kv_heads, self.spec.head_dim)
        qk, v = qkv.split_with_sizes((heads + kv_heads, kv_heads), 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split_with_sizes((heads, kv_heads), 1)
            qk = torch.cat((self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)), 1)
        q, k = rotate(qk, cos, sin).split_with_sizes((heads, kv_heads), 1)
        out = self._attention.forward(index, q, k, v)
        return layer.o(out.reshape(-1, heads * self.spec.head_dim))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.spec.rms_eps)


def load_decoder(
    folder: Path, spec: ModelSpec, dtype: str, pool: KVPool, load_format: str = "auto"
) -> Decoder:
    """Load a folder's weights onto the pool's device, with the reference attention over the pool.

    Args:
        load_format: "dummy" for random weights instead.

    Raises:
        ConfigError: the weights are not those of a model of this spec.
    """
    shapes = tensor_shapes(spec)
    source = (
        DummySource(shapes, spec.initializer_range)
        if load_format == "dummy"
        else SafetensorsSource(folder, shapes)
    )
    weights = load_weights(source, spec, dtype, pool.device)
    return Decoder(spec, weights, SdpaAttention(pool, spec.heads), dtype)
