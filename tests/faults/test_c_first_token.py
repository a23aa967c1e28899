"""C: the first token is handed over once, with all that depends on it.

It is sampled by one process and told by another: whether it ends the request, its log probabilities, its
place in the counts, the usage and the penalties must be what one process alone would have made of it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.faults.reference import Expected, Reference
from tests.system.client import Body, Client, Outcome
from tests.system.conftest import EOS_PROMPT
from tests.system.server import running
from tests.system.test_logprobs_penalties import LONG, Scored

pytestmark = pytest.mark.system

TOLERANCE = 1e-4
NUM_TOP = 5
STREAM: Body = {"stream": True, "stream_options": {"include_usage": True}}
# The model answers them with words: "ly" again and again; "qu", "ick", " whil"; "ing", "W", "ing".
WORDS = ([167], [173], [168])
SET_UPS = {"disaggregated": (), "colocated": ("--colocated",)}


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module", params=SET_UPS)
def client(request: pytest.FixtureRequest, model: Path) -> Iterator[Client]:
    with running(model, *SET_UPS[request.param]) as server:
        client = Client(server.url, server.model)
        yield client
        client.assert_ledger_clean()


def base(prompt: Sequence[int], **fields: object) -> Body:
    return {
        "prompt": list(prompt),
        "temperature": 0,
        "return_token_ids": True,
        "logprobs": NUM_TOP,
        **fields,
    }


def first_tokens(reference: Reference, prompt: Sequence[int], count: int) -> Expected:
    return reference.expect(base(prompt, max_tokens=count, ignore_eos=True))


def enders(reference: Reference) -> Iterator[Body]:
    """Requests whose first token ends them, or whose first two do, or none; each is a kind of the product."""
    yield base(EOS_PROMPT)
    for prompt in WORDS:
        two = first_tokens(reference, prompt, 2)
        first, second = (reference.text([token]) for token in two.tokens)
        assert two.text == first + second
        assert two.text.isascii()
        yield base(prompt)
        yield base(prompt, stop_token_ids=two.tokens[:1])
        yield base(prompt, stop=[first])
        yield base(prompt, stop=["never said", first[-1] + second[0]])
        # Both at once: the stop token comes first, and its text is not looked at.
        yield base(prompt, stop_token_ids=two.tokens[:1], stop=[first])


def ask(client: Client, bodies: Sequence[Body]) -> list[Scored]:
    """Send all at once."""

    async def run() -> list[Outcome]:
        async with client.session() as http:
            return await asyncio.gather(*(client.follow(http, body, Scored()) for body in bodies))

    return [outcome for outcome in asyncio.run(run()) if isinstance(outcome, Scored)]


def check(reference: Reference, body: Body, outcome: Scored) -> Expected:
    """Compare everything that the client sees with the reference."""
    expected = reference.expect(body)
    told = (outcome.token_ids, outcome.text, outcome.finish)
    assert outcome.succeeded, (body, outcome)
    assert told == (expected.tokens, expected.text, expected.finish), body
    num_prompt, num_tokens = len(body["prompt"]), len(expected.tokens)
    assert outcome.usage is not None
    assert outcome.usage["prompt_tokens"] == num_prompt
    assert outcome.usage["completion_tokens"] == num_tokens
    assert outcome.usage["total_tokens"] == num_prompt + num_tokens
    scores = [score[token] for token, score in zip(expected.tokens, expected.scores, strict=True)]
    np.testing.assert_allclose(outcome.column("token_logprobs"), scores, rtol=0, atol=TOLERANCE)
    told_tops = outcome.column("top_logprobs")
    for token, score, told_top in zip(expected.tokens, expected.scores, told_tops, strict=True):
        assert told_top == pytest.approx(reference.likeliest(token, score, NUM_TOP), rel=0, abs=TOLERANCE)
    return expected


def check_all(client: Client, reference: Reference, bodies: Sequence[Body]) -> list[Expected]:
    """Ask all at once, each whole and streamed; every answer must be the reference's."""
    both = [body | how for body in bodies for how in ({}, STREAM)]
    checked = [check(reference, body, outcome) for body, outcome in zip(both, ask(client, both), strict=True)]
    return checked[::2]


