"""Write a GGUF file of a tiny model, as llama.cpp's convert_hf_to_gguf.py does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(
    path: Path, folder: Path, *, quantize: gguf.GGMLQuantizationType | None = None, **settings: Any
) -> Path:
    """Write `path` from a tiny model's folder.

    Args:
        quantize: the type of all matrices; None keeps float32.
        settings: more settings of the architecture; those given as None are left out.
    """
    config = AutoConfig.from_pretrained(folder)
    arch = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if quantize is None else gguf.LlamaFileType.MOSTLY_Q8_0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    for name, value in settings.items():
        writer.add_string(f"{arch}.{name}", value)
    _add_tokenizer(writer, folder, config.eos_token_id)
    if config.rope_parameters["rope_type"] == "llama3":
        plain = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    for name, tensor in load_file(folder / "model.safetensors").items():
        if arch == "llama" and ".q_proj." in name:
            tensor = _permute(tensor, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            tensor = _permute(tensor, config.num_key_value_heads)
        _add_tensor(writer, name, tensor.numpy(), quantize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _permute(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's LlamaModel.permute."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
        .contiguous()
    )


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray, quantize: gguf.GGMLQuantizationType | None
) -> None:
    stem, _, kind = name.rpartition(".")
    layer = ""
    if stem.startswith("model.layers."):
        index, stem = stem.removeprefix("model.layers.").split(".", 1)
        layer = f"blk.{index}."
    target = f"{layer}{_PARTS[stem]}.{kind}"
    if quantize is None or values.ndim == 1:
        writer.add_tensor(target, values)
    else:
        writer.add_tensor(target, gguf.quantize(values, quantize), raw_dtype=quantize)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, eos_token_id: int) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    special = {token["id"] for token in content["added_tokens"]}
    vocab = sorted(content["model"]["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for _, i in vocab]
    )
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_eos_token_id(eos_token_id)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
