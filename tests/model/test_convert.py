"""A GGUF file becomes the folder that it was made from, or is refused in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

from common.errors import ConfigError
from common.model.spec import load_spec
from model_store import convert as convert_module
from model_store.convert import convert
from tests.model.ggufs import write_gguf
from tests.model.test_families import LLAMA3
from tests.tiny import write_tiny_model

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"config_type": LlamaConfig},
    "llama3": {
        "config_type": LlamaConfig,
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192},
        "max_position_embeddings": 16384,
    },
    "qwen2": {"config_type": Qwen2Config, "tie_word_embeddings": True},
    "qwen3": {"config_type": Qwen3Config, "head_dim": 32},
}


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unquantized_file_becomes_the_model_that_it_was_made_from(family: str, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", **FAMILIES[family])
    convert(write_gguf(tmp_path / "model.gguf", source), tmp_path / "made")
    expected, spec = load_spec(source), load_spec(tmp_path / "made")
    assert spec.rms_eps == pytest.approx(expected.rms_eps)  # it is float32 in the file
    same = {name: getattr(expected, name) for name in ("rms_eps", "initializer_range", "fingerprint")}
    assert replace(spec, **same) == expected
    tensors, made = all_tensors(source), all_tensors(tmp_path / "made")
    assert tensors.keys() == made.keys()
    assert all(torch.equal(tensor, made[name]) for name, tensor in tensors.items())
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "made"))
    text = "<|im_start|>user\nthe quick brown fox 你好<|im_end|>"
    assert after.encode(text) == before.encode(text)
    assert after.chat_template == before.chat_template


def test_a_quantized_file_has_the_values_that_transformers_reads(tiny_model: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model, quantize=gguf.GGMLQuantizationType.Q8_0)
    convert(path, tmp_path / "made")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, made[name]) for name, tensor in expected.state_dict().items())
    assert load_spec(tmp_path / "made").dtype == "bfloat16"


def test_a_large_file_is_written_in_shards(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_module, "_SHARD_BYTES", 100_000)
    convert(write_gguf(tmp_path / "model.gguf", tiny_model), tmp_path / "made")
    assert len(list((tmp_path / "made").glob("model-*.safetensors"))) > 1
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made").state_dict()
    assert all(torch.equal(t, made[name]) for name, t in load_file(tiny_model / "model.safetensors").items())
    load_spec(tmp_path / "made")


def test_a_scaling_that_the_file_only_names_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model, **{"rope.scaling.type": "yarn"})
    with pytest.raises(ConfigError, match="rope scaling 'yarn' is not supported"):
        convert(path, tmp_path / "made")


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="architecture mamba is not supported, only llama, qwen2, qwen3"):
        convert(tmp_path / "model.gguf", tmp_path / "made")


@pytest.mark.parametrize("length", [0, 3, 20, 3000, 200_000])
def test_a_file_cut_short_is_refused(tiny_model: Path, tmp_path: Path, length: int) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ConfigError, match=r"model\.gguf is not a whole GGUF file") as caught:
        convert(path, tmp_path / "made")
    assert "\n" not in str(caught.value)
