"""What a model folder says, and which folders are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigError
from common.kv.layout import KVLayout
from common.model import spec as spec_module
from common.model.spec import load_spec, resolve_dtype
from tests.tiny import write_tiny_model


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def edit(folder: Path, changes: dict[str, Any], name: str = "config.json") -> None:
    path = folder / name
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "absent"}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_sizes_are_those_of_the_config(tiny_model: Path) -> None:
    spec = load_spec(tiny_model)
    assert (spec.hidden, spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == (64, 2, 4, 2, 16)
    assert (spec.vocab_size, spec.context_length, spec.dtype) == (320, 512, "float32")
    assert spec.kv_layout(16, "bfloat16") == KVLayout(2, 16, 2, 16, "bfloat16")


def test_settings_of_older_configs_mean_the_same(folder: Path) -> None:
    expected = load_spec(folder)
    edit(folder, {"rope_parameters": "absent", "rope_theta": 10000.0, "rope_scaling": None})
    edit(folder, {"dtype": "absent", "torch_dtype": "float32", "head_dim": "absent"})
    assert load_spec(folder) == expected


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (2, 1, (2,)),
        ([2, 0], 1, (2, 0)),
        (0, 1, (0,)),
        (None, 1, (1,)),
        (None, [1, 2], (1, 2)),
        (None, None, ()),
    ],
)
def test_eos_comes_from_generation_config_else_config(
    folder: Path, generation: object, config: object, expected: tuple[int, ...]
) -> None:
    edit(folder, {"eos_token_id": generation}, "generation_config.json")
    edit(folder, {"eos_token_id": config})
    assert load_spec(folder).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not supported"),
        ({"architectures": "absent"}, "architecture None is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor is None"),
        ({"rope_parameters": "absent", "rope_scaling": {"type": "linear", "factor": 2}}, "'linear'"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_size": "absent"}, "hidden_size is None"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_key_value_heads": 3}, "do not fit 3 KV heads"),
        ({"dtype": "float8"}, "dtype 'float8'"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder, changes)
    with pytest.raises(ConfigError, match=message) as caught:
        load_spec(folder)
    assert "\n" not in str(caught.value)


MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}


@pytest.mark.parametrize(
    "changes",
    [
        MISTRAL | {"sliding_window": 256},
        {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192},  # 4096 unless it is null
        QWEN2 | {"sliding_window": 256, "use_sliding_window": True, "max_window_layers": 1},
        QWEN2
        | {"sliding_window": 256, "use_sliding_window": True}
        | {"layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_a_sliding_window_below_the_context_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder, changes)
    with pytest.raises(ConfigError, match=r"a sliding_window of .* is not supported"):
        load_spec(folder)


@pytest.mark.parametrize(
    "changes",
    [
        MISTRAL | {"sliding_window": 512},
        MISTRAL | {"sliding_window": None},
        QWEN2 | {"sliding_window": 256, "use_sliding_window": False},
        QWEN2 | {"sliding_window": 256, "use_sliding_window": True, "max_window_layers": 2},
        {"sliding_window": 256},  # no setting of Llama
    ],
)
def test_a_sliding_window_that_hides_nothing_is_ignored(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder, changes)
    assert load_spec(folder).context_length == 512


def test_a_config_alone_is_a_dummy_model(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        load_spec(tmp_path)
    dummy = load_spec(tmp_path, "dummy")
    assert dummy.eos_token_ids == (2,)
    assert replace(dummy, fingerprint="") == replace(load_spec(folder), fingerprint="")
    assert dummy.fingerprint != load_spec(folder).fingerprint
    edit(tmp_path, {"rms_norm_eps": 1e-5})
    assert load_spec(tmp_path, "dummy").fingerprint != dummy.fingerprint


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_a_broken_config_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json is not"):
        load_spec(folder)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no model folder"):
        load_spec(tmp_path / "nothing")


def test_weights_cut_short_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    for length in (0, 5, 100, path.stat().st_size - 1):
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(ConfigError, match="is not a whole safetensors file"):
            load_spec(folder)


def test_fingerprint_is_of_the_contents(tiny_model: Path, folder: Path, tmp_path: Path) -> None:
    expected = load_spec(tiny_model).fingerprint
    assert load_spec(folder).fingerprint == expected
    assert load_spec(write_tiny_model(tmp_path / "again")).fingerprint == expected


def test_fingerprint_is_the_same_for_one_file_or_several(folder: Path) -> None:
    expected = load_spec(folder).fingerprint
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert load_spec(folder).fingerprint == expected


def _scale_one_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"].mul_(1.01)


def test_fingerprint_tells_models_of_one_shape_apart(folder: Path, tmp_path: Path) -> None:
    seen = {load_spec(folder).fingerprint, load_spec(write_tiny_model(tmp_path / "b", seed=1)).fingerprint}
    edit_weights(folder, _scale_one_tensor)
    seen.add(load_spec(folder).fingerprint)
    edit(folder, {"rms_norm_eps": 1e-5})
    seen.add(load_spec(folder).fingerprint)
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("flags", "own", "expected"),
    [
        ({"avx512_bf16"}, "bfloat16", "bfloat16"),
        ({"amx_bf16"}, "bfloat16", "bfloat16"),
        ({"asimd", "bf16"}, "bfloat16", "bfloat16"),
        ({"avx512f", "avx2"}, "bfloat16", "float32"),
        ({"avx512_bf16"}, "float16", "float32"),
        (set(), "float32", "float32"),
    ],
)
def test_auto_dtype_is_the_models_own_where_it_is_native(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, flags: set[str], own: str, expected: str
) -> None:
    monkeypatch.setattr(spec_module, "_cpu_flags", lambda: frozenset(flags))
    spec = replace(load_spec(tiny_model), dtype=own)
    assert resolve_dtype("auto", spec) == expected
    assert resolve_dtype("float16", spec) == "float16"
