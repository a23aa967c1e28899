"""C: the first token is handed over once, with all that depends on it."""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.client import Body, Client, Outcome, greedy
from conformance.model import EOS_PROMPT
from conformance.recipes import begin_all, post
from conformance.reference import Expected
from conformance.rows import Needs, Proof, row
from conformance.setup import Setup, prompt

STREAM: Body = {"stream": True, "stream_options": {"include_usage": True}}
BOTH: tuple[Body, ...] = ({}, STREAM)


def body(ids: list[int], max_tokens: int, **fields: object) -> Body:
    """A greedy request that ends where it ends."""
    return {
        "prompt": ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }


def check(s: Setup, request: Body, outcome: Outcome) -> Expected:
    """Compare all that the client sees with the oracle."""
    expected = s.reference.expect(request)
    assert outcome.succeeded, outcome
    told = (outcome.token_ids, outcome.text, outcome.finish)
    assert told == (expected.tokens, expected.text, expected.finish), f"{told}, and not {expected.tokens}"
    assert outcome.usage is not None
    assert outcome.usage["completion_tokens"] == len(expected.tokens), outcome.usage
    return expected


def check_all(s: Setup, requests: list[Body]) -> list[Expected]:
    """Ask all at once, whole and streamed; every answer must be the oracle's."""
    both = [request | how for request in requests for how in BOTH]
    return [check(s, each, outcome) for each, outcome in zip(both, s.client.ask_all(both), strict=True)]


@row(
    "C1",
    "an end of sequence as first token ends the answer",
    proof=Proof(
        "P does not say that its token ends the request",
        patch="import common.request as r\n"
        "real = r.SamplingParams.finish_reason\n"
        "r.SamplingParams.finish_reason = lambda self, token, count, eos: "
        "real(self, token, count, () if count == 1 else eos)\n",
    ),
)
def c1(s: Setup) -> None:
    for answer in check_all(s, [body(EOS_PROMPT, most) for most in (1, 2, 40)]):
        assert (answer.text, answer.finish, len(answer.tokens)) == ("", "stop", 1)
    on = [body(EOS_PROMPT, 8, ignore_eos=True), body(EOS_PROMPT, 8, min_tokens=3)]
    assert all(len(answer.tokens) >= 4 for answer in check_all(s, on))


@row(
    "C2",
    "max_tokens is exact, whole and streamed",
    needs=Needs.HTTP,
    proof=Proof(
        "the first token is not counted",
        patch="import common.request as r\n"
        "real = r.SamplingParams.finish_reason\n"
        "r.SamplingParams.finish_reason = lambda self, t, count, eos: real(self, t, count - 1, eos)\n"
        "r.Request.wants_decode = property(lambda q: 0 < q.num_sampled <= q.sampling.max_tokens)\n",
    ),
)
def c2(s: Setup) -> None:
    for most in (1, 2):
        requests = [
            body(prompt(seed, 20 * seed), most, ignore_eos=True) | how for seed in (1, 2, 3) for how in BOTH
        ]
        for request, outcome in zip(requests, s.client.ask_all(requests), strict=True):
            assert (outcome.succeeded, len(outcome.token_ids), outcome.finish) == (True, most, "length"), (
                outcome
            )
            assert outcome.usage is not None
            assert outcome.usage["completion_tokens"] == most
            if not s.is_remote:
                check(s, request, outcome)


