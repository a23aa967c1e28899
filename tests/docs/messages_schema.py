"""What is answered to a JSON schema, or another grammar, that cannot be enforced."""

# ruff: noqa: E501  # texts of tables

from __future__ import annotations

from typing import Any

from tests.docs.messages import NotTried, Row
from tests.docs.messages_http import TOOL, json_schema
from tests.docs.provoke import Recipe
from tests.docs.provoke_served import ask, chat


def _nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": _nested(depth - 1)} if depth else {"type": "string"}


def _object(**has: object) -> Recipe:
    return json_schema({"type": "object", **has})


SCHEMAS = [
    Row(
        {
            "<keyword> cannot be enforced": _object(**{"not": {}}),
            "'uniqueItems' cannot be enforced": json_schema({"type": "array", "uniqueItems": True}),
            "<keyword> beside <keyword> cannot be enforced": json_schema({"$ref": "#", "minimum": 1}),
            "<keyword> has a value that is not of the 'type' beside it": json_schema({"type": "string", "enum": [1]}),
            "a $ref that is no path in this schema cannot be followed": json_schema({"$ref": "http://x/y"}),
            "'allOf' of several schemas cannot be enforced": json_schema({"allOf": [{"type": "string"}, {"type": "null"}]}),
            "<keyword> without a type cannot be enforced": json_schema({"minimum": 1}),
            "a 'pattern' that looks ahead cannot be enforced": json_schema({"type": "string", "pattern": "(?=a)b"}),
            "<keyword> beside a pattern or format cannot be enforced": json_schema(
                {"type": "string", "pattern": "a+", "minLength": 2}
            ),
            "'pattern' beside a format cannot be enforced": json_schema(
                {"type": "string", "pattern": "a+", "format": "date"}
            ),
            "'multipleOf' cannot be enforced but for integers without a range": json_schema(
                {"type": "number", "multipleOf": 2}
            ),
            "the required <name> is not among the properties": _object(required=["a"]),
            "a pattern of 'patternProperties' that looks ahead cannot be enforced": _object(
                patternProperties={"(?=a)b": {}}
            ),
            "<keyword> beside 'properties' cannot be enforced": _object(
                properties={"a": {"type": "null"}}, propertyNames={"pattern": "a"}
            ),
            "<keyword> is at most <number>": _object(minProperties=1000),
            "<reason> (in the schema at <path>)": _object(properties={"a": {"not": {}}}),
            "response_format: <reason>": chat(
                {
                    "tools": [TOOL],
                    "response_format": {
                        "type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}},
                    },
                }
            ),
        },
        "A JSON schema says something that answers cannot be held to while they are written. It is refused rather than "
        "ignored; the message ends with the place in the schema.",
        "Leave it out, and check it in your program when the answer is there; often another form says the same "
        "(`anyOf` for `not`, a range for `multipleOf`).",
    ),
    Row(
        {
            "<field>: more than <number> characters of grammar": ask({"structured_outputs": {"regex": "a" * 300_000}}),
            "more than <number> characters of grammar": _object(description="x" * 600_000),
            "<field>: a pattern, or the name of a property, of more than <number> characters": _object(
                properties={"a": {"type": "string", "pattern": "a" * 5000}}
            ),
            "<field>: more than <number> rules": ask(
                {"structured_outputs": {"grammar": "root ::= a\n" + "a ::= 'a'\n" * 300}}
            ),
            "more than <number> schemas within each other": json_schema(
                _nested(70)
            ),
            "the grammar is too large: it is not compiled within <time> s": NotTried("it takes seconds"),
            "the grammar is too large: <size> bytes compiled": NotTried("it takes seconds"),
            "the grammar is too ambiguous: its token <number> takes <time> ms, more than <time>": NotTried(
                "tests/engine/test_grammar_compiler.py tries it"
            ),
            "the grammar leads nowhere: no token of the model goes on after <number>": NotTried(
                "tests/engine/test_grammar_compiler.py tries it"
            ),
            "too many grammars are being compiled": NotTried("tests/engine/test_grammar_compiler.py tries it"),
            "no grammar can be compiled: <reason>": NotTried("xgrammar would have to be missing"),
            "this model has no end-of-sequence token: a grammar could not end": ask(
                {"structured_outputs": {"regex": "a"}}, server="no end"
            ),
        },
        "A grammar would take too much time or memory, for this request and for all others beside it.",
        "Make it smaller: fewer branches, shorter patterns, no counted repetitions of large parts. For 503, come again.",
    ),
]  # fmt: skip
