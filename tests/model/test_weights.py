"""Weights are loaded whole and exact, a tensor at a time, or refused by the tensor's name."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file

from common.errors import ConfigError
from common.model.linear import Linear
from common.model.sources import DummySource, SafetensorsSource
from common.model.spec import load_spec
from common.model.weights import ModelWeights, load_weights, tensor_shapes

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def load(folder: Path, dtype: str = "float32") -> ModelWeights:
    spec = load_spec(folder)
    return load_weights(SafetensorsSource(folder, tensor_shapes(spec)), spec, dtype, CPU)


def matrix(linear: Linear, num_inputs: int) -> torch.Tensor:
    """The weight of a layer without bias, by what it makes of unit vectors."""
    return linear(torch.eye(num_inputs)).T


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_a_packed_layer_is_a_linear_layer(dtype: torch.dtype, tolerance: float, num_tokens: int) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 50, generator=draw).to(dtype)
    bias = torch.randn(70, generator=draw).to(dtype)
    x = torch.randn(num_tokens, 50, generator=draw).to(dtype)
    expected = F.linear(x.double(), weight.double(), bias.double()).to(dtype)
    torch.testing.assert_close(Linear(weight, bias)(x), expected, rtol=tolerance, atol=tolerance)


def test_fused_weights_hold_the_parts_in_order(tiny_model: Path) -> None:
    tensors = load_file(tiny_model / "model.safetensors")
    layer = load(tiny_model).layers[1]
    q, k, v, gate, up = (
        tensors[f"model.layers.1.{name}_proj.weight"]
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    )
    assert torch.equal(matrix(layer.qkv, 64), torch.cat((q, k, v)))
    assert torch.equal(matrix(layer.gate_up, 64), torch.cat((gate, up)))


class OneAtATime:
    """A source that fails when somebody still holds a tensor that it gave before."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._given: list[weakref.ref[torch.Tensor]] = []

    def read(self, name: str) -> torch.Tensor:
        assert all(tensor() is None for tensor in self._given)
        tensor = self._tensors.pop(name).clone()  # KeyError for a second time
        self._given.append(weakref.ref(tensor))
        return tensor


def test_tensors_are_read_once_and_let_go_one_by_one(tiny_model: Path) -> None:
    tensors = load_file(tiny_model / "model.safetensors")
    load_weights(OneAtATime(tensors), load_spec(tiny_model), "bfloat16", CPU)
    assert not tensors


def test_several_files_load_like_one(tiny_model: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_model / "model.safetensors")
    shutil.copy(tiny_model / "config.json", tmp_path)
    names = sorted(tensors)
    files = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    one, several = load(tiny_model), load(tmp_path)
    assert torch.equal(one.embed, several.embed)
    assert torch.equal(matrix(one.lm_head, 64), matrix(several.lm_head, 64))
    for a, b in zip(one.layers, several.layers, strict=True):
        assert torch.equal(matrix(a.qkv, 64), matrix(b.qkv, 64))
        assert torch.equal(matrix(a.down, 128), matrix(b.down, 128))


def test_an_index_that_names_a_missing_file_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with pytest.raises(ConfigError, match=r"cannot read .*x\.safetensors"):
        SafetensorsSource(tmp_path, tensor_shapes(load_spec(tiny_model)))


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
        load(folder)


def test_rotary_frequencies_and_a_second_tied_embedding_are_ignored(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    weights = load(folder)
    assert torch.equal(matrix(weights.lm_head, 64), weights.embed)


def test_dummy_weights_are_the_same_everywhere_and_as_widely_spread_as_before_training() -> None:
    shapes = {
        "a.weight": (3000, 2000),
        "b.weight": (3000, 2000),
        "q_norm.weight": (64,),
        "q_proj.bias": (64,),
    }
    source, again = DummySource(shapes, 0.05, CPU), DummySource(shapes, 0.05, CPU)
    tensors = {name: source.read(name) for name in shapes}
    assert all(torch.equal(tensors[name], again.read(name)) for name in reversed(shapes))
    a, b = tensors["a.weight"], tensors["b.weight"]
    assert abs(float(a.mean())) < 1e-3
    assert abs(float(a.std()) - 0.05) < 1e-3
    assert not torch.equal(a, b)
    assert len(torch.unique(a, dim=0)) == 3000
    assert torch.equal(tensors["q_norm.weight"], torch.ones(64))
    assert torch.equal(tensors["q_proj.bias"], torch.zeros(64))
