"""The messages of a chat: which fields each role has, and how a chat template wants them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from common.errors import RequestRejected
from gateway.fields import Content, Strict

MAX_CALLS = 128  # in a message


class CalledFunction(Strict):
    """What a model called."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[str, Field(description="JSON, as the model wrote it")]
    parsed_arguments: Annotated[Any, Field(description="the official client's; it changes nothing")] = None


class ToolCall(Strict):
    """A call that the assistant made."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: Annotated[int | None, Field(description="as a stream has it; it changes nothing")] = None

    def for_template(self) -> dict[str, Any]:
        """Return it as templates of `transformers` want it: the arguments as an object."""
        try:
            arguments = from_json(self.function.arguments or "{}", allow_inf_nan=False)
        except ValueError:
            arguments = None
        if type(arguments) is not dict:  # a model wrote it, and is to see what it wrote
            arguments = self.function.arguments
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Content | None, Field(description="may only be left out where the assistant has tool_calls")
    ] = None
    name: str | None = None
    tool_calls: Annotated[
        list[ToolCall] | None, Field(max_length=MAX_CALLS, description="of the assistant")
    ] = None
    tool_call_id: Annotated[str | None, Field(description="of role tool: what it answers")] = None
    parsed: Annotated[Any, Field(description="the official client's; it changes nothing")] = None

    def check(self, where: str) -> None:
        """Refuse what does not belong to the role, and what it lacks.

        Args:
            where: path of the message in the request.

        Raises:
            RequestRejected: the field is named.
        """
        for field, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, field) is not None and self.role != role:
                raise RequestRejected(f"{where}.{field} is of role {role} alone", param=f"{where}.{field}")
        missing = None
        if self.content is None and not self.tool_calls:
            missing = f"{where}.content"
        elif self.role == "tool" and self.tool_call_id is None:
            missing = f"{where}.tool_call_id"
        if missing is not None:
            raise RequestRejected(
                f"{missing!r} is required", param=missing, code="missing_required_parameter"
            )

    def for_template(self) -> dict[str, Any]:
        """Return the message as a chat template reads it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message
