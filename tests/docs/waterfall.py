"""A request's times as text: the picture in docs/how_it_works.md, from a real answer of /debug/requests.

`python -m tests.docs.waterfall URL` keeps the request with the most chunks of a running server as the one
that the page shows; `python -m tests.docs.generate` writes it into the page then.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx

from gateway.timeline import FIRST_TOKEN_STAGES

KEPT = Path(__file__).with_name("waterfall.json")
COLUMNS = 64
_SECTION = re.compile(r"(<!-- generated: waterfall -->\n).*?(<!-- end -->\n)", re.DOTALL)


def fill_waterfall(page: str) -> str:
    """Return the page with the picture of the request that was kept."""
    picture = f"```\n{draw(json.loads(KEPT.read_text()))}```\n"
    return _SECTION.sub(lambda found: found[1] + picture + found[2], page)


def draw(request: dict[str, Any]) -> str:
    """Return the picture: a row a stage up to the first token, columns of equal time; the rest in words."""
    times = request["timings"]
    stamps, total_ms = times["stamps_ms"], times["ttft_ms"]
    column_ms = total_ms / COLUMNS
    chunks = stamps["chunks"]
    lines = [
        f"{request['prompt_tokens']} prompt tokens, {request['output_tokens']} of answer; "
        f"first token after {total_ms:.1f} ms; a column is {column_ms:.1f} ms",
        "",
    ]
    start_ms = 0.0
    for stage in FIRST_TOKEN_STAGES:
        took_ms = times[f"{stage}_ms"]
        bar = _bar(start_ms, start_ms + took_ms, chunks if stage == "prefill" else [], column_ms)
        lines.append(f"{stage:<9}{took_ms:8.1f} ms |{bar:<{COLUMNS}}|")
        start_ms += took_ms
    lines += [
        "",
        f"prefill in {len(chunks)} chunks: done after {', '.join(f'{ms:.0f}' for ms in chunks)} ms",
        f"decode {times['decode_ms']:.1f} ms: the second token after {stamps['second_token']:.0f} ms, "
        f"the last one after {stamps['done']:.0f}",
        f"prefill on {times['prefill_node']}, decode on {times['decode_node']}",
    ]
    return "\n".join(lines) + "\n"


def _bar(start_ms: float, end_ms: float, chunks: list[float], column_ms: float) -> str:
    """Return a bar from one time to another, an end of a chunk as `|`; what is short is a column, too."""
    first = min(int(start_ms / column_ms), COLUMNS - 1)
    last = max(first + 1, min(round(end_ms / column_ms), COLUMNS))
    cells = [" "] * first + ["="] * (last - first)
    for chunk_ms in chunks:
        cells[max(first, min(int(chunk_ms / column_ms), last - 1))] = "|"
    return "".join(cells)


def main(url: str) -> None:
    """Keep a request of a server."""
    answer = httpx.get(f"{url}/debug/requests", trust_env=False).json()
    ended = [each for each in answer["requests"] if each["outcome"] == "success"]
    chosen = max(ended, key=lambda each: len(each["timings"]["stamps_ms"]["chunks"]))
    KEPT.write_text(json.dumps(chosen | {"id": "chatcmpl-1", "received_s": 0.0}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
