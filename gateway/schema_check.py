"""Which JSON schemas can be enforced: those that a grammar of xgrammar holds an answer to, word for word.

xgrammar leaves out what it does not know (`not`, `uniqueItems`, ...), and the answer would be something else
than what was asked for. So that is refused here, by its place in the schema. What JSON schema calls an
annotation (`title`, `description`, an unknown `format`) asks for nothing; `oneOf` is taken for `anyOf`. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from common.request import MAX_GRAMMAR_CHARS
from gateway.errors import clipped

MAX_DEPTH = 64  # schemas within schemas; the time that a grammar takes grows with its cube
MAX_COUNTED = 64  # of minProperties and maxProperties: each is so many grammars of all properties
_NEVER = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains",
    "minContains", "maxContains", "additionalItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_BY_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"}),
    "object": frozenset(
        {
            "properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties",
            "propertyNames", "minProperties", "maxProperties",
        }
    ),
}  # fmt: skip
_ALL = frozenset[str]().union(*_BY_TYPE.values())
# The first of these that a schema has is enforced, and nothing beside it.
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_FIXED_FORMATS = (
    "date-time", "date", "time", "duration", "email", "uuid", "uri", "ipv4", "ipv6", "hostname",
    "json-pointer", "relative-json-pointer", "uri-reference", "uri-template",
)  # fmt: skip
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties")
_TYPE_NAMES = {
    type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array",
    dict: "object",
}  # fmt: skip
_LITERALS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)  # of a pattern: escapes and classes
_LOOK_AHEAD = re.compile(r"\(\?[=!]")


def unenforceable(schema: Any, path: str = "", depth: int = 0) -> str | None:
    """Say what of a schema cannot be enforced, and where; None: all can be.

    Whether the schema is one at all is for xgrammar to say.
    """
    if type(schema) is not dict:
        return None
    if depth > MAX_DEPTH:
        return f"more than {MAX_DEPTH} schemas within each other"
    # Before it is walked: a million schemas would take seconds, in which no stream gets on.
    if depth == 0 and len(json.dumps(schema, ensure_ascii=False)) > 2 * MAX_GRAMMAR_CHARS:
        return f"more than {MAX_GRAMMAR_CHARS} characters of grammar"
    if wrong := _wrong(schema):
        return f"{wrong} (in the schema at {clipped(path or '/')})"
    inside = (unenforceable(part, f"{path}/{name}", depth + 1) for name, part in _parts(schema))
    return next(filter(None, inside), None)


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _MAPS:
        if type(schema.get(key)) is dict:
            yield from ((f"{key}/{name}", part) for name, part in schema[key].items())
    for key in _LISTS:
        if type(schema.get(key)) is list:
            yield from ((f"{key}/{i}", part) for i, part in enumerate(schema[key]))
    for key in _SINGLES:
        yield key, schema.get(key)
    if type(names := schema.get("propertyNames")) is dict:
        yield "propertyNames", {"type": "string"} | names


def _wrong(schema: dict[str, Any]) -> str | None:
    has = schema.keys()
    for key in _NEVER:
        if key in has:
            return f"{key!r} cannot be enforced"
    if schema.get("uniqueItems") not in (None, False):
        return "'uniqueItems' cannot be enforced"
    for key in _ALONE:
        if key in has:
            return _wrong_beside(schema, key)
    return _wrong_of_type(schema)


def _wrong_beside(schema: dict[str, Any], key: str) -> str | None:
    others = (_ALL | set(_ALONE)) & schema.keys() - {key}
    if key not in ("const", "enum") and "type" in schema:
        others |= {"type"}
    if others:
        return f"{min(others)!r} beside {key!r} cannot be enforced"
    if key in ("const", "enum") and "type" in schema:
        values = [schema["const"]] if key == "const" else schema["enum"]
        if type(values) is list and not all(_is_of(value, schema["type"]) for value in values):
            return f"{key!r} has a value that is not of the 'type' beside it"
    if key == "$ref" and schema["$ref"] != "#" and not str(schema["$ref"]).startswith("#/"):
        return "a $ref that is no path in this schema cannot be followed"
    if key == "allOf" and type(schema["allOf"]) is list and len(schema["allOf"]) > 1:
        return "'allOf' of several schemas cannot be enforced"
    return None


def _is_of(value: Any, kind: Any) -> bool:
    kinds = kind if type(kind) is list else [kind]
    whole = type(value) is int or (type(value) is float and value.is_integer())
    names = {"integer"} if whole else set()
    names.add(_TYPE_NAMES.get(type(value), ""))
    return any(type(each) is str and each in names for each in kinds)


def _wrong_of_type(schema: dict[str, Any]) -> str | None:
    has, kind = schema.keys(), schema.get("type")
    named = [each for each in (kind if type(kind) is list else [kind]) if type(each) is str]
    kinds = {"number" if each == "integer" else each for each in named}
    if kind is None:
        untyped = _BY_TYPE["string"] | _BY_TYPE["number"] | {"minProperties", "maxProperties"}
        if loose := untyped & has:
            return f"{min(loose)!r} without a type cannot be enforced"
        kinds = {"array", "object"}
    if "string" in kinds:
        if _looks_ahead(schema.get("pattern")):
            return "a 'pattern' that looks ahead cannot be enforced"
        lengths = {"minLength", "maxLength"} & has
        if lengths and ("pattern" in has or schema.get("format") in _FIXED_FORMATS):
            return f"{min(lengths)!r} beside a pattern or format cannot be enforced"
        if "pattern" in has and schema.get("format") in _FIXED_FORMATS:
            return "'pattern' beside a format cannot be enforced"
    if "multipleOf" in has and "number" in kinds:
        bounds = (_BY_TYPE["number"] - {"multipleOf"}) & has
        if bounds or kind != "integer":
            return "'multipleOf' cannot be enforced but for integers without a range"
    return _wrong_of_object(schema) if "object" in kinds else None


def _looks_ahead(pattern: Any) -> bool:
    """xgrammar leaves such conditions out, and says so on stderr alone."""
    return type(pattern) is str and _LOOK_AHEAD.search(_LITERALS.sub("", pattern)) is not None


def _wrong_of_object(schema: dict[str, Any]) -> str | None:
    properties, required = schema.get("properties") or {}, schema.get("required")
    for name in required if type(required) is list else ():
        if type(name) is str and name not in properties:
            return f"the required {clipped(name)!r} is not among the properties"
    if any(map(_looks_ahead, schema.get("patternProperties") or ())):
        return "a pattern of 'patternProperties' that looks ahead cannot be enforced"
    for key in ("propertyNames", "patternProperties"):  # a name that is in both would match one of them
        if properties and schema.get(key):
            return f"{key!r} beside 'properties' cannot be enforced"
    for key in ("minProperties", "maxProperties"):
        if type(schema.get(key)) is int and schema[key] > MAX_COUNTED:
            return f"{key!r} is at most {MAX_COUNTED}"
    return None
