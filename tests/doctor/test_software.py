"""Python and packages: as they are here, and as they are not."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from doctor.finding import Level
from doctor.software import (
    declared,
    installed,
    judge_packages,
    judge_python,
    own_version,
    pins,
)
from tests.doctor.look import ROOT, find, find_one


def write_package(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def judged(folder: Path, wanted: str, tested: dict[str, str]) -> list[tuple[Level, str]]:
    requirements = [Requirement(wanted)]
    return [(f.level, f.found) for f in judge_packages(requirements, tested, installed([str(folder)]))]


def test_this_environment_has_a_python_and_packages_that_do() -> None:
    assert find_one("python").level is Level.OK
    assert {finding.level for finding in find("packages")} <= {Level.OK, Level.WARNING}


def test_an_old_python_is_a_problem() -> None:
    assert judge_python("3.10.14", declared()[0]).level is Level.PROBLEM
    assert judge_python("3.12.0rc1", declared()[0]).level is Level.OK


@pytest.mark.parametrize(
    ("here", "level", "words"),
    [
        (None, Level.PROBLEM, "some-package<3,>=2.1 is not installed"),
        ("2.0", Level.PROBLEM, "some-package 2.0, but some-package<3,>=2.1 is needed"),
        ("3.0", Level.PROBLEM, "some-package 3.0, but"),
        ("2.2", Level.WARNING, "some-package 2.2 (tested: 2.5)"),
        ("2.5", Level.OK, "in the versions that the tests run on"),
        ("2.5+cpu", Level.OK, "in the versions that the tests run on"),  # a build of it
    ],
)
def test_a_package(tmp_path: Path, here: str | None, level: Level, words: str) -> None:
    if here is not None:
        write_package(tmp_path, "Some_Package", here)
    [(judged_level, found)] = judged(tmp_path, "some-package>=2.1,<3", {"some-package": "2.5"})
    assert judged_level is level
    assert words in found


def test_without_constraints_nothing_is_said_of_tests(tmp_path: Path) -> None:
    write_package(tmp_path, "some-package", "2.2")
    assert judged(tmp_path, "some-package>=2.1", pins(tmp_path)) == [(Level.OK, "all 1 packages are here")]


def test_pyproject_beside_the_code_counts_before_what_was_installed(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "baton-serve"\nversion = "9.9"\nrequires-python = ">=3.99"\n'
        'dependencies = ["one>=1", "two; extra == \\"cuda\\""]\n'
    )
    assert declared(tmp_path) == (">=3.99", [Requirement("one>=1")])
    assert own_version(tmp_path) == "9.9"


def test_elsewhere_what_was_installed_counts(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n')
    assert own_version(tmp_path) == metadata.version("baton-serve")
    assert {one.name for one in declared(tmp_path)[1]} >= {"torch", "pyzmq"}


def test_every_dependency_is_pinned() -> None:
    assert {one.name for one in declared(ROOT)[1]} <= pins(ROOT).keys()
