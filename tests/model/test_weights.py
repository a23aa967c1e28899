"""Weights are loaded whole and exact, or refused by the tensor's name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigError
from common.model.spec import load_spec
from common.model.weights import load_weights

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def test_fused_weights_hold_the_parts_in_order(tiny_model: Path) -> None:
    tensors = load_file(tiny_model / "model.safetensors")
    layer = load_weights(tiny_model, load_spec(tiny_model), "float32", CPU).layers[1]
    q, k, v, gate, up = (
        tensors[f"model.layers.1.{name}_proj.weight"]
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    )
    assert torch.equal(layer.qkv, torch.cat((q, k, v)))
    assert torch.equal(layer.gate_up, torch.cat((gate, up)))


def test_several_files_load_like_one(tiny_model: Path, tmp_path: Path) -> None:
    spec = load_spec(tiny_model)
    tensors = load_file(tiny_model / "model.safetensors")
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:9]}, tmp_path / "a.safetensors")
    save_file({name: tensors[name] for name in names[9:]}, tmp_path / "b.safetensors")
    one = load_weights(tiny_model, spec, "bfloat16", CPU)
    several = load_weights(tmp_path, spec, "bfloat16", CPU)
    assert torch.equal(one.lm_head, several.lm_head)
    assert all(torch.equal(a.qkv, b.qkv) for a, b in zip(one.layers, several.layers, strict=True))


def test_an_index_that_names_a_missing_file_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with pytest.raises(ConfigError, match=r"cannot read .*x\.safetensors"):
        load_weights(tmp_path, load_spec(tiny_model), "float32", CPU)


def _drop(tensors: Tensors) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight"]


def _add(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)


def _reshape(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(32)


def _quantize(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, r"lack model\.layers\.0\.mlp\.up_proj\.weight"),
        (_add, r"unexpected model\.layers\.0\.self_attn\.q_norm\.weight"),
        (_reshape, r"model\.norm\.weight has shape \[32\], but config\.json says \[64\]"),
        (_quantize, r"model\.norm\.weight is I8"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(
    tiny_model: Path, tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_weights(folder, load_spec(folder), "float32", CPU)


def test_rotary_frequencies_and_a_second_tied_embedding_are_ignored(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    weights = load_weights(folder, load_spec(folder), "float32", CPU)
    assert weights.lm_head is weights.embed
