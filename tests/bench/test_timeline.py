"""`baton bench timeline`: what it makes of an answer, of many, and a run against a real server."""

from __future__ import annotations

import json
import socket

import pytest
from click.testing import CliRunner

from benchmarks.report import Report
from benchmarks.timeline import Seen, add_figures, main, read
from benchmarks.token_streams import TokenStream
from gateway.timeline import FIRST_TOKEN_STAGES

STAGES = dict(zip(FIRST_TOKEN_STAGES, (1.0, 2.0, 3.0, 80.0, 5.0, 6.0), strict=True))  # 97 ms


def stream(*events: str) -> TokenStream:
    """An answer whose first event came 100 ms after it was asked for, and the others 100 ms later each."""
    pieces = [(7.0, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")]
    for i, event in enumerate(events, 1):
        data = f"data: {event}\n\n".encode()
        pieces.append((7.0 + i / 10, b"%x\r\n%b\r\n" % (len(data), data)))
    with socket.socket() as closed:
        return TokenStream(7.0, closed, memoryview(b""), pieces, is_done=True)


def chunk(tokens: int, **more: object) -> str:
    usage = {"prompt_tokens": 64, "completion_tokens": tokens}
    return json.dumps({"choices": [{"index": 0, "text": "a"}], "usage": usage} | more)


def test_an_answer_is_read_with_its_stages() -> None:
    timings = {f"{stage}_ms": ms for stage, ms in STAGES.items()} | {"ttft_ms": 97.0, "stamps_ms": {}}
    seen = read(stream(chunk(1), chunk(2, timings=timings), "[DONE]"))
    assert isinstance(seen, Seen)
    assert (seen.prompt_tokens, seen.stages_ms, seen.sum_ms) == (64, STAGES, 97.0)
    assert seen.ttft_ms == pytest.approx(100)
    assert seen.off_percent == pytest.approx(3)
    assert read(stream(chunk(1), "[DONE]")) == "the answer has no timings"
    assert read(stream(chunk(1))) == "it ended early"


def test_so_many_of_a_hundred_are_close_enough() -> None:
    report = Report("timeline", {})
    add_figures(report, [Seen(64, ttft_ms, STAGES) for ttft_ms in (98.0, 101.0, 96.5, 120.0)])
    figures = {figure.name: figure for figure in report.figures}
    within = figures["sum within 5 % of TTFT"]
    assert (within.value, within.is_met) == (75.0, False)
    least = figures["TTFT beyond the sum, least"]  # a sum above what the client saw cannot be
    assert (least.value, least.is_met) == (pytest.approx(-0.5), False)
    assert figures["64 tokens: prefill p50"].value == 80.0


@pytest.mark.system
def test_a_run() -> None:
    asked = ("--model", "tiny", "--num-requests", "6", "--rate", "20", "--prompt-tokens", "8,40")
    result = CliRunner().invoke(main, asked, catch_exceptions=False)
    assert result.exit_code == 0
    record = json.loads(result.stdout.splitlines()[-1])
    figures = {figure["name"]: figure["value"] for figure in record["figures"]}
    assert (figures["requests"], figures["failed"]) == (6, 0)
    assert figures["TTFT beyond the sum, least"] > 0
    assert figures["40 tokens: prefill p50"] > 0
