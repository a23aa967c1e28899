"""Comparing with clients of others: what they write is read, and those that are not there are left out."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks import outside_clients
from benchmarks.outside_clients import Seen, Timeline, add_figures
from benchmarks.outside_tools import TOOLS, Load, Times, run_tool
from benchmarks.report import Report
from common.errors import ConfigError
from tests.bench.test_benchmarks import TINY, run


def test_ours_against_the_timeline() -> None:
    absent = ("--guidellm", "no-such-program", "--aiperf", "no-such-program")
    sizes = ("--concurrency", "1,2", "--num-requests", "3", "--prompt-tokens", "20", "--output-tokens", "5")
    record = run(outside_clients.main, *TINY, *sizes, *absent, "--rounds", "1")
    figures = {figure["name"]: figure for figure in record["figures"]}
    for at in ("1 at a time", "2 at a time"):
        requests = figures[f"{at}, baton bench serve: requests"]
        assert requests["value"] == requests["limit"] == 3
        assert figures[f"{at}, baton bench serve: prompt, mean"]["value"] == 20
        for name in ("TTFT", "second token", "ITL"):
            assert figures[f"{at}, baton bench serve: {name}, mean"]["limit_name"] == "timeline"
    assert not any("guidellm" in name or "aiperf" in name for name in figures)


def test_guidellm_is_read(tmp_path: Path) -> None:
    def request(ttft_ms: float, itl_ms: float) -> dict[str, float]:
        return {"time_to_first_token_ms": ttft_ms, "inter_token_latency_ms": itl_ms, "prompt_tokens": 128}

    requests = {
        "successful": [request(100, 10), request(110, 12)],
        "incomplete": [request(1, 1)],
        "errored": [],
    }
    (tmp_path / "guidellm.json").write_text(json.dumps({"benchmarks": [{"requests": requests}]}))
    times = TOOLS["guidellm"].read(tmp_path)
    assert (times.ttft_ms, times.itl_ms, times.prompt_tokens) == ([100, 110], [10, 12], [128, 128])
    assert times.second_ms == []


def test_aiperf_is_read(tmp_path: Path) -> None:
    values = {
        "time_to_first_token": 100.0,
        "time_to_second_token": 15.0,
        "inter_token_latency": 12.0,
        "usage_prompt_tokens": 128,
        "inter_chunk_latency": [15.0, 11.0],
    }
    good = {"metrics": {name: {"value": value} for name, value in values.items()}, "error": None}
    bad = {"metrics": {}, "error": {"code": 503}}
    (tmp_path / "profile_export.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n")
    times = TOOLS["aiperf"].read(tmp_path)
    assert (times.ttft_ms, times.second_ms, times.itl_ms, times.prompt_tokens) == ([100], [15], [12], [128])


def test_commands_have_the_load(tmp_path: Path) -> None:
    load = Load("http://127.0.0.1:1", "bench", tmp_path / "model", 4, 20, 128, 32)
    guidellm = " ".join(TOOLS["guidellm"].command("guidellm", load, tmp_path))
    assert "target=http://127.0.0.1:1," in guidellm
    assert "prompt_tokens=128,output_tokens=32" in guidellm
    assert "kind=concurrent,streams=4" in guidellm
    assert f"model={tmp_path / 'model'}" in guidellm
    aiperf = " ".join(TOOLS["aiperf"].command("aiperf", load, tmp_path))
    for words in ("--isl 128", "--osl 32", "--concurrency 4", "--request-count 20", "ignore_eos:true"):
        assert words in aiperf


def test_a_client_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)sh ended with status 3:.*no tokenizer"):
        run_tool(["sh", "-c", "echo no tokenizer; exit 3"], tmp_path / "run")


def test_figures_are_means_of_the_same_requests() -> None:
    timeline = Timeline()
    before: dict[str, float] = defaultdict(float)
    stages = {"queue": 0.02, "prefill": 0.15, "transfer": 0.01, "first_decode": 0.03, "per_token": 0.02}
    timeline.add(before, stages | {"count": 2})
    times = Times(ttft_ms=[80, 110], second_ms=[14, 16], itl_ms=[9, 12], prompt_tokens=[128, 128])
    report = Report("outside_clients", {})
    add_figures(report, "1 at a time", {"aiperf": Seen(times, timeline)})
    figures = {figure.name: figure for figure in report.figures}
    assert figures["1 at a time, aiperf: TTFT, mean"].value == 95
    assert figures["1 at a time, aiperf: TTFT, mean"].limit == pytest.approx(90)
    assert figures["1 at a time, aiperf: second token, mean"].limit == pytest.approx(15)
    ratio = figures["1 at a time, aiperf: TTFT, mean, larger / smaller"]
    assert ratio.value == pytest.approx(95 / 90)
    assert ratio.is_met
    assert figures["1 at a time, aiperf: ITL, mean, larger / smaller"].value == pytest.approx(1.05)
