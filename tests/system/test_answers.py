"""What ends an answer, and what the client gets of it: streamed or whole, it is the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.system.client import Body, Client, Outcome, greedy
from tests.system.conftest import EOS_PROMPT
from tests.system.oracle import Case, Oracle

pytestmark = pytest.mark.system

CHAT = "/v1/chat/completions"
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(params=["pair", "colocated"])
def client(request: pytest.FixtureRequest) -> Client:
    client: Client = request.getfixturevalue(request.param)
    return client


def both_ways(client: Client, body: Body, path: str = "/v1/completions") -> Outcome:
    """Ask for a whole answer and for a stream; return the one after checking that the other is the same."""
    whole, stream = client.ask_all([body, body | USAGE], path)
    assert whole.succeeded, whole
    assert stream.succeeded, stream
    for name in ("text", "token_ids", "prompt_token_ids", "finish", "usage"):
        assert getattr(stream, name) == getattr(whole, name)
    assert whole.usage is not None
    assert whole.usage["completion_tokens"] == len(whole.token_ids)
    return whole


def test_stream_and_body_agree(client: Client, oracle: Oracle, cases: list[Case]) -> None:
    for case in cases[:6]:
        outcome = both_ways(client, case.body())
        case.check(outcome)
        assert outcome.text == oracle.text(case.answer)
    sampled: Body = {"prompt": "the lazy fox", "seed": 4, "return_token_ids": True, "max_tokens": 40}
    assert both_ways(client, sampled).prompt_token_ids == oracle.tokenizer.encode("the lazy fox")


def test_chat_uses_the_template(client: Client, oracle: Oracle) -> None:
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "你好 😀"}]
    body = greedy((), 24, messages=messages)
    del body["prompt"]
    oracle.case(oracle.chat_ids(messages), 24).check(both_ways(client, body, CHAT))


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_max_tokens_is_exact(client: Client, cases: list[Case], max_tokens: int) -> None:
    for case in cases[:4]:
        case.check(both_ways(client, case.body(max_tokens)), max_tokens)


def test_eos_as_first_token_is_an_empty_completion(client: Client, oracle: Oracle) -> None:
    case = oracle.case(EOS_PROMPT, 8)
    stopped = both_ways(client, case.body(ignore_eos=False))
    assert (stopped.text, stopped.finish, stopped.token_ids) == ("", "stop", case.answer[:1])
    case.check(both_ways(client, case.body()))  # ignore_eos
    # On its last place it is a stop too.
    assert both_ways(client, case.body(1, ignore_eos=False)).finish == "stop"


def test_min_tokens_forbids_to_stop(client: Client, oracle: Oracle) -> None:
    case = oracle.case(EOS_PROMPT, 8)
    outcome = both_ways(client, case.body(ignore_eos=False, min_tokens=5))
    assert len(outcome.token_ids) >= 5
    assert case.answer[0] not in outcome.token_ids[:5]


def test_stop_token_is_counted_and_not_shown(client: Client, oracle: Oracle, cases: list[Case]) -> None:
    case = cases[3]
    at = next(i for i, token in enumerate(case.answer) if i > 4 and token not in case.answer[:i])
    outcome = both_ways(client, case.body(stop_token_ids=[case.answer[at]]))
    assert (outcome.finish, outcome.token_ids) == ("stop", case.answer[: at + 1])
    assert outcome.text == oracle.text(case.answer[:at])


def test_stop_string_inside_the_first_token(client: Client, oracle: Oracle) -> None:
    draw = ((prompt, oracle.case([prompt], 8)) for prompt in range(3, 320))
    # A case whose first token is text of several characters, so that the string ends inside it.
    case, text = next(
        (case, text) for _, case in draw if len(text := oracle.text(case.answer[:1])) >= 3 and text.isascii()
    )
    outcome = both_ways(client, case.body(stop=text[1]))
    assert (outcome.text, outcome.finish, outcome.token_ids) == (text[0], "stop", case.answer[:1])


def test_stop_string_across_tokens(client: Client, oracle: Oracle, cases: list[Case]) -> None:
    def ascii_at(case: Case) -> int | None:
        texts = [oracle.text([token]) for token in case.answer]
        whole = "".join(texts)
        for i in range(2, len(texts) - 1):
            two = texts[i] + texts[i + 1]
            if two.isascii() and two.isprintable() and whole.index(two) == len("".join(texts[:i])):
                return i
        return None

    case, at = next((case, at) for case in cases if (at := ascii_at(case)) is not None)
    stop = oracle.text(case.answer[at : at + 2])
    outcome = both_ways(client, case.body(stop=["never said by it", stop]))
    assert (outcome.finish, outcome.token_ids) == ("stop", case.answer[: at + 2])
    assert outcome.text == oracle.text(case.answer[:at])


def test_several_prompts_in_one_call(client: Client, cases: list[Case]) -> None:
    prompts: Any = [case.prompt for case in cases[:5]]
    outcome = client.ask(greedy(prompts, 6))
    assert outcome.token_ids == [token for case in cases[:5] for token in case.answer[:6]]
    assert outcome.usage is not None
    assert outcome.usage["prompt_tokens"] == sum(map(len, prompts))
    assert outcome.usage["completion_tokens"] == 30
