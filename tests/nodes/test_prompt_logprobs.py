"""Log probabilities of prompts on their way through the schedulers: once, with the first token, untouched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.messages import Commit, Granted, PromptLogprobs, Tokens, float32s, int32s
from common.request import MAX_PROMPT_LOGPROBS, FinishReason, LogprobArrays, TokenLogprobs
from decode_node.entry import FailedOut, RefusedOut, TokenOut
from decode_node.outbox import messages_of
from decode_node.scheduler import DecodeScheduler
from tests.nodes.test_decode_scheduler import IDLE, answers, commit, drawn, prebuild, scheduler, submit
from tests.nodes.test_prefill_scheduler import prefill
from tests.nodes.test_prefill_scheduler import scheduler as prefill_scheduler

ARRAYS = (float32s([-1.0, -2.0]), int32s([9, 8, 7, 99]), float32s([-0.5, -1.0, -1.5, -2.0]))


def scored(transfer_id: int, top_ids: list[int] | None = None, finish: FinishReason | None = None) -> Commit:
    ids = ARRAYS[1] if top_ids is None else int32s(top_ids)
    return replace(
        commit(transfer_id, 9, finish),
        prompt_logprobs=ARRAYS[0],
        prompt_top_ids=ids,
        prompt_top_logprobs=ARRAYS[2],
    )


def arrive(s: DecodeScheduler, transfer_id: int, commit: Commit) -> None:
    grant = s.admit(IDLE)
    assert grant is not None
    s.granted(grant, transfer_id, 1.0)
    s.transfer_done(transfer_id, commit, 2.0)


def test_rows_of_arrays() -> None:
    arrays = LogprobArrays(*ARRAYS)
    first, second = TokenLogprobs(-1.0, (9, 8), (-0.5, -1.0)), TokenLogprobs(-2.0, (7, 99), (-1.5, -2.0))
    assert list(arrays.rows(0, 99)) == [first, second]
    assert list(arrays.rows(1, 2)) == [second]
    assert list(LogprobArrays().rows(0, 5)) == []
    assert list(LogprobArrays(ARRAYS[0]).rows(0, 2)) == [
        TokenLogprobs(-1.0, (), ()),
        TokenLogprobs(-2.0, (), ()),
    ]


@pytest.mark.parametrize("finish", [None, FinishReason.STOP])
def test_they_go_out_before_the_first_token_and_as_they_came(finish: FinishReason | None) -> None:
    s = scheduler()
    key = submit(s, 1, prompt_len=3, num_prompt_logprobs=2)
    other = submit(s, 2, prompt_len=3)
    arrive(s, 7, scored(7, finish=finish))
    arrive(s, 8, commit(8, 5))
    messages = [message for _, message, _ in messages_of(s.out)]
    assert [type(message) for message in messages] == [Granted, PromptLogprobs, Granted, Tokens]
    assert messages[1] == PromptLogprobs(key.request_id, *ARRAYS)
    assert messages[1].top_ids is ARRAYS[1]  # not copied
    assert messages[3].request_ids == (key.request_id, other.request_id)


def test_no_other_token_has_them() -> None:
    s = scheduler()
    submit(s, 1, prompt_len=3, num_prompt_logprobs=2)
    arrive(s, 7, scored(7))
    prebuild(s)
    step = s.next_step(3.0)
    assert step is not None
    s.process(step, drawn(11), 4.0)
    first, second = (out for out in s.out if isinstance(out, TokenOut))
    assert first.prompt_logprobs == LogprobArrays(*ARRAYS)
    assert second.prompt_logprobs is None


def test_what_nobody_asked_for_is_not_told() -> None:
    s = scheduler()
    submit(s, 1, prompt_len=3)
    arrive(s, 7, scored(7))
    (out,) = answers(s)
    assert isinstance(out, TokenOut)
    assert out.prompt_logprobs is None


@pytest.mark.parametrize("wrong", [100, -1, 2**31 - 1, -(2**31)])
def test_log_probabilities_of_what_is_no_token_fail_the_request(wrong: int) -> None:
    s = scheduler()
    submit(s, 1, prompt_len=3, num_prompt_logprobs=2)
    arrive(s, 7, scored(7, [9, 8, wrong, 7]))
    (out,) = answers(s)
    assert isinstance(out, FailedOut)
    assert out.status == 500
    assert s.ledger().free == 12


def test_more_than_a_frame_holds_is_refused_by_both_nodes() -> None:
    most = MAX_PROMPT_LOGPROBS // 20
    for prompt_len, num_top, fits in ((most, 20, True), (most + 1, 20, False), (2, 21, False), (3, 0, True)):
        s = scheduler(num_pages=2**20, context_length=2**20, vocab_size=20)
        submit(s, 1, prompt_len=prompt_len, longest_prompt=2**20, num_prompt_logprobs=num_top)
        refused = [out for out in s.out if isinstance(out, RefusedOut)]
        assert (refused == []) is fits
        if refused:
            assert (refused[0].status, refused[0].param) == (400, "prompt_logprobs")
        p = replace(prefill_scheduler(), num_pages=2**20, context_length=2**20, vocab_size=20)
        rejection = p.submit("a", prefill(prompt_len, num_prompt_logprobs=num_top))
        assert (rejection is None) is fits
