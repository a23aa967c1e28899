"""Log probabilities, penalties, logit bias and min_tokens against a loop over the logits of transformers.

Of the server's own code the loop has only `uniform`, the promised number behind a seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from common.engine.sampler import uniform
from tests.system.client import Body, Client, Outcome
from tests.system.conftest import EOS_PROMPT
from tests.system.server import running
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.system

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TOLERANCE = 1e-4
NUM_TOKENS = 20
LONG = [5, 90, 90, 17, 200, 41, 5, 118, 301, 90, 33, 64, 17, 255, 9, 77]  # a page, with repetitions
# With the two shared servers: a pair and a single node, each overlapped and not.
SET_UPS = {"pair, overlapped": ("--overlap", "on"), "colocated, plain": ("--overlap", "off", "--colocated")}

FIELDS: list[Body] = [
    {"prompt": LONG, "logprobs": 5},
    {"prompt": LONG[:1], "presence_penalty": 1.5, "logprobs": 20},
    {"prompt": LONG[:15], "frequency_penalty": 2, "logprobs": 0},
    {"prompt": [*LONG, 8], "repetition_penalty": 1.4},
    {"prompt": LONG[-9:], "frequency_penalty": -0.1, "presence_penalty": -0.2, "logprobs": 3},
    {"prompt": LONG * 2, "logit_bias": {"90": 100}, "max_tokens": 3, "logprobs": 1},
    {
        "prompt": [*LONG, *LONG, 4],
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 0.8,
        "logit_bias": {"90": 1.5, "17": -100, "301": 2},
        "logprobs": 4,
    },
    # The model ends this one at once; then again and again, as far as it is let.
    {"prompt": EOS_PROMPT, "ignore_eos": False, "logprobs": 2},
    {"prompt": EOS_PROMPT, "ignore_eos": False, "min_tokens": 4, "logprobs": 20},
    {
        "prompt": EOS_PROMPT,
        "ignore_eos": False,
        "min_tokens": 3,
        "stop_token_ids": [90, 118],
        "logit_bias": {"90": 100},
        "frequency_penalty": 2,
        "logprobs": 2,
    },
    {"prompt": LONG, "temperature": 1, "seed": 7, "frequency_penalty": 1, "logprobs": 2},
    {
        "prompt": LONG * 3,
        "temperature": 0.8,
        "top_k": 20,
        "seed": -3,
        "presence_penalty": 1,
        "repetition_penalty": 1.2,
        "logit_bias": {"41": 3},
        "logprobs": 20,
    },
    {"prompt": [56] * 3, "max_tokens": 1, "repetition_penalty": 2, "logprobs": 7},
]
DEFAULTS: Body = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@dataclass
class Scored(Outcome):
    """An outcome with the `logprobs` of every choice, whole or part, that had tokens."""

    logprobs: list[Body | None] = field(default_factory=list)

    def take_choice(self, choice: Body) -> None:
        super().take_choice(choice)
        if choice.get("token_ids"):
            self.logprobs.append(choice["logprobs"])

    def column(self, name: str) -> list[Any]:
        """One list of all parts, joined."""
        return [value for part in self.logprobs if part is not None for value in part[name]]


@dataclass(frozen=True)
class Case:
    """A request, and what must come."""

    body: Body
    tokens: list[int]
    scores: list[NDArray[np.float64]]  # log probabilities of the vocabulary, an array a token
    finish: str


@contextmanager
def one_thread() -> Iterator[None]:
    """The tiny model is faster so: a second thread would mostly wait."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class Loop:
    """Decoding, a token at a time, with the whole sequence computed anew for each."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._eos: list[int] = GenerationConfig.from_pretrained(folder).eos_token_id
        self.texts = [str(self.tokenizer.decode([i])) for i in range(VOCAB_SIZE)]

    @one_thread()
    def case(self, body: Body, prompt: Sequence[int]) -> Case:
        """Follow a request to its end."""
        stops = [*body.get("stop_token_ids", ()), *(() if body["ignore_eos"] else self._eos)]
        tokens: list[int] = []
        scores: list[NDArray[np.float64]] = []
        while len(tokens) < body["max_tokens"]:
            logits = self._logits([*prompt, *tokens])
            scores.append(logits - np.logaddexp.reduce(logits))
            changed = _changed(logits, body, prompt, tokens)
            if len(tokens) < body.get("min_tokens", 0):
                changed[stops] = -np.inf
            tokens.append(_drawn(changed, body, len(prompt) + len(tokens)))
            if tokens[-1] in stops and len(tokens) > body.get("min_tokens", 0):
                return Case(body, tokens, scores, "stop")
        return Case(body, tokens, scores, "length")

    @torch.inference_mode()
    def _logits(self, ids: list[int]) -> NDArray[np.float64]:
        logits: NDArray[np.float64] = self._model(torch.tensor([ids])).logits[0, -1].double().numpy()
        return logits


def _changed(
    logits: NDArray[np.float64], body: Body, prompt: Sequence[int], tokens: Sequence[int]
) -> NDArray[np.float64]:
    changed = logits.copy()
    for token, bias in body.get("logit_bias", {}).items():
        changed[int(token)] += bias
    repetition = body.get("repetition_penalty", 1)
    for token in {*prompt, *tokens}:
        changed[token] *= repetition if changed[token] < 0 else 1 / repetition
    for token in set(tokens):
        changed[token] -= body.get("presence_penalty", 0)
        changed[token] -= body.get("frequency_penalty", 0) * tokens.count(token)
    return changed


def _drawn(logits: NDArray[np.float64], body: Body, position: int) -> int:
    if body["temperature"] == 0:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()) / body["temperature"])
    if "top_k" in body:
        weights[np.argsort(-weights)[body["top_k"] :]] = 0
    threshold = uniform(body["seed"] % 2**64, body.get("choice", 0), position) * weights.sum()
    return int(np.argmax(weights.cumsum() > threshold))


@pytest.fixture(scope="session")
def loop(model: Path) -> Loop:
    return Loop(model)


@pytest.fixture(scope="session")
def completions(loop: Loop) -> list[Case]:
    return [loop.case(DEFAULTS | fields, fields["prompt"]) for fields in FIELDS]


@pytest.fixture(scope="session")
def chats(loop: Loop) -> list[Case]:
    messages = [{"role": "user", "content": "你好 😀 and you?"}]
    prompt: Any = loop.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    wishes: list[Body] = [{"top_logprobs": 20, "presence_penalty": 1}, {"temperature": 1.5, "seed": 11}]
    return [
        loop.case(DEFAULTS | {"messages": messages, "logprobs": True} | wish, prompt["input_ids"])
        for wish in wishes
    ]


def test_the_cases_show_what_they_should(loop: Loop, completions: list[Case]) -> None:
    """Nothing here would be tested by an answer that is the same without its penalties and biases."""
    for case in completions:
        kept = DEFAULTS.keys() | {"prompt", "seed", "top_k", "stop_token_ids"}
        if case.body.keys() - kept - {"logprobs"}:
            plain: Body = {name: value for name, value in case.body.items() if name in kept}
            assert loop.case(plain, case.body["prompt"]).tokens != case.tokens, case.body
    assert {case.finish for case in completions} == {"stop", "length"}


def check(case: Case, outcome: Scored, loop: Loop) -> None:
    assert outcome.succeeded, outcome
    assert outcome.token_ids == case.tokens, case.body
    assert outcome.finish == case.finish
    assert outcome.usage is not None
    assert outcome.usage["completion_tokens"] == len(case.tokens)
    if case.body.get("logprobs") is None:
        assert set(outcome.logprobs) == {None}
    elif "messages" in case.body:
        check_chat(case, outcome, loop)
    else:
        check_completion(case, outcome, loop)


def check_completion(case: Case, outcome: Scored, loop: Loop) -> None:
    expected = [scores[token] for token, scores in zip(case.tokens, case.scores, strict=True)]
    np.testing.assert_allclose(outcome.column("token_logprobs"), expected, rtol=0, atol=TOLERANCE)
    assert outcome.column("tokens") == [loop.texts[token] for token in case.tokens]
    assert len(outcome.column("text_offset")) == len(case.tokens)
    for token, scores, told in zip(case.tokens, case.scores, outcome.column("top_logprobs"), strict=True):
        by_text: dict[str, float] = {}
        for text, score in zip(loop.texts, scores.tolist(), strict=True):
            by_text[text] = max(score, by_text.get(text, -np.inf))
        likeliest = np.sort(scores)[VOCAB_SIZE - case.body["logprobs"] :]
        worst = likeliest[0] if likeliest.size else np.inf
        # Of two that are as good as equal, either may be the last one.
        must = {text for text, score in by_text.items() if score > worst + TOLERANCE}
        may = {text for text, score in by_text.items() if score > worst - TOLERANCE}
        drawn = loop.texts[token]
        assert must | {drawn} <= told.keys() <= may | {drawn}
        for text, logprob in told.items():
            assert abs(logprob - (scores[token] if text == drawn else by_text[text])) <= TOLERANCE


def check_chat(case: Case, outcome: Scored, loop: Loop) -> None:
    entries = outcome.column("content")
    for token, scores, entry in zip(case.tokens, case.scores, entries, strict=True):
        assert entry["token"] == loop.texts[token]
        assert abs(entry["logprob"] - scores[token]) <= TOLERANCE
        likeliest = entry["top_logprobs"]
        expected = np.sort(scores)[::-1][: case.body.get("top_logprobs", 0)]
        np.testing.assert_allclose([top["logprob"] for top in likeliest], expected, rtol=0, atol=TOLERANCE)
        assert len(likeliest) == len({bytes(top["bytes"]) for top in likeliest})
        for top in likeliest:
            same = [score for text, score in zip(loop.texts, scores, strict=True) if text == top["token"]]
            assert min(abs(top["logprob"] - score) for score in same) <= TOLERANCE
    raw = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert raw.decode(errors="replace") == loop.tokenizer.decode(case.tokens)


def ask(client: Client, cases: list[Case], path: str, stream: Sequence[bool]) -> list[Scored]:
    """Send all at once."""

    async def run() -> list[Outcome]:
        async with client.session() as http:
            streamed: Body = {"stream": True, "stream_options": {"include_usage": True}}
            return await asyncio.gather(
                *(
                    client.follow(http, case.body | (streamed if is_stream else {}), Scored(), path)
                    for case, is_stream in zip(cases, stream, strict=True)
                )
            )

    outcomes = asyncio.run(run())
    return [outcome for outcome in outcomes if isinstance(outcome, Scored)]


def check_alone_and_together(client: Client, loop: Loop, completions: list[Case], chats: list[Case]) -> None:
    for path, cases in ((COMPLETIONS, completions), (CHAT, chats)):
        for i, case in enumerate(cases):
            (outcome,) = ask(client, [case], path, [i % 2 == 0])
            check(case, outcome, loop)
        for rest in (0, 1):
            outcomes = ask(client, cases, path, [i % 2 == rest for i in range(len(cases))])
            for case, outcome in zip(cases, outcomes, strict=True):
                check(case, outcome, loop)


def test_pair(pair: Client, loop: Loop, completions: list[Case], chats: list[Case]) -> None:
    check_alone_and_together(pair, loop, completions, chats)


def test_colocated(colocated: Client, loop: Loop, completions: list[Case], chats: list[Case]) -> None:
    check_alone_and_together(colocated, loop, completions, chats)


@pytest.fixture(params=SET_UPS)
def client(request: pytest.FixtureRequest, model: Path) -> Iterator[Client]:
    with running(model, *SET_UPS[request.param]) as server:
        client = Client(server.url, server.model)
        yield client
        client.assert_ledger_clean()


def test_set_up(client: Client, loop: Loop, completions: list[Case], chats: list[Case]) -> None:
    check_alone_and_together(client, loop, completions, chats)
