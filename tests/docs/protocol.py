"""The parts of docs/protocol.md that are written from the code: message fields and transition tables.

The prose is by hand; what stands between two markers is not:

    <!-- generated: fields Hello HelloAck -->
    <!-- end -->

`fields NAME...` describes messages, or parts of messages; `transitions NAME...` machines of
`TRANSITION_TABLES`; `limits codec` what holds where a field says nothing else.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import textwrap
import tokenize
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from common import codec, link
from common.codec import Frames, ItemType, MaxLen, Range
from common.messages import MESSAGES
from transfer import states

SECTION = re.compile(r"(<!-- generated: (\w+) ([\w ]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
Table = Mapping[Any, Enum]  # (state, event) -> state
TRANSITION_TABLES: dict[str, Table] = {
    "link": link.TRANSITIONS,
    "receiver": states.RECEIVER_TABLE,
    "sender": states.SENDER_TABLE,
}
INT_RANGE = Range(0, 2**63 - 1)  # of an int without bounds


def fill_sections(page: str) -> str:
    """Return the page with its generated sections as they must be; KeyError: one of something unknown."""

    def fill(found: re.Match[str]) -> str:
        begin, kind, names, end = found.groups()
        write = {"fields": _describe_type, "transitions": _describe_table, "limits": _describe_limits}[kind]
        return begin + "\n" + "".join(write(name) + "\n" for name in names.split()) + end

    return SECTION.sub(fill, page)


def sections(page: str) -> list[tuple[str, str]]:
    """Return what the sections of a page describe, as (kind, name)."""
    return [(kind, name) for _, kind, names, _ in SECTION.findall(page) for name in names.split()]


def wire_types() -> dict[str, type]:
    """Return all messages, and the dataclasses and enums inside them, by name."""
    found: dict[str, type] = {}

    def visit(hint: Any) -> None:
        for part in get_args(hint):
            visit(part)
        if (
            isinstance(hint, type)
            and (is_dataclass(hint) or issubclass(hint, Enum))
            and hint.__name__ not in found
        ):
            found[hint.__name__] = hint
            if is_dataclass(hint):
                for part in _hints(hint).values():
                    visit(part)

    for message in MESSAGES:
        visit(message)
    return {name: kind for name, kind in found.items() if not issubclass(kind, Enum)}


def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in fields(kind)}


def _describe_limits(name: str) -> str:
    limits = {"codec": codec}[name]
    sentences = (
        f"Protocol version {limits.PROTOCOL_VERSION}.",
        f"A header has at most {limits.MAX_HEADER_BYTES >> 20} MiB, a frame behind it "
        f"{limits.MAX_FRAME_BYTES >> 20} MiB; a message has at most {limits.MAX_FRAMES} frames.",
        f"Where a field says nothing else, an int is {number(INT_RANGE.low)} to {number(INT_RANGE.high)}, "
        f"text has at most {limits.MAX_STR} characters, a list or map {limits.DEFAULT_MAX_LEN} items.",
    )
    return "\n".join(sentences) + "\n"


def _describe_type(name: str) -> str:
    kind = wire_types()[name]
    what = " ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split())
    if not fields(kind):
        return f"**`{name}`**: {what}\n"
    comments = _comments(kind)
    rows = [
        f"| `{f.name}` | {_describe(_hints(kind)[f.name])} | {_default(f)} | {comments.get(f.name, '')} |"
        for f in fields(kind)
    ]
    head = [f"**`{name}`**: {what}", "", "| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *rows, ""])


def _describe(hint: Any) -> str:
    """Say in words what a field may hold."""
    notes: dict[type, Any] = {}
    if get_origin(hint) is Annotated:
        hint, *given = get_args(hint)
        notes = {type(note): note for note in given}
    if ItemType in notes:
        item = {"i": "int32", "f": "float32", "Q": "uint64"}[notes[ItemType].code]
        return f"{item} array, a frame of its own"
    if Frames in notes:
        return "all frames that are left"
    origin, parts = get_origin(hint), get_args(hint)
    again = tuple(notes.values())
    most = f"; at most {notes[MaxLen].items} items" if MaxLen in notes else ""
    if origin in (Union, types.UnionType):
        (inner,) = (part for part in parts if part is not type(None))
        return _describe(Annotated[inner, *again] if again else inner) + ", or none"
    if origin is tuple:
        return f"list of {_describe(parts[0])}{most}"
    if origin is dict:
        return f"map from text to {_describe(parts[1])}{most}"
    if issubclass(hint, Enum):
        return " or ".join(f"`{member.value}`" for member in hint)
    name: str = hint.__name__
    if is_dataclass(hint):
        return f"`{name}`"
    if Range in notes:
        return f"{name}, {number(notes[Range].low)} to {number(notes[Range].high)}"
    most = f"; at most {notes[MaxLen].items} bytes" if hint is bytes and MaxLen in notes else ""
    return name.replace("str", "text") + most


def number(value: float) -> str:
    """Write a bound as people do: 2^63 - 1."""
    for power in (20, 31, 62, 63, 64):
        if value in (2**power, 2**power - 1):
            return f"2^{power}" + ("" if value == 2**power else " - 1")
    return f"{value:g}" if isinstance(value, float) else str(value)


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "required" if field.default_factory is MISSING else "empty"
    match field.default:
        case None:
            return "none"
        case () | "":
            return "empty"
        case bool():
            return "yes" if field.default else "no"
        case _:
            return f"{field.default:g}"


def _comments(kind: type) -> dict[str, str]:
    """Return the comment behind each name that a class body sets: there it is said what the name means."""
    source = textwrap.dedent(inspect.getsource(kind))
    by_line = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    return {
        target.id: by_line[node.lineno]
        for node in definition.body
        for target in _targets(node)
        if node.lineno in by_line
    }


def _targets(node: ast.stmt) -> Iterator[ast.Name]:
    for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
        if isinstance(target, ast.Name):
            yield target


def _describe_table(name: str) -> str:
    """Write where each event leads from each state; an end has no way out."""
    table = TRANSITION_TABLES[name]
    kinds: list[type[Enum]] = [type(part) for part in next(iter(table))]
    all_states, events = list(kinds[0]), list(kinds[1])
    lines = [f"| {name} | {' | '.join(event.name for event in events)} |"]
    lines += ["| --- " * (len(events) + 1) + "|"]
    for state in all_states:
        cells = [table[state, event].name if (state, event) in table else "·" for event in events]
        lines += [f"| {state.name} | {' | '.join(cells)} |"]
    return "\n".join([*lines, ""])
