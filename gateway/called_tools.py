"""An answer's text -> the parts of a chat message that may call tools: whole, or as a stream's deltas."""

from __future__ import annotations

import secrets
from typing import Any

from gateway.tool_calls import Arguments, CallBegins, Content, ToolCallParser

Json = dict[str, Any]


class CalledTools:
    """The tools that one answer calls."""

    def __init__(self) -> None:
        self._parser = ToolCallParser()

    @property
    def any_called(self) -> bool:
        """A call was told of."""
        return self._parser.num_calls > 0

    def message(self, text: str) -> Json:
        """Return the message of a whole answer."""
        delta = self.delta(text, is_last=True)
        message = {"role": "assistant", "content": delta.get("content"), "refusal": None}
        if not self.any_called:
            return message | {"content": message["content"] or ""}
        calls = [{name: call[name] for name in ("id", "type", "function")} for call in delta["tool_calls"]]
        return message | {"tool_calls": calls}

    def delta(self, text: str, *, is_last: bool) -> Json:
        """Return what more text adds to the message: nothing, where it may be the beginning of a call."""
        called_before = self._parser.num_calls
        events = self._parser.feed(text) + (self._parser.finish() if is_last else [])
        content, index, calls = "", called_before - 1, dict[int, Json]()
        for event in events:
            match event:
                case Content(piece):
                    content += piece
                case CallBegins(name):
                    index += 1
                    function = {"name": name, "arguments": ""}
                    calls[index] = {"index": index, "id": _new_id(), "type": "function", "function": function}
                case Arguments(piece):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += piece
        delta: Json = {"content": content} if content else {}
        return delta | {"tool_calls": list(calls.values())} if calls else delta


def _new_id() -> str:
    return "call_" + secrets.token_hex(12)
