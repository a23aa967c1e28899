"""A grammar on its way through a gateway, a decode node and a prefill node, and what goes wrong there.

The oracle is transformers with the likeliest token that a predicate allows (tests/engine/languages.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.engine.grammar_compiler import GrammarRefusal
from common.messages import Commit, Role
from common.request import FinishReason, Grammar, GrammarKind, SamplingParams
from decode_node.entry import Phase
from tests.engine.languages import Language, compiled, greedy, letters, text_of, words
from tests.faults.world import World, world
from tests.faults.world_asked import Asked
from tests.faults.world_cases import check_answer, check_next, prompt
from tests.faults.world_engines import SIZES, engine_of
from tests.faults.world_states import PLANES
from tests.tiny import IM_END

PROMPT = prompt(1, 40)
LANGUAGES = (words("yes", "no", "maybe"), letters("ab", 20), words("the quick brown fox", "the lazy dog"))


def have_compiled(
    folder: Path, *grammars: Grammar, at: tuple[Role, ...] = (Role.DECODE, Role.PREFILL)
) -> None:
    """Compile before the world starts, whose clock does not wait for it."""
    for role in at:
        for grammar in grammars:
            compiled(engine_of(folder, role, SIZES).grammars, grammar)


def ask(w: World, grammar: Grammar, max_tokens: int = 40, **fields: Any) -> list[Asked]:
    return w.ask_for(PROMPT, SamplingParams(max_tokens, temperature=0.0, grammar=grammar, **fields))


def edit_first_token(token: int) -> Callable[[Any], Any]:
    def edit(message: Any) -> Any:
        if not isinstance(message, Commit):
            return message
        return replace(message, choices=(replace(message.choices[0], first_token=token, finish=None),))

    return edit


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("overlap", [False, True])
def test_it_is_handed_over_at_each_token(tiny_model: Path, plane: str, overlap: bool) -> None:
    have_compiled(tiny_model, *(language.grammar for language in LANGUAGES))
    with world(tiny_model, plane=plane, overlap=overlap) as w:
        for language in LANGUAGES:
            cases = [(n, ask(w, language.grammar, n)[0]) for n in (1, 2, 3, 40)]
            w.until_ended(*(asked for _, asked in cases))
            for max_tokens, asked in cases:
                right = greedy(tiny_model, PROMPT, language, max_tokens)
                assert asked.tokens == right
                assert (asked.finish is FinishReason.STOP) == (right[-1] == IM_END)
        check_next(tiny_model, w)
        w.until(w.is_clean)


@pytest.mark.parametrize("overlap", [False, True])
def test_each_choice_has_it(tiny_model: Path, overlap: bool) -> None:
    language = letters("abcde", 8)
    have_compiled(tiny_model, language.grammar)
    sampling = SamplingParams(20, seed=4, grammar=language.grammar)
    with world(tiny_model, overlap=overlap) as w:
        choices = w.ask_for(PROMPT, replace(sampling, num_choices=3))
        singles = [w.ask_for(PROMPT, replace(sampling, choice=i))[0] for i in range(3)]
        w.until_ended(*choices, *singles)
        assert [asked.tokens for asked in choices] == [asked.tokens for asked in singles]
        assert len({tuple(asked.tokens) for asked in choices}) == 3
        assert all(language.is_whole(text_of(tiny_model, asked.tokens)) for asked in choices)
        w.until(w.is_clean)


@pytest.mark.parametrize("where", [Role.DECODE, Role.PREFILL])
def test_its_client_leaves_while_it_is_compiled(tiny_model: Path, where: Role) -> None:
    grammar = Grammar(GrammarKind.REGEX, f"left at {where.value}")
    if where is Role.PREFILL:
        have_compiled(tiny_model, grammar, at=(Role.DECODE,))
    lock = engine_of(tiny_model, where, SIZES).grammars._lock  # it is not done meanwhile
    with world(tiny_model) as w, lock:
        (asked,) = ask(w, grammar)
        if where is Role.DECODE:
            w.until(lambda: w.phase(asked) is Phase.COMPILING)
        else:
            w.until(lambda: bool(w.p._scheduler.compiling()))
            assert w.phase(asked) is Phase.TRANSFERRING
        other = w.ask(prompt(2, 20), 3)
        w.until_ended(other)  # nobody waits for it
        check_answer(tiny_model, other)
        w.abort(asked)
        w.until(w.is_clean)
        assert (w.d._scheduler.compiling(), w.p._scheduler.compiling()) == ([], [])


def test_what_cannot_be_compiled_is_refused_by_either_node(tiny_model: Path) -> None:
    wrong = Grammar(GrammarKind.REGEX, "[a-z")
    have_compiled(tiny_model, wrong)
    known_to_one = Grammar(GrammarKind.REGEX, "known to one")
    have_compiled(tiny_model, known_to_one, at=(Role.DECODE,))
    engine_of(tiny_model, Role.PREFILL, SIZES).grammars._cache[known_to_one] = GrammarRefusal(400, "unknown")
    with world(tiny_model) as w:
        for grammar, reason in ((wrong, "Unclosed"), (known_to_one, "unknown")):
            (asked,) = ask(w, grammar)
            w.until_ended(asked)
            assert asked.error is not None
            assert asked.error.status == 400
            assert reason in asked.error.message
        w.until(w.is_clean)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_first_token_that_is_not_in_it_ends_the_request_and_no_node(
    tiny_model: Path, overlap: bool
) -> None:
    language: Language = letters("ab", 20)
    have_compiled(tiny_model, language.grammar)
    wrong = next(i for i in range(3, 300) if text_of(tiny_model, [i]) == "z")
    with world(tiny_model, overlap=overlap, edit=edit_first_token(wrong)) as w:
        (asked,) = ask(w, language.grammar)
        w.until_ended(asked)
        assert asked.error is not None
        assert asked.error.status == 500
        assert "grammar" in asked.error.message
        assert asked.tokens == [wrong]
        w.until(w.is_clean)
