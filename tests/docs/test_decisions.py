"""Every dependency has its reason in docs/decisions.md."""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement

from tests.docs.generate import DOCS

PROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())


def named() -> set[str]:
    """Return the words in bold on the page, as packages are spelt."""
    bold = re.findall(r"\*\*(.+?)\*\*", (DOCS / "decisions.md").read_text(), re.DOTALL)
    return {word.lower() for text in bold for word in re.findall(r"[\w.-]*\w", text)}


def test_every_dependency_is_named_with_a_reason() -> None:
    project = PROJECT["project"]
    asked = [*PROJECT["build-system"]["requires"], *project["dependencies"]]
    asked += [each for extra in project["optional-dependencies"].values() for each in extra]
    packages = {Requirement(each).name.lower() for each in asked} - {project["name"]}
    # It is called by its short name there.
    packages = {"flashinfer" if name == "flashinfer-python" else name for name in packages}
    assert sorted(packages - named()) == []
