"""Hermes output -> content and calls: by examples, and the same however the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tool_calls import CLOSE, OPEN, Arguments, CallBegins, Content, ToolCallParser

CALL = OPEN + '\n{"name": "weather", "arguments": {"city": "Paris"}}\n' + CLOSE
PARIS = ("weather", '{"city": "Paris"}')


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser()
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    content, calls = "", list[tuple[str, str]]()
    for event in events:
        match event:
            case Content(text):
                content += text
            case CallBegins(name):
                calls.append((name, ""))
            case Arguments(piece):
                calls[-1] = (calls[-1][0], calls[-1][1] + piece)
    assert parser.num_calls == len(calls)
    return content, calls


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        (" plain text \n", " plain text \n", []),
        ("a < b <tool_ca", "a < b <tool_ca", []),
        (CALL, "", [PARIS]),
        ("Let me look.\n\n" + CALL + "\n", "Let me look.", [PARIS]),
        (CALL + "\n" + CALL, "", [PARIS, PARIS]),
        (CALL + CALL + "done", "done", [PARIS, PARIS]),
        (OPEN + '{"name":"f","arguments":{}}' + CLOSE, "", [("f", "{}")]),
        (
            OPEN + '{"name": "f", "arguments": {"a": "}\\"</tool_call>{", "b": [{}]}}' + CLOSE,
            "",
            [("f", '{"a": "}\\"</tool_call>{", "b": [{}]}')],
        ),
        # In another order, without arguments, with JSON in JSON, with more fields.
        (OPEN + '{"arguments": {"a": 1}, "name": "f"}' + CLOSE, "", [("f", '{"a": 1}')]),
        (OPEN + '{"name": "f"}' + CLOSE, "", [("f", "{}")]),
        (OPEN + '{"name": "f", "arguments": "{\\"a\\": 1}"}' + CLOSE, "", [("f", '{"a": 1}')]),
        (OPEN + '{"name": "f", "arguments": {}, "id": 5}' + CLOSE + "x", "x", [("f", "{}")]),
        # Cut: by the end of the answer, or because the model forgets the closing tag.
        (OPEN + '{"name": "f", "arguments": {"a": [1, ', "", [("f", '{"a": [1, ')]),
        (OPEN + '{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (OPEN + '{"name": "f", "arguments": {"a": 1}}\n' + CALL, "", [("f", '{"a": 1}'), PARIS]),
        (OPEN + '{"arguments": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
        # No JSON in the arguments: the call is told of as it was written.
        (OPEN + '{"name": "f", "arguments": {"a": oops' + CLOSE + "x", "x", [("f", '{"a": oops')]),
        # No call.
        (OPEN + "hello" + CLOSE, OPEN + "hello" + CLOSE, []),
        ("x " + OPEN + '{"name": 5, "arguments": {}}' + CLOSE + " y",) * 2 + ([],),
        (OPEN + '{"name": "", "arguments": {}}' + CLOSE,) * 2 + ([],),
        (OPEN + '{"name": "f", "arguments": [1]}' + CLOSE,) * 2 + ([],),
        (OPEN + '{"name": "f", "arg',) * 2 + ([],),
        (OPEN + "[" * 5000 + CLOSE,) * 2 + ([],),
    ],
)
def test_examples(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read([text]) == (content, calls)
    assert read(list(text)) == (content, calls)


_FRAGMENTS = st.sampled_from(
    [
        OPEN, CLOSE, CALL, '{"name": "f", "arguments": {', '"a": 1', '"a": "x\\"y"', "}", "{", "[", "]", "\n",
        " ", '"', "\\", ",", "<", "</", "<tool_", "call>", "text",
        '{"arguments": {}, "name": "g"}', '"name"', ":",
    ]
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(_FRAGMENTS, max_size=14).map("".join), st.data())
def test_any_split_gives_the_same(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces) == read([text]) == read(list(text))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@given(
    st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), _JSON)), min_size=1, max_size=3),
    st.text(),
    st.booleans(),
)
def test_what_was_written_is_read(
    calls: list[tuple[str, dict[str, object]]], content: str, ascii_: bool
) -> None:
    said = [(name, json.dumps(arguments, ensure_ascii=ascii_)) for name, arguments in calls]
    text = content + "".join(
        f'{OPEN}\n{{"name": {json.dumps(name, ensure_ascii=ascii_)}, "arguments": {arguments}}}\n{CLOSE}\n'
        for name, arguments in said
    )
    shown, read_calls = read(list(text))
    assert read_calls == said
    assert shown == content.rstrip()


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolCallParser()
    assert parser.feed("Sure. " + OPEN + '{"name": "f", "argum') == [Content("Sure.")]
    assert parser.feed('ents": {"a": "b') == [CallBegins("f"), Arguments('{"a": "b')]
    assert parser.feed("cd") == [Arguments("cd")]
    assert parser.feed('"}}\n</to') == [Arguments('"}')]
    assert parser.feed("ol_call>") == parser.finish() == []
