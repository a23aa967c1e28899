"""Every example of docs/examples runs as it is (but for the server's port), and prints what it should."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.api import examples
from tests.system.client import Client
from tests.system.server import running

pytestmark = [pytest.mark.system, pytest.mark.smollm2]

ADDRESS = "http://127.0.0.1:8000"
PATIENCE_S = 300.0


def has(*patterns: str) -> Callable[[str], bool]:
    """Each pattern is somewhere in what was printed."""
    return lambda said: all(re.search(pattern, said) for pattern in patterns)


def curl_is_right(said: str) -> bool:
    """A body, events with [DONE], an error object that names the field."""
    body, *events, error = [line for line in said.splitlines() if line]
    return (
        json.loads(body)["object"] == "text_completion"
        and events[-1] == "data: [DONE]"
        and all(json.loads(event.removeprefix("data: "))["choices"] for event in events[:-1])
        and json.loads(error)["error"]["param"] == "suffix"
    )


def choices_are_right(said: str) -> bool:
    """Four answers that are not all the same, and again the same four."""
    *drawn, again = said.splitlines()
    answers = {line[2:] for line in drawn}
    return {line[0] for line in drawn if line} >= set("0123") and len(answers) > 1 and again.endswith("True")


EXPECTED: dict[str, Callable[[str], bool]] = {
    "async_client.py": has(r"What is a river\? .*\w", r"What is an island\? .*\w"),
    "chat.py": has(r"assistant says: .*Rome", r"assistant says: .*France"),
    "choices.py": choices_are_right,
    "completion.py": has("Paris", r"8 tokens, ended by length", r"One, two, three, four", r"A, B, C, D"),
    "curl.sh": curl_is_right,
    "json_schema.py": has(r"^\S.* \d{1,3} (red|green|blue)\n$"),
    "logprobs.py": has(r"'\S+': .*\d+%, .*\d+%, .*\d+%", r"'The': \(the first\)", r"' Paris': -\d\.\d\d"),
    "streaming.py": has("race", r"\d+ \+ \d+ tokens", r"prefill \d+ ms, hand-over \d+ ms"),
    "structured_outputs.py": has(r"date: (19|20)\d\d-[01]\d-[0-3]\d\n", r"mood: (happy|sad)\n"),
    "tools.py": has(r"calls get_weather \{'city': '.*'\}\n(.|\n)*\w"),
}


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Client]:
    with running(smollm2, "--dtype", "float32") as server:
        client = Client(server.url, server.model)
        yield client
        client.assert_ledger_clean()


def test_every_example_is_run() -> None:
    assert {path.name for path in examples()} == EXPECTED.keys()


@pytest.mark.parametrize("path", examples(), ids=lambda path: path.name)
def test_example(server: Client, tmp_path: Path, path: Path) -> None:
    source = path.read_text()
    assert ADDRESS in source
    here = tmp_path / path.name
    here.write_text(source.replace(ADDRESS, server.url))
    command = [sys.executable if path.suffix == ".py" else "sh", str(here)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert EXPECTED[path.name](done.stdout), done.stdout
