"""The generated documents are what the code says now, and say all of it."""

from __future__ import annotations

import re

import click
import pytest

import cli
from common.link import TRANSITIONS, LinkState
from common.messages import MESSAGES
from tests.docs.generate import OPTIONS, PROTOCOL
from tests.docs.options import commands, options_page
from tests.docs.protocol import TRANSITION_TABLES, fill_sections, sections, wire_types

STALE = "run: python -m tests.docs.generate"


def test_options_page_is_current() -> None:
    assert OPTIONS.read_text() == options_page(), STALE


def test_options_page_has_every_option_that_a_user_can_type() -> None:
    page = options_page()
    for name, command in commands():
        assert f"`{name}`" in page
        for param in command.params:
            if isinstance(param, click.Option) and not param.hidden:
                assert f"`{param.opts[0]}`" in page, (name, param.opts)
    groups = [name for name, command in cli.baton.commands.items() if isinstance(command, click.Group)]
    assert all(f"`baton {name}" in page for name in groups)
    assert "--parent-fd" not in page
    assert "prepare" not in page


def test_help_of_options_does_not_break_a_table() -> None:
    for command in cli.baton.commands.values():
        for param in command.params:
            assert "|" not in (getattr(param, "help", None) or "")


def test_protocol_page_is_current_and_describes_everything_once() -> None:
    page = PROTOCOL.read_text()
    assert page == fill_sections(page), STALE
    expected = {("fields", name) for name in wire_types()}
    expected |= {("transitions", name) for name in TRANSITION_TABLES} | {("limits", "codec")}
    assert sorted(sections(page)) == sorted(expected)
    # That each message is said when, in a table by hand, nobody generates.
    assert {message.__name__ for message in MESSAGES} <= rows(page).keys()


def fill(kind: str, *names: str) -> str:
    return fill_sections(f"before\n<!-- generated: {kind} {' '.join(names)} -->\nold\n<!-- end -->\nafter\n")


def rows(text: str) -> dict[str, list[str]]:
    """Return the rows of all tables in a text, by their first cell."""
    cells = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line
    ]
    return {first: rest for first, *rest in cells}


def test_prose_stays_and_a_section_is_replaced() -> None:
    text = fill("fields", "Abort")
    assert text.startswith("before\n<!-- generated: fields Abort -->\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    assert fill_sections(text) == text


def test_section_of_something_unknown_is_an_error() -> None:
    with pytest.raises(KeyError):
        fill("fields", "NoSuchMessage")
    with pytest.raises(KeyError):
        fill("poems", "Abort")


def test_fields_are_described_in_words() -> None:
    failed = rows(fill("fields", "Failed"))
    assert failed["status"][:2] == ["int, 400 to 599", "required"]
    assert failed["retry_after_s"][:2] == ["int, or none", "none"]
    assert rows(fill("fields", "Submit"))["prompt_ids"][0] == "int32 array, a frame of its own"
    hello = rows(fill("fields", "Hello"))
    assert hello["planes"][0] == "list of text; at most 16 items"
    assert hello["layout"][0] == "KVLayout`, or none"
    assert hello["model"][2] == "fingerprint of the model folder"


def test_every_message_and_every_part_of_one_can_be_described() -> None:
    names = wire_types()
    assert {message.__name__ for message in MESSAGES} <= names.keys()
    assert {"PrefillStamps", "SamplingParams", "KVLayout"} <= names.keys()
    text = fill("fields", *names)
    assert [name for name in names if f"**`{name}`**: " not in text] == []
    assert re.findall(r"<(?:class|enum)|typing\.|0x", text) == []


def test_table_of_a_machine_has_each_transition() -> None:
    table = rows(fill("transitions", "link"))
    shown = {
        (state.name, event): cell
        for state in LinkState
        for event, cell in zip(table["link"], table[state.name], strict=True)
        if cell != "·"
    }
    assert shown == {(s.name, e.name): after.name for (s, e), after in TRANSITIONS.items()}
