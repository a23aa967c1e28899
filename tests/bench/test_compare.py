"""`baton bench compare` puts the same load on both servers in turn, and says which is better where one is.

The servers of most tests are stand-ins whose latencies are made to differ by far more than a busy machine
blurs them: what is tested is which verdict comes out, not how long anything took.
"""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.answers import Answer, read_answer
from benchmarks.cli import bench
from benchmarks.compare_load import Mix
from benchmarks.compare_options import Sizes
from benchmarks.compare_servers import COLOCATED, DISAGGREGATED, ONE_GPU, Asked, order_of, plan_sides
from benchmarks.token_streams import TokenStream
from benchmarks.verdict import Verdict
from cli import baton
from common.errors import ConfigError
from tests.bench.fast_server import FastServer, Json, serving

# 8 requests at a rate, two of them long, within 8 / rate seconds; 16 where a server gets as many as it takes.
FEW = ("--seconds", "0.01", "--concurrency", "8", "--rates", "10")
LONG = 300
SIZES = ("--short-prompt-tokens", "20", "--long-prompt-tokens", str(LONG), "--output-tokens", "4")
GENEROUS = ("--ttft-limit-ms", "60000", "--itl-limit-ms", "60000")


def slow(first_ms: float, rest_ms: float, **changes: Any) -> FastServer:
    return FastServer(first_s=lambda body: first_ms / 1000, rest_s=rest_ms / 1000, **changes)


def run_compare(disaggregated: FastServer, colocated: FastServer, *args: str) -> dict[str, Any]:
    """Run the command against two servers; returns its JSON line."""
    with serving(disaggregated) as one, serving(colocated) as other:
        urls = ("--disaggregated-url", one, "--colocated-url", other)
        result = CliRunner().invoke(
            bench, ["compare", *urls, *FEW, *SIZES, *GENEROUS, *args], catch_exceptions=False
        )
    assert result.exit_code == 0
    record: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    said = next(line for line in result.stdout.splitlines() if line.startswith("verdict: "))
    assert said == f"verdict: {record['comparison']['verdict']} ({record['comparison']['reason']})"
    found: dict[str, Any] = record["comparison"]
    return found


# Which verdict comes out ----------------------------------------------------------------------------------


def test_steadier_tokens_speak_for_disaggregation() -> None:
    found = run_compare(slow(20, 4), slow(20, 40), "--rounds", "3")
    assert (found["verdict"], found["rule"]) == ("disaggregate", 4)
    assert "inter-token p99" in found["reason"]


def test_later_first_tokens_speak_against_it() -> None:
    found = run_compare(slow(200, 4), slow(20, 4), "--rounds", "3")
    assert (found["verdict"], found["rule"]) == ("don't", 4)
    assert "TTFT p50" in found["reason"]
    assert found["advice"] == ["serve with --colocated"]


def test_limits_that_one_of_them_misses_decide() -> None:
    found = run_compare(slow(250, 2), slow(20, 40), "--rounds", "2", "--ttft-limit-ms", "150")
    assert (found["verdict"], found["rule"]) == ("don't", 3)
    assert "best goodput" in found["reason"]
    assert found["limits"] == {"ttft_ms": 150, "itl_ms": 60000}


def test_servers_that_do_not_differ_are_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_set_times(stream: TokenStream) -> Answer:
        """An answer as it would have come on a machine where nothing ever waits for a processor."""
        answer = read_answer(stream)
        chunks = [(answer.begun_s + 0.2 + 0.08 * i, n) for i, (_, n) in enumerate(answer.chunks)]
        return replace(answer, chunks=chunks)

    monkeypatch.setattr("benchmarks.compare_load.read_answer", at_set_times)
    found = run_compare(slow(60, 20), slow(60, 20), "--rounds", "3")
    assert found["verdict"] == "no difference that matters", found["reason"]
    findings = {each["figure"]: each["finding"] for each in found["has_a_say"]}
    assert set(findings.values()) == {"same"}


def test_failures_are_said_before_anything_else() -> None:
    count = itertools.count()
    failing = slow(20, 4, fails=lambda body: "event" if next(count) > 20 and next(count) % 3 == 0 else "")
    found = run_compare(failing, slow(20, 40), "--rounds", "2")
    assert (found["verdict"], found["rule"]) == ("cannot tell", 1)
    assert "disaggregated server failed" in found["reason"]