# The model answers them with words: "ly" again and again; "qu", "ick", " whil"; "ing", "W", "ing".
WORDS = ([167], [173], [168])
LONG = [5, 90, 90, 17, 200, 41, 5, 118, 301, 90, 33, 64, 17, 255, 9, 77]  # a page, with repetitions
TOLERANCE = 1e-4
PENALTIES: tuple[Body, ...] = (
    {"presence_penalty": 2},
    {"frequency_penalty": 2},
    {"repetition_penalty": 1.9},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
)
RETRACTED = "baton_node_requests_retracted_total"
GROWING_TOKENS = 320  # more than is kept free for each at admission
SMALL = ("--kv-pages", "60")  # of 16 tokens: three of the answers that grow begin, two end
UNCOUNTED = Proof(
    "the handed-over token is not counted",
    patch="import common.engine.penalties as p\np.PenaltyState.count_seeded = lambda *_: None\n",
)
RESTARTED = Proof(
    "a grammar begins again when its request comes back",
    patch="import common.engine.grammar as g\n"
    "real = g.GrammarStates.start\n"
    "def start(self, request):\n"
    "    outputs, request.outputs = request.outputs, request.outputs[-1:]\n"
    "    real(self, request)\n"
    "    request.outputs = outputs\n"
    "g.GrammarStates.start = start\n",
)


@row(
    "C3",
    "stop strings and stop tokens see the first token",
    proof=Proof(
        "the first piece of text is not looked at",
        patch="import gateway.stops as g\n"
        "real = g.StopStrings.feed\n"
        "def feed(self, piece, *, armed):\n"
        "    began, self.began = getattr(self, 'began', False), True\n"
        "    return real(self, piece, armed=armed and began)\n"
        "g.StopStrings.feed = feed\n",
    ),
)
def c3(s: Setup) -> None:
    for ids in WORDS:
        first = s.reference.expect(body(ids, 1, ignore_eos=True))
        stops: tuple[Body, ...] = (
            {"stop": [first.text]},
            {"stop": [first.text[:1]]},
            {"stop_token_ids": first.tokens},
        )
        for answer in check_all(s, [body(ids, most, **stop) for stop in stops for most in (1, 20)]):
            assert (answer.text, answer.finish, len(answer.tokens)) == ("", "stop", 1)


def scores(s: Setup, request: Body) -> list[Any]:
    """Ask for an answer with log probabilities, checked; return those of its tokens (None: there is none)."""
    response = post(s, "/v1/completions", request)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["token_ids"] == s.reference.expect(request).tokens
    told: list[Any] = choice["logprobs"]["token_logprobs"]
    return told


@row(
    "C6",
    "log probabilities begin with the first token, and are the model's",
    proof=Proof(
        "P does not send those of its token",
        patch="import dataclasses, transfer.sender_endpoint as e\n"
        "real = e.SenderEndpoint.first_token\n"
        "def first_token(self, key, token):\n"
        "    silent = tuple(dataclasses.replace(each, logprobs=None) for each in token.choices)\n"
        "    real(self, key, dataclasses.replace(token, choices=silent))\n"
        "e.SenderEndpoint.first_token = first_token\n",
    ),
)
def c6(s: Setup) -> None:
    for ids in (*WORDS, LONG):
        for most in (1, 12):
            request = body(ids, most, ignore_eos=True, logprobs=5)
            expected = s.reference.expect(request)
            right = [score[token] for token, score in zip(expected.tokens, expected.scores, strict=True)]
            told = scores(s, request)
            assert len(told) == most, f"{len(told)} for {most} tokens"
            np.testing.assert_allclose(told, right, rtol=0, atol=TOLERANCE)


@row(
    "C7",
    "echo and prompt_logprobs tell the prompt's log probabilities, which are the model's",
    proof=Proof(
        "each is told of the token before",
        patch="import gateway.logprobs as l\n"
        "real = l.echoed_logprobs\n"
        "l.echoed_logprobs = lambda prompt, offsets, scores, *more: real(\n"
        "    prompt, offsets, (*scores[1:], *scores[:1]), *more)\n",
    ),
)
def c7(s: Setup) -> None:
    for ids in (*WORDS, LONG):
        right = s.reference.prompt_scores(ids)
        for most in (0, 4):
            request = body(ids, most, echo=True, logprobs=2, ignore_eos=True)
            told = scores(s, request)
            assert told[0] is None
            assert len(told) == len(ids) + most
            np.testing.assert_allclose(told[1 : len(ids)], right, rtol=0, atol=TOLERANCE)
        choice = post(s, "/v1/completions", body(ids, 1, prompt_logprobs=0)).json()["choices"][0]
        first, *others = choice["prompt_logprobs"]
        assert first is None
        told = [place[str(token)]["logprob"] for place, token in zip(others, ids[1:], strict=True)]
        np.testing.assert_allclose(told, right, rtol=0, atol=TOLERANCE)


