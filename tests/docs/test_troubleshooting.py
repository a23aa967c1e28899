"""Every message has a row on the page, and what a row says is what the program prints: commands that end."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.generate import TROUBLESHOOTING
from tests.docs.messages_in_code import messages_in_code, pattern
from tests.docs.provoke import Kit
from tests.docs.provoke_served import Servers
from tests.docs.troubleshooting import FILES_LEFT_OUT, SECTIONS, Case, all_messages, cases, page

COMMANDS = (
    "A command ends at once",
    "The model",
    "GPUs",
    "Nodes that are started one by one",
    "Commands that ask or measure a server",
)


@pytest.fixture(scope="module")
def kits(tiny_model: Path) -> Iterator[Servers]:
    # Not pytest's own folder: there are sockets in it, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="bt-", dir="/tmp") as folder:
        servers = Servers(tiny_model, Path(folder))
        try:
            yield servers
        finally:
            servers.close()


def test_the_page_is_current() -> None:
    assert TROUBLESHOOTING.read_text() == page(), "run: python -m tests.docs.generate"


def test_every_message_in_the_code_has_a_row() -> None:
    rows = set(all_messages())
    missing = {
        message: file
        for message, file in messages_in_code().items()
        if message not in rows and file not in FILES_LEFT_OUT
    }
    assert missing == {}, "add them to tests/docs/messages_*.py"


def test_every_row_has_a_message_of_the_code_and_each_only_once() -> None:
    rows, code = all_messages(), messages_in_code()
    assert [message for message in rows if message not in code] == []
    assert sorted({message for message in rows if rows.count(message) > 1}) == []
    assert FILES_LEFT_OUT.keys() <= set(code.values())


def test_every_row_says_what_it_means_and_what_to_do() -> None:
    for rows in SECTIONS.values():
        for row in rows:
            assert row.shown
            assert row.means.endswith((".", ":"))
            assert row.do.endswith((".", ":"))


def test_links_of_the_page_lead_somewhere() -> None:
    for name in re.findall(r"\]\(([\w/.-]+)\)", page()):
        assert (TROUBLESHOOTING.parent / name).is_file(), name


def test_a_message_is_found_in_what_was_printed() -> None:
    found = pattern("port <port> is taken: choose <what>")
    assert found.search("baton: port 80 is taken: choose another\n")
    assert not found.search("baton: port 80 is taken.")


@pytest.mark.parametrize("case", list(cases(*COMMANDS)), ids=lambda case: case.message[:60])
def test_command_says_so(kits: Servers, case: Case) -> None:
    assert_said(kits, case)


def assert_said(kits: Servers, case: Case) -> None:
    """Follow a recipe in its own folder, unless that was done for another message; look for the message."""
    says = pattern(case.message)
    if says.search(kits.said.get(case.recipe, "")):
        return
    folder = Path(tempfile.mkdtemp(dir=kits.folder))
    said = kits.said[case.recipe] = case.recipe(Kit(folder, kits.tiny, kits), says)
    assert says.search(said), said
    shutil.rmtree(folder)
