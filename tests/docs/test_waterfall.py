"""The picture of a request's times on docs/how_it_works.md: current, and of the right lengths."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.docs.generate import HOW_IT_WORKS
from tests.docs.waterfall import COLUMNS, KEPT, draw, fill_waterfall

STAGES = ("tokenize", "submit", "queue", "prefill", "transfer", "send")


def request(took_ms: dict[str, float], chunks: list[float]) -> dict[str, Any]:
    times: dict[str, Any] = {f"{stage}_ms": took_ms.get(stage, 0.0) for stage in STAGES}
    times |= {"ttft_ms": sum(took_ms.values()), "decode_ms": 9.0, "prefill_node": "p", "decode_node": "d"}
    times["stamps_ms"] = {"chunks": chunks, "second_token": 70.0, "done": 80.0}
    return {"prompt_tokens": 5, "output_tokens": 3, "timings": times}


def bars(picture: str) -> dict[str, str]:
    rows = [line for line in picture.splitlines() if " ms |" in line]
    return {line.split()[0]: line.partition(" ms |")[2][:-1] for line in rows}


def test_the_page_has_the_kept_request() -> None:
    page = HOW_IT_WORKS.read_text()
    assert fill_waterfall(page) == page, "run: python -m tests.docs.generate"
    assert draw(json.loads(KEPT.read_text())) in page


def test_bars_are_as_long_as_their_stages_and_follow_each_other() -> None:
    found = bars(draw(request({"queue": 16.0, "prefill": 32.0, "transfer": 16.0}, [32.0, 48.0])))
    assert list(found) == list(STAGES)
    assert {len(bar) for bar in found.values()} == {COLUMNS}
    assert found["queue"] == "=" * 16 + " " * 48
    assert found["prefill"].count("|") == 2
    assert found["prefill"].replace("|", "=") == " " * 16 + "=" * 32 + " " * 16
    assert found["transfer"] == " " * 48 + "=" * 16


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_short_is_seen(stage: str) -> None:
    long = "decode" if stage == "prefill" else "prefill"
    found = bars(draw(request({stage: 0.001, long: 1000.0}, [])))
    assert found[stage].strip() == "="
