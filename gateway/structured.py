"""What an answer must match, as a client says it -> the grammar that the nodes enforce.

`response_format` is OpenAI's, `structured_outputs` vLLM's. The check with xgrammar blocks, and is made in the
thread that tokenizes: a node that gets a grammar compiles it for itself, for its model's tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import from_json

from common.errors import RequestRejected
from common.request import MAX_GRAMMAR_CHARS, Grammar, GrammarKind
from gateway.errors import clipped
from gateway.fields import Strict
from gateway.schema_check import unenforceable

MAX_CHOICES_OF_TEXT = 1024
MAX_RULES = 256  # of EBNF: 2,400 rules of two branches each take a minute to compile
MAX_PATTERN_CHARS = 4096  # xgrammar reads those of a schema recursively: 32,000 parentheses end the process
# In JSON as `to_text` writes it; a pattern may be the name of a property (`patternProperties`).
_CHARS = r'"(?:[^"\\]|\\.)'
_LONG_PATTERN = re.compile(
    rf'"pattern":{_CHARS}{{{MAX_PATTERN_CHARS + 1}}}|{_CHARS}{{{MAX_PATTERN_CHARS + 1},}}":'
)
NAME_PATTERN = "^[a-zA-Z0-9_-]{1,64}$"
_ORIGIN = re.compile(r"^\[[0-9:]+\] \S+?:[0-9]+: ")  # where in xgrammar it was found
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def _schema(value: Any) -> Any:
    """Take a schema, or a text that is one, as in vLLM."""
    if type(value) is str:
        try:
            value = from_json(value, allow_inf_nan=False)
        except ValueError:
            raise ValueError("is not valid JSON") from None
    if type(value) not in (dict, bool):
        raise ValueError("must be a JSON schema")
    return value


class NamedSchema(Strict):
    """A JSON schema with a name."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    description: str | None = None
    schema_: Annotated[
        dict[str, Any] | None, Field(alias="schema", description="without one, any object")
    ] = None
    strict: Annotated[bool | None, Field(description="the schema is enforced, whatever this says")] = None


class ResponseFormat(Strict):
    """The form of a chat's answers."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[NamedSchema | None, Field(description="of type json_schema")] = None

    @model_validator(mode="after")
    def _has_the_schema_of_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type json_schema has a json_schema, and no other type has one")
        return self

    def grammar(self) -> Grammar | None:
        """Return the grammar; None for any text."""
        return None if (schema := self.schema()) is None else json_grammar(schema, "response_format")

    def schema(self) -> dict[str, Any] | None:  # type: ignore[override]  # pydantic's own is deprecated
        """Return the schema of the answer; None for any text."""
        if self.type == "text":
            return None
        given = None if self.json_schema is None else self.json_schema.schema_
        return ANY_OBJECT if given is None else given


class StructuredOutputs(Strict):
    """What the answer must match: exactly one of these. As in vLLM."""

    json_: Annotated[
        dict[str, Any] | bool | None,
        BeforeValidator(_schema),
        WithJsonSchema(
            {"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}, {"type": "null"}]}
        ),
        Field(alias="json", description="a JSON schema, as an object or as text"),
    ] = None
    regex: Annotated[str | None, Field(min_length=1, description="of the whole answer")] = None
    choice: Annotated[
        list[Annotated[str, Field(min_length=1)]] | None,
        Field(min_length=1, max_length=MAX_CHOICES_OF_TEXT, description="the answer is one of these"),
    ] = None
    grammar: Annotated[
        str | None, Field(min_length=1, description="in GBNF, llama.cpp's EBNF; its root is `root`")
    ] = None
    json_object: Annotated[Literal[True] | None, Field(description="any JSON object")] = None
    structural_tag: Annotated[
        dict[str, Any] | None,
        BeforeValidator(_schema),
        WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}),
        Field(description="xgrammar's, as an object or as text"),
    ] = None

    def to_grammar(self) -> Grammar:
        """Return the grammar."""
        where = "structured_outputs"
        if self.json_ is not None:
            return json_grammar(self.json_, f"{where}.json")
        if self.json_object:
            return json_grammar(ANY_OBJECT, f"{where}.json_object")
        if self.regex is not None:
            return bounded(GrammarKind.REGEX, self.regex, f"{where}.regex")
        if self.grammar is not None:
            return bounded(GrammarKind.EBNF, self.grammar, f"{where}.grammar")
        if self.structural_tag is not None:
            return bounded(
                GrammarKind.STRUCTURAL_TAG, to_text(self.structural_tag), f"{where}.structural_tag"
            )
        texts = [{"type": "const_string", "value": text} for text in self.choice or ()]
        return structural_tag({"type": "or", "elements": texts}, f"{where}.choice")


def exactly_one(given: BaseModel) -> None:
    """Refuse none, and several.

    Raises:
        RequestRejected: naming `structured_outputs`.
    """
    names = [
        field.alias or name
        for name, field in type(given).model_fields.items()
        if getattr(given, name) is not None
    ]
    if len(names) != 1:
        has = "none of them" if not names else " and ".join(names)
        raise RequestRejected(
            f"structured_outputs has exactly one of its fields, not {has}", param="structured_outputs"
        )


def to_text(value: Any) -> str:
    """Write JSON as it is sent to the nodes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def bounded(kind: GrammarKind, text: str, param: str) -> Grammar:
    """Return a grammar that can be sent to the nodes.

    Raises:
        RequestRejected: it is too long, or a pattern in it.
    """
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestRejected(f"{param}: more than {MAX_GRAMMAR_CHARS} characters of grammar", param=param)
    if kind in (GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG) and _LONG_PATTERN.search(text):
        reason = f"{param}: a pattern, or the name of a property, of more than {MAX_PATTERN_CHARS} characters"
        raise RequestRejected(reason, param=param, code="invalid_grammar")
    return Grammar(kind, text)


def json_grammar(schema: dict[str, Any] | bool, param: str) -> Grammar:
    """Return the grammar of a JSON schema that can be enforced.

    Raises:
        RequestRejected: it cannot.
    """
    if reason := unenforceable(schema):
        raise RequestRejected(f"{param}: {reason}", param=param, code="invalid_grammar")
    return bounded(GrammarKind.JSON_SCHEMA, to_text(schema), param)


def structural_tag(form: dict[str, Any], param: str) -> Grammar:
    """Return the grammar of one of xgrammar's formats."""
    return bounded(GrammarKind.STRUCTURAL_TAG, to_text({"type": "structural_tag", "format": form}), param)


def check_grammar(grammar: Grammar, param: str) -> None:
    """Have xgrammar read a grammar. Blocks; lets go of the interpreter while it works.

    Raises:
        RequestRejected: 400 with xgrammar's reason.
    """
    if grammar.kind is GrammarKind.EBNF and grammar.text.count("::=") > MAX_RULES:
        reason = f"{param}: more than {MAX_RULES} rules"
        raise RequestRejected(reason, param=param, code="invalid_grammar")
    from xgrammar import Grammar as Parsed  # loads slowly, and few servers need it

    parsers: dict[GrammarKind, Callable[[str], Any]] = {
        GrammarKind.JSON_SCHEMA: Parsed.from_json_schema,
        GrammarKind.REGEX: Parsed.from_regex,
        GrammarKind.EBNF: Parsed.from_ebnf,
        GrammarKind.STRUCTURAL_TAG: Parsed.from_structural_tag,
    }
    try:
        parsers[grammar.kind](grammar.text)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = clipped(_ORIGIN.sub("", str(error).strip()))
        raise RequestRejected(f"{param}: {reason}", param=param, code="invalid_grammar") from None
