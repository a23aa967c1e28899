"""A grammar is compiled beside the loop, once; what cannot be, or costs too much, is refused with why."""

from __future__ import annotations

import json
import select
from pathlib import Path

import pytest

from common.engine import grammar_compiler
from common.engine.grammar_compiler import GrammarCompiler, GrammarRefusal
from common.request import Grammar, GrammarKind
from tests.engine.languages import compiled
from tests.tiny import IM_END, VOCAB_SIZE

SLOW = json.dumps(
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}  # a second
)


@pytest.fixture(scope="module")
def compiler(tiny_model: Path) -> GrammarCompiler:
    return GrammarCompiler(tiny_model, VOCAB_SIZE, (IM_END,))


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (GrammarKind.REGEX, "[a-z", "Unclosed"),
        (GrammarKind.REGEX, "(?=a)b", "Lookahead"),
        (GrammarKind.JSON_SCHEMA, '{"type":', "Expecting value"),
        (GrammarKind.JSON_SCHEMA, '{"type": "sheep"}', "sheep"),
        (GrammarKind.JSON_SCHEMA, "[" * 30_000, "recursion"),
        (GrammarKind.EBNF, "root ::= sheep", "sheep"),
        (GrammarKind.EBNF, "root ::= " + "(" * 30_000, "EBNF"),
        (GrammarKind.STRUCTURAL_TAG, '{"type": "sheep"}', "structural_tag"),
        (GrammarKind.STRUCTURAL_TAG, "sheep", "Expecting value"),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_reason(
    compiler: GrammarCompiler, kind: GrammarKind, text: str, reason: str
) -> None:
    for _ in range(2):  # compiled, and remembered
        answer = compiled(compiler, Grammar(kind, text))
        assert isinstance(answer, GrammarRefusal)
        assert answer.status == 400
        assert reason in answer.reason
        assert "/project/" not in answer.reason
        assert "\n" not in answer.reason


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, "a+"),
        (GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
        (GrammarKind.JSON_SCHEMA, "{}"),
        (GrammarKind.EBNF, 'root ::= "a" root | "b"'),
        (
            GrammarKind.STRUCTURAL_TAG,
            '{"type": "structural_tag", "format": {"type": "const_string", "value": "sheep"}}',
        ),
    ],
)
def test_each_kind_is_compiled_once(compiler: GrammarCompiler, kind: GrammarKind, text: str) -> None:
    answer = compiled(compiler, Grammar(kind, text))
    assert not isinstance(answer, GrammarRefusal)
    assert compiler.compile(Grammar(kind, text)) is answer


def test_a_model_without_eos_or_without_text_has_no_grammars(tiny_model: Path, tmp_path: Path) -> None:
    grammar = Grammar(GrammarKind.REGEX, "a+")
    without_eos = compiled(GrammarCompiler(tiny_model, VOCAB_SIZE, ()), grammar)
    without_text = compiled(GrammarCompiler(tmp_path, VOCAB_SIZE, (IM_END,)), grammar)
    assert isinstance(without_eos, GrammarRefusal)
    assert isinstance(without_text, GrammarRefusal)
    assert (without_eos.status, without_text.status) == (400, 400)
    assert "end-of-sequence" in without_eos.reason
    assert "tokenizer" in without_text.reason


def test_what_takes_too_long_is_given_up_and_holds_up_nobody(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "COMPILE_CPU_S", 0.05)
    slow = [Grammar(GrammarKind.JSON_SCHEMA, SLOW + " " * i) for i in range(2)]
    for grammar in slow[:1]:
        answer = compiled(compiler, grammar)
        assert isinstance(answer, GrammarRefusal)
        assert answer.status == 400
        assert "too large" in answer.reason
    assert not isinstance(compiled(compiler, Grammar(GrammarKind.REGEX, "b")), GrammarRefusal)
    monkeypatch.setattr(grammar_compiler, "MAX_LOST", 1)
    answer = compiled(compiler, slow[1])
    assert isinstance(answer, GrammarRefusal)
    assert answer.status == 503
    for job in compiler._lost:
        job.thread.join()
    compiler.collect()
    assert select.select(compiler.pollables(), (), (), 0)[0] == [], "a loop would not sleep any more"
    monkeypatch.undo()
    assert not isinstance(compiled(compiler, Grammar(GrammarKind.REGEX, "c")), GrammarRefusal)


def test_what_waits_is_not_started_behind_what_was_given_up(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("COMPILE_CPU_S", 0.05), ("MAX_THREADS", 1), ("MAX_LOST", 1)):
        monkeypatch.setattr(grammar_compiler, name, value)
    slow = [Grammar(GrammarKind.JSON_SCHEMA, SLOW + " " * i) for i in range(10, 13)]
    assert [compiler.compile(grammar) for grammar in slow] == [None] * 3
    answers = [compiled(compiler, grammar) for grammar in slow]
    assert [isinstance(answer, GrammarRefusal) and answer.status for answer in answers] == [400, 503, 503]
    assert len(compiler._lost) == 1
    for job in compiler._lost:
        job.thread.join()
    compiler.collect()


def test_what_is_dear_to_draw_from_is_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "STEP_CPU_S", 0.0)  # so that every grammar is
    answer = compiled(compiler, Grammar(GrammarKind.REGEX, "(a|aa)+"))
    assert isinstance(answer, GrammarRefusal)
    assert "too ambiguous" in answer.reason


def test_the_cache_is_bounded(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_CACHED", 3)
    compiler = GrammarCompiler(tiny_model, VOCAB_SIZE, (IM_END,))
    first, *others = (Grammar(GrammarKind.REGEX, f"a{{{i}}}") for i in range(1, 6))
    compiled(compiler, first)
    for grammar in others:
        compiled(compiler, grammar)
    assert len(compiler._cache) == 3
    assert compiler.compile(first) is None  # once more
