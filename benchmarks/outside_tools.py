"""Two load generators of others, guidellm and aiperf: the commands that they are run by, and what they wrote.

Each lives in an environment of its own and is told a server's address and a folder with a tokenizer. What
comes back is times of single requests, so that all clients are reduced to figures in one way.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError

_PATIENCE_S = 1800.0
_TAIL_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Load:
    """What every client does: so many requests, `concurrency` of them at a time."""

    url: str
    model: str
    tokenizer: Path
    concurrency: int
    num_requests: int
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Times:
    """Milliseconds of one client at one concurrency, one number a request."""

    ttft_ms: list[float] = field(default_factory=list)
    second_ms: list[float] = field(default_factory=list)  # first to second token; not every client has it
    itl_ms: list[float] = field(default_factory=list)  # mean of the gaps between a request's tokens
    prompt_tokens: list[float] = field(default_factory=list)  # as the server counts

    def __len__(self) -> int:
        return len(self.ttft_ms)

    def extend(self, other: Times) -> None:
        """Add the requests of another round."""
        self.ttft_ms += other.ttft_ms
        self.second_ms += other.second_ms
        self.itl_ms += other.itl_ms
        self.prompt_tokens += other.prompt_tokens


def guidellm_command(program: str, load: Load, folder: Path) -> list[str]:
    """Return the command that puts the load on the server, and writes `guidellm.json`."""
    return [
        *(program, "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={load.url},request_format=/v1/completions"),
        *("--tokenizer", f"kind=huggingface_auto,model={load.tokenizer}"),
        *(
            "--data",
            f"kind=synthetic_text,prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}",
        ),
        *("--profile", f"kind=concurrent,streams={load.concurrency}"),
        *("--constraint", f"kind=max_requests,count={load.num_requests}"),
        *("--output", f"kind=json,path={folder / 'guidellm.json'}"),
    ]


def read_guidellm(folder: Path) -> Times:
    """Return the times of the requests that succeeded."""
    times = Times()
    for run in json.loads((folder / "guidellm.json").read_text())["benchmarks"]:
        for request in run["requests"]["successful"]:
            times.ttft_ms.append(request["time_to_first_token_ms"])
            times.itl_ms.append(request["inter_token_latency_ms"])
            times.prompt_tokens.append(request["prompt_tokens"])
    return times


def aiperf_command(program: str, load: Load, folder: Path) -> list[str]:
    """Return the command that puts the load on the server, and writes `profile_export.jsonl`."""
    return [
        *(program, "profile", "--ui", "none", "--no-gpu-telemetry"),
        *("--url", load.url, "--model", load.model, "--tokenizer", str(load.tokenizer)),
        *("--endpoint-type", "completions", "--streaming", "--extra-inputs", "ignore_eos:true"),
        *("--isl", str(load.prompt_tokens), "--isl-stddev", "0"),
        *("--osl", str(load.output_tokens), "--osl-stddev", "0"),
        *("--concurrency", str(load.concurrency), "--request-count", str(load.num_requests)),
        *("--artifact-dir", str(folder)),
    ]


def read_aiperf(folder: Path) -> Times:
    """Return the times of the requests that succeeded."""
    times = Times()
    for line in (folder / "profile_export.jsonl").read_text().splitlines():
        record: dict[str, Any] = json.loads(line)
        if record.get("error") is None:
            value = {name: metric["value"] for name, metric in record["metrics"].items()}
            times.ttft_ms.append(value["time_to_first_token"])
            times.second_ms.append(value["time_to_second_token"])
            times.itl_ms.append(value["inter_token_latency"])
            times.prompt_tokens.append(value["usage_prompt_tokens"])
    return times


@dataclass(frozen=True, slots=True)
class Tool:
    """One of them: how it is run, and how its results are read."""

    command: Callable[[str, Load, Path], list[str]]
    read: Callable[[Path], Times]


TOOLS = {
    "guidellm": Tool(guidellm_command, read_guidellm),
    "aiperf": Tool(aiperf_command, read_aiperf),
}


def run_tool(command: Sequence[str], folder: Path) -> None:
    """Run a client to its end.

    Raises:
        ConfigError: it failed; the end of what it said is told.
    """
    folder.mkdir()
    # With the hub switched off, aiperf takes a tokenizer's folder for the name of a repository.
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
    )
    if done.returncode:
        said = (done.stdout + done.stderr)[-_TAIL_CHARS:]
        raise ConfigError(f"{Path(command[0]).name} ended with status {done.returncode}:\n{said}")
