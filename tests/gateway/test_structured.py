"""What an answer must match: which requests become which grammar, and which are refused, with the reason."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from xgrammar import Grammar as Parsed
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo, VocabType

from common.errors import RequestRejected
from common.request import MAX_GRAMMAR_CHARS, Grammar, GrammarKind
from gateway.fake import Script
from gateway.openai_api import parse_chat, parse_completion
from gateway.schema_check import MAX_DEPTH, unenforceable
from gateway.structured import check_grammar
from gateway.text import TextPipeline
from tests.gateway.conftest import MODEL, WAIT_S, LiveServer
from tests.tiny import IM_END

USER = {"role": "user", "content": "hi"}
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
AGE = {"type": "object", "properties": {"age": INTEGER}, "required": ["age"]}
_BYTES = TokenizerInfo([bytes([i]) for i in range(256)] + [b""], VocabType.RAW, stop_token_ids=[256])


def matches(grammar: Grammar | None, text: str) -> bool:
    """Ask xgrammar whether a grammar allows a whole text."""
    assert grammar is not None
    compiler = GrammarCompiler(_BYTES, max_threads=1)
    compiled = {
        GrammarKind.JSON_SCHEMA: compiler.compile_json_schema,
        GrammarKind.REGEX: compiler.compile_regex,
        GrammarKind.EBNF: compiler.compile_grammar,
        GrammarKind.STRUCTURAL_TAG: compiler.compile_structural_tag,
    }[grammar.kind](grammar.text)
    matcher = GrammarMatcher(compiled)
    return bool(matcher.accept_string(text)) and bool(matcher.accept_token(256))


def chat_grammar(**fields: Any) -> Grammar | None:
    grammar = parse_chat({"model": "m", "messages": [USER], **fields}).grammar
    if grammar is not None:
        check_grammar(grammar, "field")
    return grammar


def structured(**fields: Any) -> Grammar | None:
    grammar = parse_completion({"model": "m", "prompt": "hi", "structured_outputs": fields}).grammar
    assert grammar is not None
    check_grammar(grammar, "field")
    return grammar


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def test_response_formats() -> None:
    assert chat_grammar(response_format={"type": "text"}) is None
    anything = chat_grammar(response_format={"type": "json_object"})
    assert matches(anything, '{"a": [1, {"b": null}]}')
    assert not matches(anything, "[1]")
    for strict in (True, False, None):
        age = chat_grammar(response_format=json_schema(AGE, strict=strict))
        assert age == Grammar(GrammarKind.JSON_SCHEMA, json.dumps(AGE, separators=(",", ":")))
        assert matches(age, '{"age": 5}')
        assert not matches(age, '{"age": "5"}')
    without = {"type": "json_schema", "json_schema": {"name": "x"}}
    assert matches(chat_grammar(response_format=without), '{"a": 1}')


def test_structured_outputs() -> None:
    for schema in (AGE, json.dumps(AGE)):
        assert structured(json=schema) == chat_grammar(response_format=json_schema(AGE))
    assert matches(structured(json_object=True), '{"a": 1}')
    assert matches(structured(regex="[a-c]{2}|x"), "ab")
    assert not matches(structured(regex="[a-c]{2}|x"), "abx")
    assert matches(structured(grammar='root ::= "a" word\nword ::= [b-d]+'), "abcd")
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
    for given in (tag, json.dumps(tag)):
        assert matches(structured(structural_tag=given), "a")


@pytest.mark.parametrize(
    "choices",
    [["yes", "no"], ['"', "\\", "\\n", "\n", "[a]", "é😀", "\0", "a|b", "'", "<tool_call>", "root ::= x"]],
)
def test_a_choice_is_taken_word_for_word(choices: list[str]) -> None:
    grammar = structured(choice=choices)
    for choice in choices:
        assert matches(grammar, choice)
    for other in ("", "n", "yesno", "b", "\\\\", "x"):
        assert other in choices or not matches(grammar, other)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": json_schema([])}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(AGE, colour=1)}, "response_format.json_schema.colour"),
        ({"response_format": json_schema({"not": TEXT})}, "response_format"),
        ({"response_format": json_schema({"type": "wizard"})}, "response_format"),
        ({"response_format": json_schema(AGE), "min_tokens": 3}, "min_tokens"),
        ({"response_format": json_schema(AGE), "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": json_schema(AGE)}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"lark": "a"}}, "structured_outputs.lark"),
        ({"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": None}, "min_tokens": 1}, "min_tokens"),
        ({"guided_json": AGE}, "guided_json"),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        chat_grammar(**fields)
    assert caught.value.status == 400
    assert caught.value.param in (param, "field")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"regex": "(a"}, "parenthes|closed"),
        ({"regex": "(?=a)b"}, "Lookahead"),
        ({"regex": "(" * 3000 + ")" * 3000}, "Nest|nest|depth"),
        ({"grammar": 'x ::= "a"'}, 'root rule with name "root"'),
        ({"grammar": 'root ::= "a" other'}, "other"),
        ({"grammar": "root ::= r0\n" + 'r0 ::= "a"\n' * 256}, "more than 256 rules"),
        ({"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000}, "limit"),
        ({"json": {"$ref": "#/$defs/missing"}}, "missing"),
        ({"json": {"$ref": "#"}}, "ircular"),
        ({"json": {"enum": []}}, "enum"),
        ({"json": {"type": {"a": 1}}}, "(?i)type"),
        ({"json": {"type": [{"a": 1}]}}, "(?i)type"),
        ({"json": {"type": "object", "properties": [], "required": {}}}, "properties"),
        ({"json": False}, "cannot accept any value"),
        ({"json": {"type": "array", "items": INTEGER, "minItems": 10**15}}, "2147483647"),
        ({"structural_tag": {}}, "format"),
    ],
)
def test_what_xgrammar_refuses_is_told_with_its_reason(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestRejected, match=reason) as caught:
        structured(**fields)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_grammar", "field")
    assert "cpp" not in caught.value.message
    assert caught.value.message.isprintable()


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = INTEGER
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": INTEGER}, "'not'"),
        ({"allOf": [INTEGER, {"minimum": 3}]}, "'allOf' of several"),
        ({"if": INTEGER, "then": TEXT}, "'if'"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "contains": INTEGER}, "'contains'"),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "at /items"),
        (AGE | {"dependentRequired": {"age": ["b"]}}, "'dependentRequired'"),
        (AGE | {"required": ["name"]}, "'name' is not among the properties"),
        (AGE | {"anyOf": [{"required": ["age"]}]}, "'properties' beside 'anyOf'"),
        ({"type": "string", "anyOf": [{"minLength": 4}]}, "'type' beside 'anyOf'"),
        ({"anyOf": [INTEGER], "oneOf": [TEXT]}, "beside 'anyOf'"),
        ({"$ref": "http://example.com"}, r"\$ref"),
        ({"$ref": "#anchor"}, r"\$ref"),
        ({"$defs": {"x": TEXT}, "$ref": "#/$defs/x", "maxLength": 3}, r"'maxLength' beside '\$ref'"),
        ({"minLength": 3}, "without a type"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "beside a pattern or format"),
        ({"type": "string", "pattern": "^(?!bad)[a-z]+$"}, "'pattern' that looks ahead"),
        ({"type": "object", "patternProperties": {"^a(?=b)": TEXT}}, "'patternProperties' that looks ahead"),
        ({"type": "string", "format": "date", "minLength": 3}, "beside a pattern or format"),
        ({"type": "number", "multipleOf": 3}, "'multipleOf'"),
        ({"type": "integer", "multipleOf": 3, "minimum": 4}, "'multipleOf'"),
        (AGE | {"propertyNames": {"maxLength": 3}}, "'propertyNames'"),
        (AGE | {"patternProperties": {"^a": TEXT}}, "'patternProperties' beside"),
        ({"type": "integer", "enum": [1, "x"]}, "'enum' has a value"),
        ({"type": "string", "enum": ["a", None]}, "'enum' has a value"),
        ({"type": ["string", "null"], "const": False}, "'const' has a value"),
        ({"type": "object", "additionalProperties": INTEGER, "minProperties": 500}, "'minProperties'"),
        (nested(MAX_DEPTH + 1), f"more than {MAX_DEPTH} schemas"),
    ],
)
def test_what_cannot_be_enforced_is_refused(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestRejected, match=reason):
        structured(json=schema)
    told = {
        "description": "x",
        "title": "y",
        "default": 3,
        "examples": [1],
        "$comment": "z",
        "format": "colour",
    }
    assert unenforceable(INTEGER | told) is None
    assert unenforceable(nested(MAX_DEPTH)) is None
    assert unenforceable({"type": ["string", "null"], "enum": ["a", None]}) is None
    assert unenforceable({"type": ["integer", "number"], "enum": [1, 2.0, 2.5]}) is None


def test_what_looks_like_a_look_ahead_is_none() -> None:
    for pattern in (r"[(?!]+", r"\(?!", r"\(?=", r"(a)?=", r"[\](?!]"):
        assert unenforceable({"type": "string", "pattern": pattern}) is None


@pytest.mark.parametrize("pattern", ["(" * 32_000 + "a" + ")" * 32_000, "a" + "*" * 65_000, "(a" * 5000])
def test_a_pattern_that_would_end_the_process_is_not_read(pattern: str) -> None:
    texts = {"type": "string", "pattern": pattern}
    names = {"type": "object", "patternProperties": {pattern: {}}}
    for schema in (texts, names, {"type": "array", "items": texts}):
        tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
        for given in ({"json": schema}, {"structural_tag": tag}):
            with pytest.raises(RequestRejected, match=r"pattern|characters of grammar"):
                structured(**given)
    long = {"enum": ["x" * 60_000], "description": "y" * 5000}
    assert structured(json=long) is not None


@pytest.mark.parametrize("where", ["json", "text"])
def test_a_schema_that_is_too_large_is_not_walked(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.schema_check._wrong", lambda schema: pytest.fail("walked"))
    large = {"type": "object", "properties": {f"p{i}": {} for i in range(50_000)}}
    with pytest.raises(RequestRejected, match="characters of grammar"):
        structured(json=large if where == "json" else json.dumps(large))


def test_xgrammar_still_ignores_what_is_refused_here() -> None:
    """Where it learned one of these, it may be accepted."""
    looks_ahead = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"string","pattern":"(?!b)[a-z]"}')
    assert matches(looks_ahead, '"b"')
    for extra in ({"uniqueItems": True}, {"contains": {"const": 4}}):
        plain = {"type": "array", "items": INTEGER}
        assert str(Parsed.from_json_schema(json.dumps(plain | extra))) == str(
            Parsed.from_json_schema(json.dumps(plain))
        )


@pytest.fixture
def api(server: LiveServer) -> Any:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S) as api:
        yield api


class Person(BaseModel):
    """What the client wants back."""

    name: str
    age: int | None
    friends: list[Person] = []


def test_the_official_client_parses_into_its_model(
    api: openai.OpenAI, server: LiveServer, text: TextPipeline
) -> None:
    said = '{"name": "Ada", "age": 36, "friends": []}'
    ids = [*text.encode([said], special_tokens=False)[0], IM_END]
    server.nodes.script = Script(lambda _: ids, eos_token_ids=(IM_END,))
    answer = api.chat.completions.parse(model=MODEL, messages=[USER], response_format=Person)  # type: ignore[list-item]
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
    grammar = server.nodes.streams[0].sampling.grammar
    assert matches(grammar, said)
    assert not matches(grammar, re.sub("36", '"36"', said))


def test_prompts_do_not_wait_behind_grammars(
    api: openai.OpenAI, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    monkeypatch.setattr("gateway.endpoints.check_grammar", lambda grammar, param: held.wait(WAIT_S))
    body = {"structured_outputs": {"regex": "a"}}
    with ThreadPoolExecutor(64) as clients:  # more than a gateway has threads
        waiting = [
            clients.submit(api.completions.create, model=MODEL, prompt="a", max_tokens=1, extra_body=body)
            for _ in range(64)
        ]
        for _ in range(3):
            assert api.completions.create(model=MODEL, prompt="a", max_tokens=1).choices
        assert not any(one.done() for one in waiting)
        held.set()
        assert all(one.result().choices for one in waiting)


def test_a_bad_grammar_reaches_no_node(api: openai.OpenAI, server: LiveServer) -> None:
    for body, param in (
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"response_format": json_schema({"type": "wizard"})}, "response_format"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            api.chat.completions.create(model=MODEL, messages=[USER], extra_body=body)  # type: ignore[list-item]
        assert (refused.value.param, refused.value.code) == (param, "invalid_grammar")
    assert server.nodes.streams == []
