"""What the OpenAPI page says of a call's body and of its answer: all that is accepted, and no more.

Pydantic's own schema is not quite true: null is as if absent, and fields that are not supported may stand
at the value that asks for nothing (`unsupported.py`). Its definitions also have no place in a page.
"""

from __future__ import annotations

from typing import Any

from gateway.openai_api import GenerationRequest
from gateway.unsupported import MESSAGE, Table

Schema = dict[str, Any]
_TABLES: dict[str, Table] = {"Message": MESSAGE}
_ANSWER_FIELDS = ("id", "object", "created", "model", "choices", "usage")


def request_schema(kind: type[GenerationRequest], unsupported: Table, model_name: str) -> Schema:
    """Return the schema of a call's body, complete in itself."""
    whole = kind.model_json_schema()
    parts = whole.pop("$defs", {})
    for name, part in parts.items():
        _allow(part, _TABLES.get(name, {}))
    if "Message" in parts:
        parts["Message"] = _by_role(parts["Message"])
    if "StructuredOutputs" in parts:
        parts["StructuredOutputs"] = _exactly_one(parts["StructuredOutputs"])
    _allow(whole, unsupported)
    whole["properties"]["model"] |= {"enum": [model_name]}
    schema: Schema = _inlined(whole, parts)
    return schema


def answer_content(body_object: str) -> dict[str, Schema]:
    """Return what an answer is, by content type: one object, or a stream of events."""
    body: Schema = {
        "type": "object",
        "properties": {"object": {"const": body_object}, "choices": {"type": "array", "minItems": 1}},
        "required": list(_ANSWER_FIELDS),
    }
    return {"application/json": {"schema": body}, "text/event-stream": {}}


def _allow(schema: Schema, unsupported: Table) -> None:
    """Allow null for what may be absent, and what asks for nothing."""
    fields, required = schema["properties"], schema.get("required", ())
    for name, field in fields.items():
        if name not in required and {"type": "null"} not in field.get("anyOf", ()):
            fields[name] = {"anyOf": [field, {"type": "null"}]}
    fields |= {name: {"enum": [None, *values]} for name, values in unsupported.items()}


def _by_role(message: Schema) -> Schema:
    """Say what each role's message has: pydantic knows one for all."""
    fields, content = message["properties"], _not_null(message["properties"]["content"])
    calls = _not_null(fields["tool_calls"]) | {"minItems": 1}

    def of(roles: list[str], needs: Schema) -> Schema:
        others = {name: {"type": "null"} for name in ("tool_calls", "tool_call_id")}
        properties = fields | others | needs | {"role": {"enum": roles}}
        return message | {"properties": properties, "required": ["role", *needs]}

    called = of(["assistant"], {"tool_calls": calls})
    called["properties"]["content"] = fields["content"]
    answer = {"content": content, "tool_call_id": _not_null(fields["tool_call_id"])}
    said = of(["system", "developer", "user", "assistant"], {"content": content})
    return {"anyOf": [said, called, of(["tool"], answer)]}


def _exactly_one(outputs: Schema) -> Schema:
    fields = outputs["properties"]
    return {
        "anyOf": [
            outputs
            | {
                "properties": {other: {"type": "null"} for other in fields} | {name: _not_null(field)},
                "required": [name],
            }
            for name, field in fields.items()
        ]
    }


def _not_null(field: Schema) -> Schema:
    options = [option for option in field["anyOf"] if option != {"type": "null"}]
    return options[0] if len(options) == 1 else {"anyOf": options}


def _inlined(schema: Any, parts: dict[str, Schema]) -> Any:
    """Put each definition in the place of what refers to it; none refers to itself."""
    if isinstance(schema, list):
        return [_inlined(item, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if type(schema.get("$ref")) is str:
        return _inlined(parts[schema["$ref"].rpartition("/")[2]], parts)
    return {name: _inlined(value, parts) for name, value in schema.items()}