def test_rounds_that_contradict_each_other_are_no_answer() -> None:
    # 8 requests one by one, then 24 a round: as many as it takes, and a rate.
    count = itertools.count()

    def moody(body: Json) -> float:
        return (0.02, 0.32)[max(0, next(count) - 8) // 24 % 2]

    found = run_compare(FastServer(first_s=moody, rest_s=0.004), slow(80, 4), "--rounds", "2")
    assert (found["verdict"], found["rule"]) == ("cannot tell", 6)
    assert "noise is larger" in found["reason"]
    assert found["advice"] == ["measure for longer: --rounds 4, or more --seconds a round"]


def test_server_that_serves_nothing_is_an_error() -> None:
    with serving(FastServer(fails=lambda body: "refuse")) as one, serving(FastServer()) as other:
        urls = ("--disaggregated-url", one, "--colocated-url", other)
        result = CliRunner().invoke(bench, ["compare", *urls, *FEW, *SIZES])
    assert isinstance(result.exception, ConfigError)
    assert "the disaggregated server answers no request" in str(result.exception)
    result = CliRunner().invoke(bench, ["compare", "--colocated-url", one])
    assert isinstance(result.exception, ConfigError)
    assert "go together" in str(result.exception)


# What was sent --------------------------------------------------------------------------------------------


def test_both_servers_get_the_same_requests_in_turn(tmp_path: Path) -> None:
    one, other = slow(5, 2), slow(5, 2)
    picture = tmp_path / "compared.svg"
    found = run_compare(one, other, "--rounds", "3", "--rates", "10,20", "--plot", str(picture))
    prompts = [sorted(tuple(body["prompt"]) for body in server.bodies) for server in (one, other)]
    assert prompts[0] == prompts[1]
    measured = Counter(prompts[0])
    assert max(measured.values()) == 1  # what a cache of prefixes could use
    assert {body["max_tokens"] for body in one.bodies} == {4}
    cells = found["cells"]
    assert [(cell["round"], cell["server"][:1]) for cell in cells[::6]] == [(0, "d"), (1, "c"), (2, "d")]
    assert [cell["server"][:1] for cell in cells] == list("dcdcdc" + "cdcdcd" + "dcdcdc")
    assert [cell["rate"] for cell in cells[:6:2]] == [None, 10, 20]
    # What of it is drawn: a line for each server and percentile, each with its name.
    root = ElementTree.fromstring(picture.read_text())
    titles = Counter(element.text for element in root.iter() if element.tag.endswith("title"))
    for server in (DISAGGREGATED, COLOCATED):
        assert {f"{server} {at}" for at in ("p50", "p90", "p99", "max")} <= titles.keys()
        assert titles[server] == 2  # goodput, and the share within the limits
    assert {"time to first token", "time between tokens", "goodput"} <= titles.keys()


def test_plot_that_could_not_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with serving(FastServer()) as url:
        for command in (
            ["compare", "--disaggregated-url", url, "--colocated-url", url],
            ["serve", "--url", url],
        ):
            result = CliRunner().invoke(bench, [*command, "--plot", str(tmp_path / "none" / "a.svg")])
            assert result.exit_code == 2
            assert f"{tmp_path / 'none'} is no folder that can be written" in result.stderr


def test_mix_has_its_share_of_long_prompts() -> None:
    mix = Mix(20, LONG, 0.25, 5, seed=1)
    lengths = mix.lengths(40, number=3)
    assert Counter(lengths) == {20: 30, LONG: 10}
    assert lengths == mix.lengths(40, number=3) != mix.lengths(40, number=4)


def test_limits_follow_from_one_request_alone() -> None:
    with serving(slow(50, 20)) as one, serving(slow(200, 80)) as other:
        urls = ("--disaggregated-url", one, "--colocated-url", other)
        result = CliRunner().invoke(bench, ["compare", *urls, *FEW, *SIZES, "--rounds", "2"])
    limits = json.loads(result.stdout.splitlines()[-1])["comparison"]["limits"]
    assert 150 <= limits["ttft_ms"] < 600  # 3 times the quicker one's; of the slower one it would be 600
    assert 60 <= limits["itl_ms"] < 240


def test_rates_are_parts_of_what_the_better_server_takes() -> None:
    with serving(slow(100, 1)) as one, serving(slow(400, 1)) as other:
        urls = ("--disaggregated-url", one, "--colocated-url", other)
        sizes = ("--seconds", "0.01", "--concurrency", "8", "--rounds", "2", "--loads", "0.2,0.1")
        result = CliRunner().invoke(bench, ["compare", *urls, *SIZES, *sizes], catch_exceptions=False)
    cells = json.loads(result.stdout.splitlines()[-1])["comparison"]["cells"]
    low, high = sorted({cell["rate"] for cell in cells} - {None})
    assert high == pytest.approx(2 * low, rel=0.01)
    assert {cell["requests"] for cell in cells if cell["rate"] is None} == {2 * 8}  # it gets full
    assert 2 < low < 8  # a tenth of 8 in 0.1 s; of the slower one it would be below 2


# Which servers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "prefill", "decode", "colocated_nodes", "third"),
    [
        (0, 1, 1, 1, False),
        (0, 2, 2, 1, False),
        (1, 1, 1, 1, False),
        (2, 1, 1, 2, True),
        (8, 1, 1, 2, True),
        (8, 2, 4, 6, True),
        (4, 3, 3, 4, True),
    ],
)
def test_colocated_server_has_as_many_gpus(
    gpus: int, prefill: int, decode: int, colocated_nodes: int, third: bool
) -> None:
    ours, theirs, *others = plan_sides(Asked(prefill, decode, None, ("--page-size", "32")), gpus)
    assert ours.options == ("--prefill", f"{prefill}", "--decode", f"{decode}", "--page-size", "32")
    assert theirs.options == ("--colocated", "--decode", f"{colocated_nodes}", "--page-size", "32")
    assert [side.name for side in others] == [ONE_GPU] * third
    named = plan_sides(Asked(prefill, decode, 3, ()), gpus)[1]
    assert named.options == ("--colocated", "--decode", "3")