def test_every_ending_with_every_length(client: Client, reference: Reference) -> None:
    """What the first token is x max_tokens x min_tokens x streamed or whole, with log probabilities."""
    product = [
        body | {"max_tokens": most, "min_tokens": least}
        for body, most, least in itertools.product(enders(reference), (1, 2, 3), (0, 1, 2))
    ]
    expected = check_all(
        client, reference, [body for body in product if body["min_tokens"] <= body["max_tokens"]]
    )
    # The product is about something: all lengths, and both ends at each of them.
    ends = {(len(answer.tokens), answer.finish) for answer in expected}
    assert ends == set(itertools.product((1, 2, 3), ("stop", "length")))
    for outcome in ask(client, [body for body in product if body["min_tokens"] > body["max_tokens"]]):
        assert (outcome.status, outcome.error and outcome.error["param"]) == (400, "min_tokens")


def test_c1_end_of_sequence_as_first_token(client: Client, reference: Reference) -> None:
    bodies = [base(EOS_PROMPT, max_tokens=most) for most in (1, 2, 40)]
    for answer in check_all(client, reference, bodies):
        assert (answer.text, answer.finish, len(answer.tokens)) == ("", "stop", 1)
    # Ignored, or forbidden: the same prompt goes on.
    on = [base(EOS_PROMPT, max_tokens=8, ignore_eos=True), base(EOS_PROMPT, max_tokens=8, min_tokens=3)]
    assert all(len(answer.tokens) >= 4 for answer in check_all(client, reference, on))


def test_c2_max_tokens_is_exact(client: Client, reference: Reference) -> None:
    for most in (1, 2):
        bodies = [base(prompt, max_tokens=most) for prompt in (*WORDS, LONG)]
        for answer in check_all(client, reference, bodies):
            assert (len(answer.tokens), answer.finish) == (most, "length")


def test_c3_stops_see_the_first_token(client: Client, reference: Reference) -> None:
    firsts = [(prompt, first_tokens(reference, prompt, 1)) for prompt in WORDS]
    bodies = [
        base(prompt, max_tokens=most, **stop)
        for prompt, first in firsts
        for stop in ({"stop": [first.text]}, {"stop_token_ids": first.tokens}, {"stop": first.text[:1]})
        for most in (1, 20)
    ]
    for answer in check_all(client, reference, [as_list(body) for body in bodies]):
        assert (answer.text, answer.finish, len(answer.tokens)) == ("", "stop", 1)


def as_list(body: Body) -> Body:
    return body | ({"stop": [body["stop"]]} if isinstance(body.get("stop"), str) else {})


def test_c6_log_probabilities_begin_with_the_first_token(client: Client, reference: Reference) -> None:
    bodies = [
        base(prompt, max_tokens=most, ignore_eos=True) for prompt in (EOS_PROMPT, LONG) for most in (1, 12)
    ]
    outcomes = ask(client, bodies)
    for body, outcome in zip(bodies, outcomes, strict=True):
        expected = check(reference, body, outcome)
        assert len(outcome.column("token_logprobs")) == len(expected.tokens) == body["max_tokens"]


def test_c10_penalties_count_prompt_and_first_token(client: Client, reference: Reference) -> None:
    """Each penalty changes the answer, and the first token is counted where it was handed over."""
    plain = {tuple(prompt): first_tokens(reference, prompt, 12).tokens for prompt in (WORDS[0], LONG)}
    for prompt, unchanged in plain.items():
        bodies = [
            base(prompt, max_tokens=12, ignore_eos=True, **penalty)
            for penalty in (
                {"presence_penalty": 2},
                {"frequency_penalty": 2},
                {"repetition_penalty": 1.9},
                {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
            )
        ]
        for answer in check_all(client, reference, bodies):
            assert answer.tokens != unchanged
    # Only the count of the handed-over token makes the second one another: "ly" after "ly" no more.
    body = base(WORDS[0], max_tokens=2, presence_penalty=2, frequency_penalty=2)
    (answer,) = check_all(client, reference, [body])
    assert answer.tokens[0] == plain[tuple(WORDS[0])][0]
    assert answer.tokens[1] != plain[tuple(WORDS[0])][1]
