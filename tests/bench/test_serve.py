"""`baton bench serve` counts and sorts right; the server it asks knows what it sent."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.answers import Answer, read_answer
from benchmarks.cli import bench
from benchmarks.load import Effort, run_load
from benchmarks.report import Report
from benchmarks.requests import RequestMaker, arrivals
from benchmarks.serve_figures import GoodLimits, add_phase
from benchmarks.targets import Targets
from benchmarks.token_streams import StreamClient, TokenStream
from cli import baton
from common.errors import ConfigError
from tests.bench.fast_server import FastServer, serving

PATIENCE_S = 60.0


def maker(**changes: Any) -> RequestMaker:
    facts = {"model": "fast", "vocab_size": 100, "is_text": False, "asks_ids": False, "seed": 1}
    return RequestMaker(**(facts | changes))


def load(
    server: FastServer, num: int, tokens: int, most_open: int | None = None, **changes: Any
) -> list[Answer]:
    """Send requests of 10 tokens to a server; request number i asks for `tokens` + i % 3 tokens."""
    with serving(server) as url:
        client = StreamClient(url)
        requests = [client.encode(maker(**changes).body(10, tokens + i % 3, i)) for i in range(num)]
        streams = run_load(client, requests, None, most_open, PATIENCE_S, Effort())
    return [read_answer(stream) for stream in streams]


def run_serve(url: str, *args: str) -> dict[str, Any]:
    """Run the command; return value by figure."""
    result = CliRunner().invoke(bench, ["serve", "--url", url, *args], catch_exceptions=False)
    assert result.exit_code == 0
    record = json.loads(result.stdout.splitlines()[-1])
    assert record["benchmark"] == "serve"
    return {figure["name"]: figure["value"] for figure in record["figures"]}


@pytest.mark.parametrize(
    ("server", "changes", "chunk_tokens"),
    [
        (FastServer(), {}, 1),
        (FastServer(has_usage=False), {}, 1),
        (FastServer(tokens_a_chunk=4), {}, 4),
        (FastServer(tokens_a_chunk=4, has_usage=False), {"asks_ids": True}, 4),
    ],
    ids=["usage", "text", "several by usage", "several by ids"],
)
def test_every_token_of_256_streams_is_counted(
    server: FastServer, changes: dict[str, Any], chunk_tokens: int
) -> None:
    answers = load(server, 256, 40, **changes)
    assert server.served == 256
    for i, answer in enumerate(answers):
        num = 40 + i % 3
        assert not answer.error
        assert (answer.num_tokens, answer.prompt_tokens) == (num, 10)
        assert [n for _, n in answer.chunks] == [
            min(chunk_tokens, num - at) for at in range(0, num, chunk_tokens)
        ]


def test_what_is_cut_anywhere_counts_when_it_is_whole() -> None:
    events = [b'data: {"choices": [{"text": "a"}]}\n\n', b'data: {"choices": [{"text": "b"}]}\r\n\r\n']
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    ends = []
    for event in (*events, b"data: [DONE]\n\n"):
        data += b"%x\r\n%s" % (len(event), event)
        ends.append(len(data))
        data += b"\r\n"
    data += b"0\r\n\r\n"
    for cut in range(1, len(data)):
        stream = TokenStream.__new__(TokenStream)
        stream.begun_s, stream.failure = 0.0, ""
        stream.pieces = [(1.0, data[:cut]), (2.0, data[cut:])]
        answer = read_answer(stream)
        assert answer.chunks == [(1.0 if end <= cut else 2.0, 1) for end in ends[:2]], cut
        assert not answer.error


def test_pieces_of_a_few_bytes_are_read_by_the_client() -> None:
    answers = load(FastServer(cut_bytes=7), 8, 5)
    assert [answer.num_tokens for answer in answers] == [5 + i % 3 for i in range(8)]
    assert not any(answer.error for answer in answers)


def test_what_failed_is_told_apart() -> None:
    kinds = ["", "refuse", "cut", "event"]
    server = FastServer(fails=lambda body: kinds[(body["max_tokens"] - 5) % 3 + 1])
    answers = load(server, 6, 5)
    for answer, words in zip(answers, ["too many", "ended early", "node died"] * 2, strict=True):
        assert words in answer.error


def test_server_that_is_not_there_is_an_error_of_each_request() -> None:
    with serving(FastServer()) as url:
        pass
    client = StreamClient(url)
    request = client.encode(maker().body(10, 5, 0))
    (stream,) = run_load(client, [request], None, None, PATIENCE_S, Effort())
    assert "refused" in read_answer(stream).error
    result = CliRunner().invoke(bench, ["serve", "--url", url])
    assert isinstance(result.exception, ConfigError)


def test_no_more_requests_are_open_than_asked_for() -> None:
    server = FastServer()
    assert len(load(server, 40, 10, most_open=3)) == 40
    assert server.most_open == 3


def test_requests_are_repeatable_and_share_nothing() -> None:
    bodies = [maker().body(50, 7, i) for i in range(20)]
    assert bodies == [maker().body(50, 7, i) for i in range(20)]
    assert len({tuple(body["prompt"][:8]) for body in bodies}) == 20
    for body in bodies:
        assert len(body["prompt"]) == 50
        assert 3 <= min(body["prompt"]) <= max(body["prompt"]) < 100
        assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (7, True, 0)
    assert len(maker(is_text=True).body(50, 7, 0)["prompt"].split()) == 50


def test_arrivals_have_the_rate_that_was_asked_for() -> None:
    assert arrivals(4, 2.0, 0, is_even=True) == [0.0, 0.5, 1.0, 1.5]
    times = arrivals(20_000, 50.0, 0)
    assert list(times) == sorted(times)
    assert 0 <= times[0] < times[-1] <= 400
    waits = [after - before for before, after in pairwise(times)]
    longer = sum(wait > 1 / 50 for wait in waits) / len(waits)
    assert longer == pytest.approx(0.3679, rel=0.05)  # 1/e, of an exponential distribution
    assert arrivals(0, 2.0, 0) == []


def answer_at(*times_s: float) -> Answer:
    return Answer(0.0, [(at_s, 1) for at_s in times_s], 10, len(times_s), "")


def test_goodput_needs_both_limits() -> None:
    answer = answer_at(0.5, 0.6, 0.9)  # first token after 500 ms, longest gap 300 ms
    assert GoodLimits(510, 310).are_kept(answer)
    assert not GoodLimits(490, 310).are_kept(answer)
    assert not GoodLimits(510, 290).are_kept(answer)
    assert GoodLimits(None, 310).are_kept(answer)
    assert GoodLimits(510, 0.1).are_kept(answer_at(0.5))


def test_gap_that_long_prompts_lengthen_is_a_busy_one_wherever_it_begins_and_ends() -> None:
    report = Report("serve", {})
    targets = Targets(report, {}, {})
    answers = [answer_at(1.0, 1.1, 1.9, 2.4, 2.5, 9.0)]
    quiet_ms = add_phase(targets, "quiet", answers, (1.0, 2.0), 100)
    assert quiet_ms["max"] == pytest.approx(800)
    assert quiet_ms["p50"] == pytest.approx(800)  # of two, the one that half are not above
    busy_ms = add_phase(targets, "busy", answers, (2.0, 3.0), 100, quiet_ms)
    assert busy_ms["max"] == pytest.approx(6500)
    assert busy_ms["p50"] == pytest.approx(500)
    figures = {figure.name: figure for figure in report.figures}
    assert figures["busy: ITL max"].limit == pytest.approx(800)
    assert figures["ITL p99 busy over p50 quiet"].value == pytest.approx(6500 / 800)
    assert figures["busy: output"].value == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="hold streams for longer"):
        add_phase(targets, "quiet", answers, (20.0, 30.0), 100)


def test_aims_stand_beside_what_they_name() -> None:
    report = Report("serve", {})
    targets = Targets.of(report, ["ttft_p50_ms=5", "goodput_requests_per_s=5"], ["itl_p99_ms=4"])
    targets.add("TTFT p50", 6.0, "ms")
    targets.add("goodput", 6.0, "requests/s")
    with pytest.raises(ConfigError, match="no figure itl_p99_ms, only goodput_requests_per_s, ttft_p50_ms"):
        targets.check()
    targets.add("ITL p99", 8.0, "ms")
    targets.check()
    late, good, itl = report.figures
    assert (late.is_met, good.is_met, itl.is_met, itl.limit) == (False, True, None, 4.0)
    with pytest.raises(ConfigError, match="ttft"):
        Targets.of(report, ["ttft=fast"], [])


def test_command_is_there_and_another_is_not() -> None:
    listed = CliRunner().invoke(baton, ["bench"])
    assert "serve" in listed.output
    assert CliRunner().invoke(baton, ["bench", "no-such"]).exit_code == 2
    for word in ("--rate", "--hold", "--aim"):
        assert word in CliRunner().invoke(baton, ["bench", "serve", "--help"]).output


def test_load_is_reported() -> None:
    server = FastServer()
    with serving(server) as url:
        values = run_serve(
            url,
            *("--num-requests", "20", "--output-tokens", "9", "--concurrency", "5", "--warm-up", "3"),
            *("--ttft-limit-ms", "1e6", "--itl-limit-ms", "1e6"),
        )
    assert server.served == 23
    assert {len(body["prompt"]) for body in server.bodies} == {512}
    assert values["failed"] == 0
    assert values["within the limits"] == 100
    assert values["prompt length"] == 512
    assert values["output"] == pytest.approx(values["answered"] * 9)
    assert values["goodput"] == values["answered"]


def test_open_loop_waits_for_nobody() -> None:
    server = FastServer()
    with serving(server) as url:
        assert run_serve(url, "--num-requests", "30", "--rate", "1000", "--output-tokens", "3")["failed"] == 0
    assert server.served == 34


def test_several_lengths_have_a_row_each() -> None:
    server = FastServer()
    with serving(server) as url:
        values = run_serve(url, "--prompt-tokens", "7,30", "--num-requests", "2", "--output-tokens", "4")
    assert {"7 tokens: TTFT p50", "7 tokens: ITL max", "30 tokens: TTFT p50"} <= values.keys()
    assert [len(body["prompt"]) for body in server.bodies] == [7] * 6 + [30] * 6


def test_held_streams_are_held_and_long_prompts_come() -> None:
    server = FastServer()
    with serving(server) as url:
        values = run_serve(
            url,
            *("--hold", "4", "--hold-tokens", "500", "--prompt-tokens", "5", "--quiet-s", "0.3"),
            *(
                "--busy-s",
                "0.3",
                "--long-rate",
                "50",
                "--long-prompt-tokens",
                "2000",
                "--arrivals",
                "even",
                "--warm-up",
                "2",
            ),
        )
    long = [body for body in server.bodies if len(body["prompt"]) == 2000]
    assert len(long) == 2 + values["long prompts: answered"] == 2 + 15
    held = [body for body in server.bodies if len(body["prompt"]) == 5]
    assert len(held) == 4 + values["held streams that began again"]
    assert values["held streams that began again"] > 0  # this server is fast
    assert values["held streams that failed"] == values["long prompts: failed"] == 0
    assert {"quiet: ITL p99", "quiet again: ITL p50", "busy: ITL max"} <= values.keys()
    assert all(5 < values[f"{phase}: context, mean"] < 506 for phase in ("quiet", "busy", "quiet again"))


def test_loads_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "load.svg"
    with serving(FastServer()) as url:
        run_serve(url, "--prompt-tokens", "7,30", "--num-requests", "2", "--plot", str(path))
        titles = [e.text for e in ElementTree.fromstring(path.read_text()).iter() if e.tag.endswith("title")]
        assert titles.count("prompts of 7 tokens") == titles.count("prompts of 30 tokens") == 4
        run_serve(url, "--hold", "2", "--quiet-s", "0.2", "--busy-s", "0", "--plot", str(path))
    titles = [e.text for e in ElementTree.fromstring(path.read_text()).iter() if e.tag.endswith("title")]
    assert titles.count("held streams") == 4
    assert "long prompts" not in titles  # there were none


def test_ends_are_counted_as_they_come() -> None:
    ended: list[int] = []
    with serving(FastServer()) as url:
        client = StreamClient(url)
        requests = [client.encode(maker().body(10, 5, i)) for i in range(30)]
        run_load(client, requests, None, 3, PATIENCE_S, Effort(), ended.append)
    assert sum(ended) == 30
    assert 0 < max(ended) <= 3


def test_hold_without_long_prompts_is_quiet() -> None:
    with serving(FastServer()) as url:
        values = run_serve(url, "--hold", "2", "--quiet-s", "0.2", "--busy-s", "0")
    assert "quiet: ITL p50" in values
    assert not any(name.startswith(("busy", "long")) for name in values)


def test_stream_that_cannot_be_held_is_said() -> None:
    with serving(FastServer(fails=lambda body: "refuse")) as url:
        result = CliRunner().invoke(bench, ["serve", "--url", url, "--hold", "2"])
    assert isinstance(result.exception, ConfigError)
    assert "too many" in str(result.exception)