def test_rounds_alternate() -> None:
    sides = plan_sides(Asked(1, 1, None, ()), 2)
    names = [[side.name for side in order_of(sides, round_)] for round_ in range(4)]
    assert names == [names[0], names[0][::-1]] * 2


def test_what_the_user_says_stands_and_the_rest_fits_the_device() -> None:
    unsaid: dict[str, Any] = dict.fromkeys(Sizes.__slots__)
    for on_gpu, quick in itertools.product((False, True), repeat=2):
        options = unsaid | {"quick": quick, "output_tokens": 7}
        sizes = Sizes.of(options, on_gpu=on_gpu)
        assert sizes.output_tokens == options["output_tokens"] == 7
        assert sizes.rounds == options["rounds"] == (3 if quick else 4)
        assert (sizes.concurrency == 64) == on_gpu


# Real servers ---------------------------------------------------------------------------------------------


@pytest.mark.system
def test_servers_of_this_machine_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.report.RESULTS", tmp_path / "benchmarks" / "results")
    (tmp_path / "benchmarks").mkdir()
    sizes = ("--short-prompt-tokens", "8", "--long-prompt-tokens", "64", "--output-tokens", "4")
    options = ("--rounds", "2", "--seconds", "0.1", "--loads", "0.5", "--concurrency", "2", "--device", "cpu")
    served = ("--serve", "--dtype float32 --kv-pages 200", "--label", "tiny")
    result = CliRunner().invoke(
        baton, ["bench", "compare", "tiny", *sizes, *options, *served, "--save"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout.splitlines()[-1])
    assert record["comparison"]["verdict"] in {verdict.value for verdict in Verdict}
    assert record["options"]["servers"] == "together"
    assert [cell["failed"] for cell in record["comparison"]["cells"]] == [0] * 8
    assert 0 <= record["comparison"]["others"] <= 1
    saved = sorted(path.suffix for path in (tmp_path / "benchmarks" / "results").iterdir())
    assert saved == [".json", ".svg"]


def test_prompts_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    from tests.tiny import write_tiny_model

    folder = write_tiny_model(tmp_path / "small", max_position_embeddings=128)
    result = CliRunner().invoke(bench, ["compare", str(folder), "--device", "cpu", "--quick"])
    assert isinstance(result.exception, ConfigError)
    assert "room for 128" in str(result.exception)
