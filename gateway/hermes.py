"""Tools in a chat whose template does not know them: written into its messages as Hermes models learned it.

A template that has `tools` in it writes them its own way, and none of this is used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gateway.tool_calls import CLOSE, OPEN

Message = dict[str, Any]
_ABOUT = """You may call these functions:
<tools>
{tools}
</tools>
For each call write its name and arguments as JSON:
<tool_call>
{{"name": ..., "arguments": {{...}}}}
</tool_call>"""


def in_plain_messages(messages: Sequence[Message], tools: Sequence[Message] | None) -> list[Message]:
    """Return messages of the roles system, user and assistant alone, each a text."""
    plain = [_plain(message) for message in messages]
    if tools:
        about = _ABOUT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if plain and plain[0]["role"] in ("system", "developer"):
            plain[0] = plain[0] | {"content": f"{plain[0]['content']}\n\n{about}"}
        else:
            plain.insert(0, {"role": "system", "content": about})
    return _answers_joined(plain)


def _plain(message: Message) -> Message:
    kept = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
            "of": "tool",
        }
    calls = [call["function"] for call in message.get("tool_calls", ())]
    said = [f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}" for call in calls]
    return kept | {"content": "\n".join(([message["content"]] if message["content"] else []) + said)}


def _answers_joined(messages: Sequence[Message]) -> list[Message]:
    """Make one message of all answers to one turn's calls: roles take turns."""
    joined: list[Message] = []
    were_answers = False
    for message in messages:
        is_answer = message.pop("of", None) is not None
        if is_answer and were_answers:
            joined[-1]["content"] += "\n" + message["content"]
        else:
            joined.append(message)
        were_answers = is_answer
    return joined
