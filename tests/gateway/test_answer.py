"""Token events -> text, counts and reasons, without a server."""

from __future__ import annotations

import asyncio
import time

import pytest
from prometheus_client import Histogram

from common.messages import int32s
from common.request import FinishReason, SamplingParams
from gateway.answer import Answer, Delta, TextRules
from gateway.fake import FakeNodes, FakeStream, Script
from gateway.histograms import INTER_TOKEN_S, InterTokenTimes
from gateway.text import TextPipeline
from gateway.timeline import GatewayStamps
from tests.tiny import IM_END


def run(
    text: TextPipeline,
    tokens: list[int],
    *,
    max_tokens: int = 100,
    stops: tuple[str, ...] = (),
    min_tokens: int = 0,
    tokens_per_event: int = 1,
    token_times: InterTokenTimes | None = None,
) -> tuple[Answer, list[Delta], FakeStream]:
    script = Script(lambda _: tokens, tokens_per_event=tokens_per_event, eos_token_ids=(IM_END,))
    (stream,) = FakeNodes(script).submit(
        int32s([5]), SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    )
    begun = GatewayStamps(time.monotonic())
    answer = Answer(0, int32s([5]), stream, text.detokenizer(), TextRules(stops, min_tokens), begun)
    deltas: list[Delta] = []

    async def follow() -> None:
        ended = asyncio.get_running_loop().create_future()
        times = token_times or InterTokenTimes()
        answer.follow(lambda _, delta: deltas.append(delta), ended.set_result, times)
        assert await ended is None

    asyncio.run(follow())
    return answer, deltas, stream


def shown(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_max_tokens_gives_exactly_that_many(text: TextPipeline, max_tokens: int) -> None:
    ids = text.encode(["the quick brown fox"], special_tokens=False)[0]
    answer, deltas, stream = run(text, ids, max_tokens=max_tokens)
    assert answer.num_tokens == max_tokens
    assert [token for delta in deltas for token in delta.token_ids] == ids[:max_tokens]
    assert deltas[-1].finish is FinishReason.LENGTH
    assert not stream.aborted


def test_eos_first_is_an_empty_answer_of_one_token(text: TextPipeline) -> None:
    answer, deltas, _ = run(text, [IM_END])
    assert (shown(deltas), answer.num_tokens, deltas[-1].finish) == ("", 1, FinishReason.STOP)
    assert deltas[-1].token_ids == (IM_END,)


def test_stop_string_inside_the_first_token(text: TextPipeline) -> None:
    token = text.encode([" the"], special_tokens=False)[0]
    assert len(token) == 1
    answer, deltas, stream = run(text, token, stops=("h",))
    assert (shown(deltas), answer.num_tokens, deltas[-1].finish) == (" t", 1, FinishReason.STOP)
    assert stream.aborted


@pytest.mark.parametrize("num_tokens", [3, 4])
def test_times_between_tokens_are_counted_for_those_of_the_answer(
    text: TextPipeline, num_tokens: int
) -> None:
    ids = text.encode(["fox jumps over the lazy dog"], special_tokens=False)[0]
    stop = text.detokenizer().add(ids[num_tokens - 1])
    times, histogram = InterTokenTimes(), Histogram("a", "b", buckets=INTER_TOKEN_S, registry=None)
    answer, _, _ = run(text, ids, stops=(stop,), tokens_per_event=2, token_times=times)
    times.flush(histogram)
    assert answer.num_tokens == num_tokens
    counted = next(s.value for s in histogram.collect()[0].samples if s.name.endswith("_count"))
    assert counted == num_tokens - 2  # before the first two there is none


@pytest.mark.parametrize("tokens_per_event", [1, 2, 5, 50])
def test_stop_string_over_tokens_ends_the_count_where_it_is_complete(
    text: TextPipeline, tokens_per_event: int
) -> None:
    ids = text.encode(["fox jumps over the lazy dog"], special_tokens=False)[0]
    texts = [text.detokenizer().add(token) for token in ids]
    stop = "s over t"
    complete = next(n for n in range(len(ids)) if stop in "".join(texts[:n]))
    answer, deltas, stream = run(text, ids, stops=(stop,), tokens_per_event=tokens_per_event)
    assert shown(deltas) == "fox jump"
    assert answer.num_tokens == complete
    assert [token for delta in deltas for token in delta.token_ids] == ids[:complete]
    assert stream.aborted


def test_min_tokens_delays_stop_strings(text: TextPipeline) -> None:
    ids = text.encode(["zz zz zz zz"], special_tokens=False)[0]
    texts = [text.detokenizer().add(token) for token in ids]
    answer, deltas, _ = run(text, ids, stops=("z",), min_tokens=4)
    assert shown(deltas) == "".join(texts[:4]) + texts[4].partition("z")[0]
    assert answer.num_tokens == 5


def test_held_text_comes_out_at_the_end(text: TextPipeline) -> None:
    ids = text.encode(["fox"], special_tokens=False)[0]
    _, deltas, _ = run(text, ids, max_tokens=len(ids), stops=("x and more",))
    assert shown(deltas) == "fox"
    assert deltas[-1].finish is FinishReason.LENGTH


def test_stop_string_on_the_last_token_is_a_stop(text: TextPipeline) -> None:
    ids = text.encode(["fox"], special_tokens=False)[0]
    answer, deltas, stream = run(text, ids, max_tokens=len(ids), stops=("x",))
    assert (shown(deltas), deltas[-1].finish) == ("fo", FinishReason.STOP)
    assert not stream.aborted
    assert answer.timeline().ttft_us is not None
