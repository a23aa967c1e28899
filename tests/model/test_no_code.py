"""A model folder is data: nothing in it is imported, unpickled or run, and what asks for that is refused."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, RequestRejected
from common.model.spec import load_spec
from gateway.text import TextPipeline

CODE = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"


class Touch:
    """A pickle that writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A model of the test's own, with code beside it."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    for name in ("modeling_own", "configuration_own", "tokenization_own", "__init__"):
        (folder / f"{name}.py").write_text(CODE)
    return folder


def ask_for_code(path: Path, auto_map: dict[str, Any]) -> None:
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"auto_map": auto_map}))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    ("name", "auto_map"),
    [
        ("config.json", {"AutoModelForCausalLM": "modeling_own.Model", "AutoConfig": "configuration_own.C"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["tokenization_own.T", "tokenization_own.T"]}),
    ],
)
def test_a_model_that_asks_for_code_of_its_own_is_refused(
    folder: Path, name: str, auto_map: dict[str, Any], load_format: str
) -> None:
    ask_for_code(folder / name, auto_map)
    with pytest.raises(ConfigError, match=rf"{name} asks for code of the model's own \(auto_map\)"):
        load_spec(folder, load_format)
    assert not (folder / "ran").exists()
    assert not [module for module in sys.modules if module.endswith("_own")]


def test_the_tokenizer_runs_none_either(folder: Path) -> None:
    """It is loaded by `transformers`, which would ask on the terminal whether it may."""
    ask_for_code(
        folder / "tokenizer_config.json", {"AutoTokenizer": ["tokenization_own.T", "tokenization_own.T"]}
    )
    ask_for_code(folder / "config.json", {"AutoConfig": "configuration_own.C"})
    with suppress(ConfigError):  # whether it can do without or not
        TextPipeline.load(folder)
    assert not (folder / "ran").exists()


def test_code_that_merely_lies_there_is_not_run(folder: Path) -> None:
    load_spec(folder)
    TextPipeline.load(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_unread(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Touch(folder / "ran")))
    with pytest.raises(ConfigError, match=rf"no \*.safetensors file: {name} is a pickle"):
        load_spec(folder)
    assert not (folder / "ran").exists()


def test_a_pickle_that_is_called_safetensors_is_refused_unread(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Touch(folder / "ran")))
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        load_spec(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_chat_template_reaches_nothing_of_the_process(folder: Path, template: str) -> None:
    for path in folder.glob("chat_template*"):
        path.unlink()
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises((ConfigError, RequestRejected), match=r"template.*(unsafe|undefined)"):
        TextPipeline.load(folder).render_chat([{"role": "user", "content": "hi"}])
    assert not Path("ran").exists()
