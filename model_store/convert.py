"""Convert a GGUF file into a model folder: safetensors, tokenizer, chat template, settings.

Run by `store.py` as a process: python -m model_store.convert GGUF FOLDER. Knows no cache and no network.
Tensors are dequantized and written one after the other; they keep every bit of what dequantization gives.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, LlamaFileType, ReaderTensor
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from common.errors import ConfigError
from common.model.rotary import rope_frequencies
from common.model.spec import RopeScaling
from terminal.progress import progress

# Mistral's files call themselves llama: without a sliding window there is no difference.
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
# What a model is made for, where its file is not quantized.
_FILE_DTYPES = {LlamaFileType.ALL_F32: "float32", LlamaFileType.MOSTLY_F16: "float16"}
_EXACT_DTYPES = {GGMLQuantizationType.F16: torch.float16, GGMLQuantizationType.BF16: torch.bfloat16}
_SHARD_BYTES = 2**30


class _File:
    """The file's settings by name, and its tensors."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = str(self.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise ConfigError(
                f"architecture {self.architecture} is not supported, only {', '.join(_ARCHITECTURES)}"
            )

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting; a name with a dot before it is one of the architecture."""
        field = self._reader.get_field(f"{self.architecture}{name}" if name.startswith(".") else name)
        return default if field is None else field.contents()

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ConfigError(f"the file does not say {self.architecture}{name}")
        return value


def _config(file: _File) -> dict[str, Any]:
    heads, hidden = file.need(".attention.head_count"), file.need(".embedding_length")
    rope = {"rope_type": "default", "rope_theta": file.get(".rope.freq_base", 10000.0)}
    head_dim = file.get(".attention.key_length", hidden // heads)
    if (scaling := file.get(".rope.scaling.type", "none")) != "none":
        raise ConfigError(f"a model with rope scaling {scaling!r} is not supported")
    if _ROPE_FACTORS in file.tensors:
        rope |= _llama3(_values(file.tensors[_ROPE_FACTORS]), head_dim, rope["rope_theta"])
    context, window = file.need(".context_length"), file.get(".attention.sliding_window")
    if window and window < context:
        raise ConfigError(
            f"a sliding window of {window} tokens below the context of {context} is not supported"
        )
    eos = [file.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    return {
        "architectures": [_ARCHITECTURES[file.architecture]],
        "model_type": file.architecture,
        "hidden_size": hidden,
        "intermediate_size": file.need(".feed_forward_length"),
        "num_hidden_layers": file.need(".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get(".attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": file.need(".attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "attention_bias": file.architecture != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(token for token in eos if token is not None)) or None,
        "dtype": _FILE_DTYPES.get(file.get("general.file_type"), "bfloat16"),
    }


def _llama3(factors: Tensor, head_dim: int, theta: float) -> dict[str, Any]:
    """Find the scaling behind a file's factors: Llama 3.1's, whose other numbers never changed so far."""
    scaling = RopeScaling(float(factors.max()), 1.0, 4.0, 8192)
    expected = rope_frequencies(head_dim, theta, None) / rope_frequencies(head_dim, theta, scaling)
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-3):
        raise ConfigError(f"the rotary factors in {_ROPE_FACTORS} are not those of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context_length,
    }


def _values(tensor: ReaderTensor) -> Tensor:
    values = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32))
    return values.to(_EXACT_DTYPES.get(tensor.tensor_type, torch.float32))


def _convert_tensor(tensor: ReaderTensor, config: dict[str, Any]) -> tuple[str, Tensor]:
    """Return a tensor with its name in a safetensors checkpoint."""
    stem, _, kind = tensor.name.rpartition(".")
    values = _values(tensor)
    if not stem.startswith("blk."):
        if stem not in _NAMES:
            raise ConfigError(f"the file holds an unexpected tensor {tensor.name}")
        return f"{_NAMES[stem]}.{kind}", values
    _, index, part = stem.split(".", 2)
    if part not in _LAYER_NAMES:
        raise ConfigError(f"the file holds an unexpected tensor {tensor.name}")
    if config["model_type"] == "llama" and part in ("attn_q", "attn_k"):
        # llama.cpp rotates neighbours where transformers rotates halves: undo its change of order.
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        values = values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    return f"model.layers.{index}.{_LAYER_NAMES[part]}.{kind}", values


def _write_weights(file: _File, config: dict[str, Any], folder: Path) -> None:
    """Write shards of about `_SHARD_BYTES`, which is what this holds in memory."""
    shard: dict[str, Tensor] = {}
    shards: dict[str, list[str]] = {}

    def write() -> None:
        name = f"model-{len(shards) + 1:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        shards[name] = list(shard)
        shard.clear()

    tensors = [tensor for name, tensor in file.tensors.items() if name != _ROPE_FACTORS]
    # Shown on stdout, as stderr is kept for what may go wrong.
    with progress("converting", len(tensors), sys.stdout) as shown:
        for tensor in tensors:
            name, shard[name] = _convert_tensor(tensor, config)
            shown.advance()
            if sum(values.nbytes for values in shard.values()) >= _SHARD_BYTES:
                write()
    if shard:
        write()
    if len(shards) == 1:
        (folder / next(iter(shards))).rename(folder / "model.safetensors")
    else:
        places = {name: shard_name for shard_name, names in shards.items() for name in names}
        _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def convert(path: Path, folder: Path) -> None:
    """Write `folder`, which is made here, from a GGUF file.

    Raises:
        ConfigError: the file is broken, or holds what Baton does not compute.
    """
    try:
        file = _File(path)
        config = _config(file)
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise ConfigError(f"{path.name} is not a whole GGUF file of a model: {error}") from error
    folder.mkdir()
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    _write_weights(file, config, folder)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except ConfigError as problem:
        sys.exit(str(problem))
