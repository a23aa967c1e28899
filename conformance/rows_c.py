"""C: the first token is handed over once, with all that depends on it."""

from __future__ import annotations

from conformance.client import Body, Outcome
from conformance.model import EOS_PROMPT
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
        "r.SamplingParams.finish_reason = lambda self, token, count, eos: None if count == 1 "
        "else real(self, token, count, eos)\n",
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
        "r.SamplingParams.finish_reason = lambda self, token, count, eos: real(self, token, count - 1, eos)\n",
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
