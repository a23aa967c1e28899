"""The first hour, as a stranger follows it: its commands run in order, and print what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.generate import DOCS
from tests.docs.pages import Block, blocks, is_as_said
from tests.docs.test_examples import ADDRESS
from tests.system.server import BATON, Server, running

PAGE = (DOCS / "first_hour.md").read_text()
PATIENCE_S = 300.0
_EXAMPLE = re.compile(r"docs/examples/(\w+\.py)")
_PID = re.compile(r"\$\(pgrep -f -- '--node-id (\w+)-0'\)")


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Server]:
    name = ("--served-model-name", "smollm2-135m", "--dtype", "float32")
    with running(smollm2, *name, calm=False) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hour")


def for_here(commands: str, server: Server, folder: Path) -> str:
    """Return commands with this server's address and processes, and the installed program."""
    for name in _EXAMPLE.findall(commands):
        (folder / name).write_text((DOCS / "examples" / name).read_text().replace(ADDRESS, server.url))
    commands = _EXAMPLE.sub(lambda found: found[1], commands)
    commands = _PID.sub(lambda found: str(server.pids()[found[1]]), commands)  # others may run servers here
    commands = commands.replace(".venv/bin/baton", str(BATON)).replace(".venv/bin/python", sys.executable)
    return commands.replace(ADDRESS, server.url)


@pytest.mark.system
@pytest.mark.smollm2
@pytest.mark.parametrize("block", list(blocks(PAGE)), ids=lambda block: block.commands.split("\n")[0][:50])
def test_commands_do_what_the_page_says(server: Server, folder: Path, block: Block) -> None:
    if block.not_run is not None:
        pytest.skip(block.not_run)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "BATON_URL": server.url}
    done = subprocess.run(
        ["bash", "-c", for_here(block.commands, server, folder)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert block.printed is None or is_as_said(block.printed, done.stdout), done.stdout


def test_pages_link_to_what_is_there() -> None:
    for page in [DOCS.parent / "README.md", *DOCS.glob("*.md")]:
        for name in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / name).exists(), (page.name, name)


def test_blocks_are_found_with_what_they_print() -> None:
    page = "# A\n```sh\none\n```\nprose\n```text\n1\n```\n<!-- not run: late -->\n```sh\ntwo\n```\n"
    page += "## B\n```text\nno\n```\n"
    assert list(blocks(page)) == [Block("one\n", "1\n"), Block("two\n", None, "late")]


def test_what_is_printed_is_compared_with_what_is_said() -> None:
    assert is_as_said("a ...\nb 2", "a 1 2 3\n  b    2\n")
    assert not is_as_said("a ... b", "a 1 c")
    assert not is_as_said("a b", "a b c")