def letters(ids: list[int], count: int, max_tokens: int) -> Body:
    """A request whose answer is so many letters."""
    return body(ids, max_tokens, structured_outputs={"regex": f"[qxz]{{{count}}}"})


def check_letters(outcome: Outcome, count: int) -> None:
    """Check that it has them all, and ended with that."""
    assert outcome.succeeded, outcome
    assert (outcome.finish, len(outcome.text)) == ("stop", count), outcome.text
    assert not set(outcome.text) - set("qxz"), outcome.text


@row(
    "C8",
    "a grammar takes the handed-over token once",
    proof=Proof(
        "it takes it twice",
        patch="import common.engine.grammar as g\n"
        "real = g.GrammarStates.seed\n"
        "g.GrammarStates.seed = lambda self, rows, ids: (real(self, rows, ids), real(self, rows, ids))\n",
    ),
)
def c8(s: Setup) -> None:
    Client(s.client.url, s.client.model).ask(letters(LONG, 1, 5))  # the first one takes longer
    for how in BOTH:
        asked = [letters(ids, 9, 20) | how for ids in (*WORDS, LONG)]
        for outcome in s.client.ask_all(asked):
            check_letters(outcome, 9)
        for most in (1, 2, 3):
            (outcome,) = s.client.ask_all([letters(LONG, 9, most) | how])
            assert outcome.succeeded, outcome
            assert (outcome.finish, len(outcome.text)) == ("length", most), outcome.text
            assert not set(outcome.text) - set("qxz"), outcome.text


@row(
    "C9",
    "penalties and grammars live through a retraction",
    options=SMALL,
    proof=RESTARTED,
)
def c9(s: Setup) -> None:
    retracted = s.client.metric(RETRACTED)
    requests = [
        greedy(prompt(seed, 20), GROWING_TOKENS) | penalty for seed, penalty in enumerate(PENALTIES, 1)
    ] * 2
    for request, outcome in zip(requests, s.client.ask_all(requests), strict=True):
        check(s, request, outcome)
    assert s.client.metric(RETRACTED) > retracted, "nobody was retracted"
    Client(s.client.url, s.client.model).ask(letters(LONG, 1, 5))  # the first one takes longer
    retracted = s.client.metric(RETRACTED)
    (older,) = begin_all(s, [greedy(prompt(8, 20), GROWING_TOKENS)])
    (younger,) = begin_all(s, [letters(prompt(9, 20), GROWING_TOKENS, GROWING_TOKENS + 1)])
    with s.faults("decode/refuse:growth*"):  # in the middle of it: the youngest is retracted
        s.client.until(lambda: s.client.metric(RETRACTED) > retracted, "it was retracted")
    check_letters(younger.wait(), GROWING_TOKENS)
    s.check(prompt(8, 20), older.wait(), GROWING_TOKENS)


@row("C10", "penalties count the prompt and the handed-over token", proof=UNCOUNTED)
def c10(s: Setup) -> None:
    for ids in (WORDS[0], LONG):
        plain = s.reference.expect(greedy(ids, 12)).tokens
        for answer in check_all(s, [greedy(ids, 12) | penalty for penalty in PENALTIES]):
            assert answer.tokens != plain, "a penalty that changes nothing shows nothing"
    # Only the count of the handed-over token makes the second one another: "ly" after "ly" no more.
    (answer, _) = check_all(s, [body(WORDS[0], 2, presence_penalty=2, frequency_penalty=2)])
    assert answer.tokens[0] != answer.tokens[1]
