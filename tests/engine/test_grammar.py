"""With a grammar, a request draws the likeliest tokens that it allows, in any batch and any order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch

from common.config import EngineConfig, ModelConfig
from common.engine.batch import ForwardMode
from common.engine.loader import Engine, load_engine
from common.request import Grammar, GrammarKind, SampledToken, SamplingParams
from decode_node.entry import RequestKey
from tests.engine.languages import Language, compiled, greedy, letters, load, text_of, words
from tests.engine.test_mixed import BUDGET, MAX_RUNNING, PAGE, Node, prompts
from tests.model.paged import transformers_greedy
from tests.tiny import IM_END

LANGUAGES = (
    words("yes", "no", "maybe"),
    letters("ab", 9),
    words("the quick brown fox", "the lazy dog", "she sells sea shells"),
    letters("xyz ", 14),
)
MAX_TOKENS = 24
PLAIN = SamplingParams(MAX_TOKENS, temperature=0.0, ignore_eos=True)
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["fox", "dog"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "far": {"type": "boolean"},
    },
    "required": ["kind", "count", "far"],
}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return make_engine(tiny_model)


def make_engine(model: Path) -> Engine:
    config = EngineConfig(
        page_size=PAGE, kv_pages=400, max_running=MAX_RUNNING, prefill_budget=BUDGET, debug_checks=True
    )
    return load_engine(model, ModelConfig(str(model), dtype="float32"), config)


def submit(node: Node, number: int, prompt: list[int], sampling: SamplingParams) -> None:
    """Queue a request, its grammar compiled."""
    node.submit(number, prompt, sampling)
    if sampling.grammar is not None:
        node.scheduler.compiled(RequestKey(1, number), compiled(node.engine.grammars, sampling.grammar))


def with_language(language: Language, **changes: object) -> SamplingParams:
    return replace(PLAIN, ignore_eos=False, grammar=language.grammar, **changes)


def tokens(answer: list[SampledToken]) -> list[int]:
    return [sampled.token for sampled in answer]


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_the_likeliest_of_those_allowed(engine: Engine, tiny_model: Path, overlap: bool) -> None:
    node = Node(engine, overlap=overlap, num_pages=400)
    asked = prompts()
    for number, prompt in enumerate(asked):
        sampling = PLAIN if number % 3 == 2 else with_language(LANGUAGES[number % len(LANGUAGES)])
        submit(node, number, prompt, sampling)
        node.turn()
    while node.turn():
        pass
    assert {ForwardMode.MIXED, ForwardMode.EXTEND, ForwardMode.DECODE} <= set(node.modes)
    assert node.scheduler.ledger().free == 400
    plain = transformers_greedy(tiny_model, asked, MAX_TOKENS)
    for number, prompt in enumerate(asked):
        expected = plain[number]
        if number % 3 != 2:
            language = LANGUAGES[number % len(LANGUAGES)]
            expected = greedy(tiny_model, prompt, language, MAX_TOKENS)
            assert expected[-1] == IM_END
            assert language.is_whole(text_of(tiny_model, expected))
        assert tokens(node.answers[number]) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_a_retracted_request_goes_on_where_its_grammar_was(
    engine: Engine, tiny_model: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_node.admission.NEAR_TOKENS", 8)  # all enter, and none has room to the end
    node = Node(engine, overlap=overlap, num_pages=24)
    language = letters("abc", 60)
    asked = prompts()[:4]
    for number, prompt in enumerate(asked):
        submit(node, number, prompt, with_language(language, max_tokens=70))
    while node.turn():
        pass
    assert node.scheduler.num_retracted > 0
    for number, prompt in enumerate(asked):
        assert tokens(node.answers[number]) == greedy(tiny_model, prompt, language, 70)


@pytest.mark.parametrize("overlap", [False, True])
def test_everything_else_is_asked_for_beside_a_grammar(
    engine: Engine, tiny_model: Path, overlap: bool
) -> None:
    """Seeds, filters, penalties and log probabilities of the model's own logits; several choices."""
    language = letters("abcde", 12)
    params = (
        with_language(language, temperature=1.0, seed=1),
        with_language(language, temperature=1.0, seed=2, top_k=5, top_p=0.9, min_p=0.01),
        with_language(language, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5),
        with_language(language, temperature=0.7, seed=3, num_logprobs=2),
    )
    node = Node(engine, overlap=overlap, num_pages=400)
    prompt = prompts()[6]
    for number, sampling in enumerate(params):
        submit(node, number, prompt, sampling)
    submit(node, 10, prompt, replace(params[0], num_choices=3))
    for number, choice in ((20, 0), (21, 1), (22, 2)):
        submit(node, number, prompt, replace(params[0], choice=choice))
    while node.turn():
        pass
    for answer in node.answers.values():
        assert language.is_whole(text_of(tiny_model, tokens(answer)))
        assert tokens(answer)[-1] == IM_END
    for choice in range(3):
        assert tokens(node.answers[10 + choice]) == tokens(node.answers[20 + choice])
    assert len({tuple(tokens(answer)) for answer in node.answers.values()}) > 3
    ids = list(prompt)
    for sampled in node.answers[3]:
        with torch.inference_mode():
            expected = torch.log_softmax(load(tiny_model)[0](torch.tensor([ids])).logits[0, -1], -1)
        assert sampled.logprobs is not None
        assert sampled.logprobs.logprob == pytest.approx(float(expected[sampled.token]), abs=1e-4)
        assert sampled.logprobs.top_ids == tuple(expected.topk(2).indices.tolist())
        ids.append(sampled.token)


def test_overlap_does_not_change_what_is_drawn(engine: Engine) -> None:
    """And it overlaps: a step is launched before the tokens of the one before were read."""
    answers = []
    for overlap in (False, True):
        node = Node(engine, overlap=overlap, num_pages=400)
        for number, prompt in enumerate(prompts()):
            schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
            sampling = SamplingParams(200, seed=number, grammar=schema if number % 2 else None)
            submit(node, number, prompt, replace(sampling, max_tokens=200 if number % 2 else 20))
        most_in_flight = 0
        while node.turn():
            most_in_flight = max(most_in_flight, node.loop._num_unread)
        assert most_in_flight == int(overlap)
        answers.append({number: tokens(answer) for number, answer in node.answers.items()})
    assert answers[0] == answers[1]


def test_answers_validate(engine: Engine, tiny_model: Path) -> None:
    node = Node(engine, overlap=True, num_pages=400)
    for number, prompt in enumerate(prompts()[:6]):
        sampling = SamplingParams(
            400, seed=number, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
        )
        submit(node, number, prompt, sampling)
    while node.turn():
        pass
    for answer in node.answers.values():
        assert tokens(answer)[-1] == IM_END
        jsonschema.validate(json.loads(text_of(tiny_model, tokens(answer))), SCHEMA)


def test_an_answer_may_be_cut_but_not_wrong(engine: Engine, tiny_model: Path) -> None:
    language = letters("ab", 30)
    node = Node(engine, overlap=True, num_pages=400)
    for number in range(1, 4):
        submit(node, number, prompts()[number], with_language(language, max_tokens=number))
    while node.turn():
        pass
    for number in range(1, 4):
        text = text_of(tiny_model, tokens(node.answers[number]))
        assert len(node.answers[number]) == number
        assert text
        assert language.is_prefix(text)
