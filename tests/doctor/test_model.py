"""The model: each way in which its folder can be wrong, and what is not there yet."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from doctor.finding import Finding, Level
from model_store.store import find_model, resolve_model
from tests.doctor.look import find, find_one
from tests.model.ggufs import write_gguf

OF_FOLDER = ("config", "weights", "tokenizer")


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def change(path: Path, **values: Any) -> None:
    """Change a JSON file; None removes a key."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def levels(folder: Path) -> dict[str, Level]:
    return {check: find_one(check, folder).level for check in ("model", *OF_FOLDER)}


def assert_problem(finding: Finding, words: str) -> None:
    assert finding.level is Level.PROBLEM
    assert words in finding.found
    assert finding.remedy


def test_a_whole_folder_is_well(folder: Path) -> None:
    assert set(levels(folder).values()) == {Level.OK}
    assert find_one("config", folder).facts == {"dtype": "float32", "context_tokens": 512}
    size = (folder / "model.safetensors").stat().st_size
    assert find_one("weights", folder).facts == {"bytes": size}


def test_what_is_no_model_is_a_problem_of_model_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    for name, words in (
        ("no-such-name", "there is no model 'no-such-name'"),
        (str(tmp_path), "it has no config.json and no .gguf file"),
        (str(tmp_path / "notes.txt"), "is no model"),
    ):
        assert_problem(find_one("model", name), words)
        assert [find(check, name) for check in (*OF_FOLDER, "room")] == [[], [], [], []]


def test_a_folder_without_weights_is_a_problem(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert_problem(find_one("model", folder), "it has no *.safetensors file")
    assert find_one("model", folder, load_format="dummy").level is Level.OK
    assert find_one("weights", folder, load_format="dummy").level is Level.OK


def test_a_named_model_that_is_not_here_is_a_warning_and_nothing_is_fetched(tmp_path: Path) -> None:
    finding = find_one("model", "smollm2-135m", cache=str(tmp_path))
    assert finding.level is Level.WARNING
    assert "98 MB" in finding.found
    assert finding.remedy == "fetch it now: baton models pull smollm2-135m"
    assert find("config", "smollm2-135m", cache=str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_named_model_that_is_half_made_is_not_here(tmp_path: Path, tiny_model: Path) -> None:
    made = Path(shutil.copytree(tiny_model, tmp_path / "smollm2-135m"))
    sizes = {path.name: path.stat().st_size for path in made.iterdir()}
    (made / "baton-manifest.json").write_text(json.dumps(sizes))
    assert find_one("model", "smollm2-135m", cache=str(tmp_path)).level is Level.OK
    with (made / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    assert find_one("model", "smollm2-135m", cache=str(tmp_path)).level is Level.WARNING


def test_a_model_of_the_hub_is_looked_for_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    finding = find_one("model", "some-org/some-model")
    assert (finding.level, "it comes from the hub" in finding.found) == (Level.WARNING, True)


def test_a_gguf_file_is_here_once_it_is_converted(tiny_model: Path, tmp_path: Path) -> None:
    gguf, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    gguf.touch()
    assert_problem(find_one("model", gguf, cache=str(cache)), "it does not begin as one")
    write_gguf(gguf, tiny_model)
    finding = find_one("model", gguf, cache=str(cache))
    assert (finding.level, "it is converted at the first start" in finding.found) == (Level.WARNING, True)
    assert not cache.exists()
    made = resolve_model(str(gguf), lambda line: None, cache)
    assert find_model(str(gguf), cache) == made
    assert find_one("model", gguf, cache=str(cache)).found == f"{gguf} is in {made}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"auto_map": {"AutoModel": "own.Model"}}, "auto_map"),
    ],
)
def test_a_model_that_is_not_computed_is_a_problem(folder: Path, changes: dict[str, Any], words: str) -> None:
    change(folder / "config.json", **changes)
    assert_problem(find_one("config", folder), words)
    assert find("weights", folder) == []


def test_a_config_that_is_no_json_is_a_problem(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert_problem(find_one("config", folder), "is not JSON")


def test_an_answer_without_an_end_is_a_warning(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        change(folder / name, eos_token_id=None)
    finding = find_one("config", folder)
    assert (finding.level, "no eos_token_id" in finding.found) == (Level.WARNING, True)


def test_half_precision_on_a_cpu_without_it_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(folder / "config.json", dtype="bfloat16")
    monkeypatch.setattr("common.model.spec._cpu_flags", lambda: frozenset({"avx2"}))
    finding = find_one("config", folder)
    assert finding.level is Level.WARNING
    assert "it was made for bfloat16" in finding.found
    assert find_one("config", folder, dtype="bfloat16").level is Level.OK
    monkeypatch.setattr("common.model.spec._cpu_flags", lambda: frozenset({"avx512_bf16"}))
    assert find_one("config", folder).facts["dtype"] == "bfloat16"


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def forget_shard(folder: Path) -> None:
    """An index of two files, of which one is there."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "one.safetensors")
    places = dict.fromkeys(weights, "one.safetensors") | {"lm_head.weight": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def drop(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")


def reshape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors")


def integers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(weights, folder / "model.safetensors")


def other_config(folder: Path) -> None:
    change(folder / "config.json", num_hidden_layers=3)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (cut, "is not a whole safetensors file"),
        (forget_shard, "two.safetensors: No such file"),
        (drop, "the model's weights lack model.norm.weight"),
        (reshape, "model.norm.weight has shape [7], but config.json says [64]"),
        (integers, "model.norm.weight is I8"),
        (other_config, "the model's weights lack model.layers.2."),
    ],
)
def test_weights_that_are_not_whole_are_a_problem(
    folder: Path, break_it: Callable[[Path], None], words: str
) -> None:
    break_it(folder)
    assert_problem(find_one("weights", folder), words)
    assert find_one("tokenizer", folder).level is Level.OK


def test_a_folder_without_a_tokenizer_is_a_problem_unless_the_model_is_a_dummy(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert_problem(find_one("tokenizer", folder), "has no tokenizer.json")
    assert find_one("tokenizer", folder, load_format="dummy").level is Level.WARNING


def test_a_broken_tokenizer_is_a_problem(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert_problem(find_one("tokenizer", folder), "cannot be read")


def test_a_chat_template_that_is_missing_broken_or_picky(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    assert template.exists()
    template.write_text("{{ raise_exception('no users here') }}")
    picky = find_one("tokenizer", folder)
    assert (picky.level, "no users here" in picky.found) == (Level.WARNING, True)
    template.write_text("{% if %}")
    assert_problem(find_one("tokenizer", folder), "the chat template in")
    template.unlink()
    missing = find_one("tokenizer", folder)
    assert missing.level is Level.WARNING
    assert "/v1/chat/completions answers 400" in missing.found
