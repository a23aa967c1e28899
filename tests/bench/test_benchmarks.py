"""Each benchmark runs at toy size, prints its table, and says the same in one JSON line last."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from benchmarks import decode, handover, host, interference, planes, prefill
from benchmarks.plot import Panel, draw
from benchmarks.report import Figure, Report

TINY = ("--model", "tiny")
KEYS = {"benchmark", "date", "commit", "machine", "load_average", "versions", "options", "figures"}
MACHINE_KEYS = {"cpu", "cores", "torch_threads", "flags", "system", "gpus"}
ENGINE = (*TINY, "--dtype", "float32", "--rounds", "1")


def run(command: click.Command, *args: str) -> dict[str, Any]:
    """Run a benchmark; return the JSON of its last line, checked for what all of them promise."""
    result = CliRunner().invoke(command, args, catch_exceptions=False)
    assert result.exit_code == 0
    *table, last = result.stdout.splitlines()
    record: dict[str, Any] = json.loads(last)
    assert record.keys() == KEYS
    assert record["machine"].keys() == MACHINE_KEYS
    assert record["versions"].keys() >= {"python", "torch", "transformers"}
    for figure in record["figures"]:
        assert math.isfinite(figure["value"])
        assert any(line.startswith(figure["name"]) and figure["unit"] in line for line in table)
    return record


def names(record: dict[str, Any]) -> list[str]:
    """The figures of a run."""
    return [figure["name"].strip() for figure in record["figures"]]


def test_decode() -> None:
    record = run(decode.main, *ENGINE, "--streams", "1,2", "--context", "48", "--steps", "4")
    for streams in (1, 2):
        assert {f"our step, {streams} streams", f"ours / theirs, {streams} streams"} <= set(names(record))


def test_prefill() -> None:
    record = run(prefill.main, *ENGINE, "--tokens", "96", "--budget", "32")
    assert names(record) == ["96 tokens, chunks of 32", "ours / theirs", "prompt tokens a second"]


def test_planes() -> None:
    record = run(planes.main, "--pages", "1,3", "--layers", "2", "--rounds", "1")
    assert {"frames, 1 pages", "shm, 1 pages", "frames, 3 pages / raw", "shm, 3 pages / memcpy"} <= set(
        names(record)
    )


def test_host() -> None:
    record = run(host.main, "--requests", "1,3", "--long", "1000", "--long-requests", "1", "--steps", "5")
    assert {"1 requests", "3 requests", "1 requests of 1000 tokens", "PREBUILT of 1000 tokens"} <= set(
        names(record)
    )


@pytest.mark.system
def test_handover() -> None:
    record = run(handover.main, *TINY, "--lengths", "20", "--rounds", "1")
    stages = ("queue", "prefill", "transfer", "first decode step")
    assert names(record) == [f"20 tokens: {stage}" for stage in stages]


@pytest.mark.system
def test_interference(tmp_path: Path) -> None:
    picture = tmp_path / "gaps.svg"
    record = run(
        interference.main,
        *("--streams", "2", "--tokens", "600", "--quiet", "0.2"),
        *("--servers", "colocated", "--plot", str(picture)),
    )
    assert {f"colocated: {name} beside" for name in ("p50", "p99", "max")} <= set(names(record))
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")


def test_aims_are_judged() -> None:
    assert Figure("time", 1.0, "ms").is_met is None
    assert Figure("time", 1.0, "ms", at_most=1.0).is_met is True
    assert Figure("time", 1.1, "ms", at_most=1.0).is_met is False
    assert Figure("rate", 0.4, "x", at_least=0.5).is_met is False


def test_saved_result_is_the_json_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.report.RESULTS", tmp_path / "benchmarks" / "results")
    (tmp_path / "benchmarks").mkdir()
    report = Report("something", {"size": 3})
    report.add("time", 2.0, "ms", limit=1.0, limit_name="the floor", at_most=3.0)
    report.publish(save=True)
    (saved,) = (tmp_path / "benchmarks" / "results").iterdir()
    assert saved.name.startswith("something-")
    assert json.loads(saved.read_text()) == json.loads(capsys.readouterr().out.splitlines()[-1])


def test_no_result_has_the_key_of_a_server() -> None:
    @click.command()
    @click.option("--api-key")
    @click.option("--rounds", type=int)
    def bench(**_: object) -> None:
        Report.of_command("bench").publish(save=False)

    said = CliRunner().invoke(bench, ["--api-key", "sk-secret", "--rounds", "3"]).output
    assert "sk-secret" not in said
    assert json.loads(said.splitlines()[-1])["options"] == {"rounds": 3}


def test_plot_has_a_panel_for_each_server() -> None:
    gaps = [(at / 10, 0.002 + at / 1000) for at in range(-10, 20)]
    picture = draw("a title", [Panel("one", gaps, 1.0), Panel("other", gaps, 0.5)])
    texts = [element.text for element in ElementTree.fromstring(picture).iter() if element.text]
    assert {"a title", "one", "other"} <= set(texts)
