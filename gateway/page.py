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


def _inlined(schema: Any, parts: dict[str, Schema]) -> Any:
    """Put each definition in the place of what refers to it; none refers to itself."""
    if isinstance(schema, list):
        return [_inlined(item, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if type(schema.get("$ref")) is str:
        return _inlined(parts[schema["$ref"].rpartition("/")[2]], parts)
    return {name: _inlined(value, parts) for name, value in schema.items()}
