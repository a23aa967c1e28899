"""The decoder: token ids of a step in, logits out, keys and values in the pool.

Knows no request, no schedule and no sampling. The tokens of all requests of a step are one flat dimension;
which token is whose only the attention backend needs to know. What is computed between matrix products, and
how, is the business of `LayerOps`.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionInputs
from common.kv.pool import TORCH_DTYPES, KVPool
from common.model.ops import LayerOps, TorchOps
from common.model.rotary import rope_frequencies, rope_table
from common.model.sources import DummySource, SafetensorsSource
from common.model.spec import ModelSpec
from common.model.weights import LayerWeights, ModelWeights, load_weights, tensor_shapes


class Decoder:
    """A model of the Llama family (Llama, Mistral, Qwen2, Qwen3) over a paged KV pool."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, attention: AttentionBackend, ops: LayerOps
    ) -> None:
        self.spec = spec
        self.attention = attention
        self._weights = weights
        self._ops = ops

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and logits."""
        return self._weights.embed.dtype

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        inputs: AttentionInputs,
        logits_indices: Tensor | None,
        logits_out: Tensor | None = None,
    ) -> Tensor:
        """Compute one step.

        Args:
            input_ids: [tokens] i64.
            inputs: the tokens' positions, each below the context length, and where their KV is and goes.
            logits_indices: [n] i64, the tokens whose logits are wanted; None is all.
            logits_out: [n, vocab_size] of `dtype` to write them to.

        Returns:
            [n, vocab_size] of `dtype`, an inference tensor: in-place changes need `torch.inference_mode`.
        """
        return self.logits(self.hidden(input_ids, inputs, logits_indices), logits_out)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits [n, vocab_size] of what `hidden` returned, or of some of its rows."""
        return self._weights.lm_head(hidden, out)

    @torch.inference_mode()
    def hidden(self, input_ids: Tensor, inputs: AttentionInputs, logits_indices: Tensor | None) -> Tensor:
        """Compute one step up to its logits; see `forward`. Returns [n, hidden]."""
        ops, weights = self._ops, self._weights
        self.attention.plan(inputs)
        ops.plan(inputs)
        residual = F.embedding(input_ids, weights.embed)
        x = ops.norm(residual, weights.layers[0].input_norm)
        norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, norms, strict=True)):
            x = self._attend(index, layer, x)
            if logits_indices is not None and next_norm is weights.norm:
                # Keys and values of all tokens are there: what is left is of those that a token is drawn for.
                x, residual = x.index_select(0, logits_indices), residual.index_select(0, logits_indices)
            x, residual = ops.project_norm(layer.o, x, residual, layer.post_norm)
            x, residual = ops.project_norm(layer.down, ops.gated(layer.gate_up, x), residual, next_norm)
        return x

    def _attend(self, index: int, layer: LayerWeights, x: Tensor) -> Tensor:
        spec = self.spec
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        q, k, v = self._ops.rotate_append(index, self._ops.product(layer.qkv, x), norms)
        return self.attention.forward(index, q, k, v).reshape(-1, spec.heads * spec.head_dim)


def read_weights(
    folder: Path, spec: ModelSpec, dtype: str, device: torch.device, load_format: str
) -> ModelWeights:
    """Read a folder's weights onto a device, or make random ones where `load_format` is "dummy".

    Raises:
        ConfigError: the weights are not those of a model of this spec.
    """
    shapes = tensor_shapes(spec)
    source = (
        DummySource(shapes, spec.initializer_range, device)
        if load_format == "dummy"
        else SafetensorsSource(folder, shapes)
    )
    return load_weights(source, spec, dtype, device)


def make_rope(spec: ModelSpec, dtype: str, device: torch.device) -> Tensor:
    """Return the model's rotary table on a device, [context_length, 2, head_dim]."""
    frequencies = rope_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
    return rope_table(frequencies, spec.context_length, TORCH_DTYPES[dtype]).to(device)


def make_decoder(
    spec: ModelSpec,
    weights: ModelWeights,
    dtype: str,
    pool: KVPool,
    attention: AttentionBackend,
    *,
    fused: bool,
) -> Decoder:
    """Put a decoder together; `fused` where the pool is on a GPU and its kernels are wanted."""
    rope = make_rope(spec, dtype, pool.device)
    ops: LayerOps
    if fused:
        from common.model.fused_ops import FusedOps  # Triton is part of torch's CUDA builds alone

        ops = FusedOps(pool, rope, spec.rms_eps)
    else:
        ops = TorchOps(pool, rope, spec.rms_eps)
    return Decoder(spec, weights, attention, ops)
