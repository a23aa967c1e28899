"""A text that comes in pieces -> what of it is content, and which tools it calls, as Hermes models write it:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

Pure. However the text is cut, the result is the same: so a call is told of once its name is certain, and
what may be the beginning of a tag waits. From the arguments' first brace on they are told as they are
written, up to the brace that closes it; a model may write no JSON there, as in OpenAI's API. A call whose
beginning is not of that form, fields in another order for example, is told of when it is complete. What is no
call is content.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum, auto

from pydantic_core import from_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_HEAD = 1024  # characters up to the arguments of a call that is told of as it comes
_STRING = r'"(?:[^"\\]|\\.)+"'
_HEAD = re.compile(rf'\s*\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"arguments"\s*:\s*(?=\{{)', re.DOTALL)
_NOTABLE = re.compile(r'["{}\[\]<]')  # outside of strings
_IN_STRING = re.compile(r'["\\]')


@dataclass(frozen=True, slots=True)
class Content:
    """Text for whoever reads the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The next call."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the last call's arguments."""

    piece: str


Event = Content | CallBegins | Arguments


class _State(Enum):
    CONTENT = auto()
    HEAD = auto()  # behind the opening tag, the name not yet certain
    ARGUMENTS = auto()
    TAIL = auto()  # behind the arguments: a brace and the closing tag
    REST = auto()  # further fields: nothing of them is told


class ToolCallParser:
    """Reads one answer; `finish` at its end."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._state = _State.CONTENT
        self._text = ""  # not read yet
        self._space = ""  # white space of the content that is only told if more content follows
        self._depth = 0
        self._in_string = False
        self._events: list[Event] = []

    def feed(self, piece: str) -> list[Event]:
        """Take the next piece of the text; return what is certain now."""
        self._text += piece
        return self._read(is_last=False)

    def finish(self) -> list[Event]:
        """Return what was held back: the text has ended."""
        return self._read(is_last=True)

    def _read(self, *, is_last: bool) -> list[Event]:
        steps = {
            _State.CONTENT: self._content,
            _State.HEAD: self._head,
            _State.ARGUMENTS: self._arguments,
            _State.TAIL: self._tail,
            _State.REST: self._rest,
        }
        while steps[self._state](is_last):
            pass
        if is_last:
            if self._space and not self.num_calls:
                self._events.append(Content(self._space))
            self._space = ""
        events, self._events = self._events, []
        return events

    # Each step reads what it can, and says whether the next state has more to read.

    def _content(self, is_last: bool) -> bool:
        before, tag, after = self._text.partition(OPEN)
        if tag:
            self._show(before)
            self._text, self._state = after, _State.HEAD
            return True
        keep = 0 if is_last else _beginning(self._text, OPEN)
        self._show(self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]
        return False

    def _head(self, is_last: bool) -> bool:
        end = self._text.find(CLOSE)
        body = self._text if end < 0 else self._text[:end]
        if (head := _HEAD.match(body[:MAX_HEAD])) and (name := _json(head[1])):
            self._begin(name)
            self._text, self._state = self._text[head.end() :], _State.ARGUMENTS
            return True
        if end < 0 and not is_last:
            return False
        self._text = self._text[len(body) + len(CLOSE) :]
        if call := _whole_call(body):
            self._begin(call[0])
            self._events.append(Arguments(call[1]))
        else:
            self._show(OPEN + body + (CLOSE if end >= 0 else ""))
        self._state = _State.CONTENT
        return True

    def _arguments(self, is_last: bool) -> bool:
        text, at = self._text, 0
        while found := (_IN_STRING if self._in_string else _NOTABLE).search(text, at):
            start, at = found.start(), found.end()
            match found[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    if at == len(text) and not is_last:
                        return self._told(start)  # with what it escapes
                    at += 1
                case "{" | "[":
                    self._depth += 1
                case "}" | "]":
                    self._depth -= 1
                    if not self._depth:
                        self._told(at)
                        self._state = _State.TAIL
                        return True
                case _ if text.startswith(CLOSE, start):  # within the arguments: they are no JSON
                    self._told(start)
                    self._depth, self._state = 0, _State.TAIL
                    return True
                case _ if CLOSE.startswith(text[start:]):
                    self._told(start)
                    if is_last:
                        self._text = ""
                    return False
        return self._told(len(text))

    def _told(self, end: int) -> bool:
        if end:
            self._events.append(Arguments(self._text[:end]))
        self._text = self._text[end:]
        return False

    def _tail(self, is_last: bool) -> bool:
        self._text = self._text.lstrip()
        rest = self._text.removeprefix("}").lstrip() if self._text.startswith("}") else self._text
        if rest.startswith(CLOSE):
            self._text, self._state = rest[len(CLOSE) :], _State.CONTENT
        elif CLOSE.startswith(rest):
            if is_last:
                self._text = ""
            return False
        elif rest.startswith(",") and rest is self._text:
            self._state = _State.REST
        else:  # the tag is missing
            self._text, self._state = rest, _State.CONTENT
        return True

    def _rest(self, is_last: bool) -> bool:
        _, tag, after = self._text.partition(CLOSE)
        if tag:
            self._text, self._state = after, _State.CONTENT
            return True
        self._text = "" if is_last else self._text[len(self._text) - _beginning(self._text, CLOSE) :]
        return False

    def _begin(self, name: str) -> None:
        self.num_calls += 1
        self._space = ""
        self._depth, self._in_string = 0, False
        self._events.append(CallBegins(name))

    def _show(self, text: str) -> None:
        """Tell of content, without white space that only parts it from calls."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._events.append(Content(shown))


def _beginning(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `tag`, and not all of it."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)


def _json(text: str) -> str | None:
    try:
        return str(from_json(text))
    except ValueError:
        return None


def _whole_call(body: str) -> tuple[str, str] | None:
    """Return name and arguments of a call that is complete; None: it is none."""
    try:
        call = from_json(body, allow_inf_nan=False)
        arguments = call.get("arguments", {}) if type(call) is dict else None
        if type(arguments) is str:  # JSON in JSON
            parsed = from_json(arguments, allow_inf_nan=False)
        else:
            parsed, arguments = arguments, json.dumps(arguments, ensure_ascii=False)
    except ValueError:
        return None
    if type(parsed) is not dict or type(call.get("name")) is not str or not call["name"]:
        return None
    return call["name"], arguments
