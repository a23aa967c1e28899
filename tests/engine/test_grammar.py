"""With a grammar, a request draws the likeliest tokens that it allows, in any batch and any order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch

from common.config import EngineConfig, ModelConfig
from common.device.pinned import to_device
from common.device.streams import Stream, Streams
from common.engine.batch import ForwardMode, prepare_for_decode
from common.engine.grammar import GrammarStates
from common.engine.loader import Engine, load_engine
from common.messages import int32s
from common.request import Grammar, GrammarKind, Request, SampledToken, SamplingParams
from decode_node.entry import RequestKey
from tests.engine.languages import Language, compiled, greedy, letters, load, text_of, words
from tests.engine.test_mixed import BUDGET, MAX_RUNNING, PAGE, Node, prompts
from tests.model.paged import transformers_greedy
from tests.tiny import IM_END, VOCAB_SIZE

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


class NotedStreams(Streams):
    """Say which stream is given work, as a GPU's would be."""

    now: Stream | None = None

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """See Streams."""
        before, self.now = self.now, stream
        yield
        self.now = before


def test_masks_are_copied_on_the_stream_that_reads_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = NotedStreams(torch.device("cpu"))
    seen: list[Stream | None] = []

    def noted(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        seen.append(streams.now)
        return to_device(values, dtype, device)

    monkeypatch.setattr(engine.runner, "_streams", streams)
    monkeypatch.setattr("common.engine.grammar.to_device", noted)
    node = Node(engine, overlap=True, num_pages=400)
    submit(node, 1, prompts()[3], with_language(LANGUAGES[0]))
    while node.turn():
        pass
    assert len(seen) > 1
    assert set(seen) == {Stream.FORWARD}


def test_a_grammar_whose_tokens_get_dear_ends_its_request(
    engine: Engine, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one's masks stay cheap; what takes long, and longer each time, is to accept a token."""
    monkeypatch.setattr("common.engine.grammar.TOKEN_S", 0.0)
    text = 'root ::= [b-x] [a-z]* | "y" s\ns ::= s s | "a" | s s s'
    grammar = Grammar(GrammarKind.EBNF, text)
    sampling = SamplingParams(1000, grammar=grammar)
    request = Request(int32s([1]), sampling, 1, 1, 1, row=1, page_ids=(1,))
    request.compiled_grammar = compiled(engine.grammars, grammar)
    states = GrammarStates(VOCAB_SIZE, torch.device("cpu"))
    states.start(request)
    y, a = (load(tiny_model)[1].convert_tokens_to_ids(letter) for letter in "ya")
    states.seed([1], [y])
    batch = prepare_for_decode([request], PAGE)
    for _ in range(1000):
        (sampled,) = states.accept(batch, [SampledToken(a)])
        if sampled.error is not None:
            break
    assert sampled.error is not None
    assert "too ambiguous" in sampled.error


def test_what_is_too_dear_for_one_choice_is_not_tried_for_the_others(engine: Engine) -> None:
    grammar = LANGUAGES[1].grammar
    sampling = SamplingParams(9, temperature=0.0, grammar=grammar)
    states = GrammarStates(VOCAB_SIZE, torch.device("cpu"))
    requests = [Request(int32s([1]), sampling, 1, 1, 1, row=row, page_ids=(1,)) for row in (1, 2, 3)]
    for request in requests:
        request.compiled_grammar = compiled(engine.grammars, grammar)
        states.start(request)
    states._states[1].left_s = 0.0  # its first mask will be too much; the others have all their time
    batch = prepare_for_decode(requests, PAGE)
    states.masks(batch)
    taken = states.accept(batch, [SampledToken(IM_END)] * 3)
    assert ["too ambiguous" in (sampled.error or "") for sampled in taken] == [True] * 3
