"""Python and packages, against what the project asks for and what its tests run on."""

from __future__ import annotations

import platform
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from doctor.asked import Asked, Check
from doctor.finding import Finding, ok, problem, warning

_ROOT = Path(__file__).parents[1]
_NAME = "baton-serve"


def declared(root: Path = _ROOT) -> tuple[str, list[Requirement]]:
    """Return which Pythons and which packages Baton asks for, its extras aside.

    They are read from pyproject.toml where that is beside the code: what an editable install remembers of it
    may be old.
    """
    project = _project(root)
    if project:
        python, texts = project["requires-python"], project["dependencies"]
    else:
        python = metadata.metadata(_NAME)["Requires-Python"] or ""
        texts = metadata.requires(_NAME) or []
    wanted = [Requirement(text) for text in texts]
    return python, [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]


def own_version(root: Path = _ROOT) -> str:
    """Return Baton's version: of pyproject.toml where that is beside the code, else as it was installed."""
    project = _project(root)
    return str(project["version"]) if project else metadata.version(_NAME)


def _project(root: Path) -> dict[str, Any]:
    path = root / "pyproject.toml"
    project: dict[str, Any] = tomllib.loads(path.read_text())["project"] if path.is_file() else {}
    return project if project.get("name") == _NAME else {}


def pins(root: Path = _ROOT) -> dict[str, str]:
    """Return the versions of constraints.txt by package; nothing where it is not beside the code."""
    path = root / "constraints.txt"
    lines = path.read_text().splitlines() if path.is_file() else []
    pinned = (line.partition("==") for line in lines if not line.startswith("#"))
    return {canonical(name): version for name, _, version in pinned if version}


def installed(path: list[str] | None = None) -> dict[str, str]:
    """Return the versions of all packages that are here, or in the folders of `path`."""
    found = metadata.distributions() if path is None else metadata.distributions(path=path)
    # The first one of a name is the one that is imported.
    versions: dict[str, str] = {}
    for one in found:
        if name := one.metadata["Name"]:
            versions.setdefault(canonical(name), one.version)
    return versions


def canonical(name: str) -> str:
    """Return a package's name as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", name).lower().strip()


def judge_python(version: str, wanted: str) -> Finding:
    """Hold a Python against what is asked for."""
    if not SpecifierSet(wanted).contains(version, prereleases=True):
        return problem(
            f"Python {version}, but Baton needs {wanted}",
            "make the environment with a newer one: make serve PYTHON=python3.12, in a fresh clone",
        )
    return ok(f"Python {version} (needs {wanted})", version=version)


def judge_packages(
    wanted: list[Requirement], tested: Mapping[str, str], here: Mapping[str, str]
) -> Iterator[Finding]:
    """Hold the packages that are here against what is asked for, and against what the tests run on."""
    wrong, other = [], []
    for one in wanted:
        name = canonical(one.name)
        version = here.get(name)
        if version is None:
            wrong.append(f"{one} is not installed")
        elif not one.specifier.contains(version, prereleases=True):
            wrong.append(f"{name} {version}, but {one} is needed")
        # A version of a build (2.13.0+cpu) is that version.
        elif name in tested and not SpecifierSet(f"=={tested[name]}").contains(version, prereleases=True):
            other.append(f"{name} {version} (tested: {tested[name]})")
    if wrong:
        yield problem(
            "; ".join(wrong), "python -m pip install -c constraints.txt -e . in the project's folder"
        )
    if other:
        yield warning(
            f"other versions than the tests run on: {', '.join(other)}",
            "where something does not work, take the tested ones: python -m pip install -c constraints.txt "
            "-e .",
        )
    if not wrong and not other:
        as_tested = ", in the versions that the tests run on" if tested else ""
        yield ok(f"all {len(wanted)} packages are here{as_tested}")


def _python(asked: Asked) -> Iterator[Finding]:
    yield judge_python(platform.python_version(), declared()[0])


def _packages(asked: Asked) -> Iterator[Finding]:
    yield from judge_packages(declared()[1], pins(), installed())


CHECKS = (
    Check("python", "The version of Python.", "", "It is older than Baton needs.", _python),
    Check(
        "packages",
        "The packages that Baton needs, against `pyproject.toml`, and the versions that the tests run on, in "
        "`constraints.txt`.",
        "A version is within the range, but not the one that the tests run on.",
        "A package is not installed, or its version is out of range.",
        _packages,
    ),
)
