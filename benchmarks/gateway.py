"""What one gateway process streams: from a decode node's message to bytes on the clients' sockets.

The gateway is the real command. The node is a stand-in that speaks the real protocol and computes nothing; it
sends the next step when clients have read all but the last `--window` steps.
Beside it, in the same run, a raw ASGI application writes the very same bytes as often: the limit of whatever
runs under uvicorn. Clients and node share one process on another core than the server's.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import httpx
import zmq
from tokenizers import Tokenizer

from benchmarks.chunk_readers import Reader, Readers
from benchmarks.gateway_node import StandInNode
from benchmarks.percentiles import median
from benchmarks.report import Report
from benchmarks.server_process import Rate, cpu_s_of, other_core, said, started
from common.errors import ConfigError
from common.model.spec import load_spec
from model_store.store import resolve_model

_CLI = Path(__file__).parent.parent / "cli.py"
_LISTENING = re.compile(r"listening on http://\S+?:(\d+); nodes join (\S+)")
_START_S = 120.0
_PATIENCE_S = 60.0
_PATH = "/v1/completions"
_TEXT = "The baton is handed over once, and in order: that is what a relay race is about. "
_BESIDE_STREAMS = 8
_BESIDE_EVERY_S = 0.005
_BESIDE_ALONE_S = 0.5
_AIM_CHUNKS = 40_000
_AIM_GAP_MS = 20


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run found; rates one a round."""

    flood: list[Rate]
    step: list[Rate]  # with one step under way
    echo: list[Rate]
    gaps: list[tuple[float, float]]  # the longest one, in ms, and the seconds of the prompt beside it
    chunk_bytes: int

    @property
    def rates(self) -> tuple[list[Rate], list[Rate], list[Rate]]:
        """The three of them."""
        return self.flood, self.step, self.echo


def _long_context(source: Path, target: Path, context_length: int) -> Path:
    """Write the folder of a model with the same texts, a long context and no weights."""
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja") and "manifest" not in path.name:
            shutil.copy(path, target)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context_length}))
    return target


class Bench:
    """One gateway, the stand-in node that joined it, and clients."""

    def __init__(self, folder: Path, pid: int, port: int, node: StandInNode) -> None:
        self._folder = folder
        self._pid = pid
        self._port = port
        self._node = node

    def wait_ready(self) -> None:
        """Wait until the gateway would take a request."""
        give_up_s = time.monotonic() + _START_S
        while not httpx.get(f"http://127.0.0.1:{self._port}/ready", trust_env=False).is_success:
            if time.monotonic() > give_up_s:
                raise ConfigError("the gateway does not see the stand-in node")
            self._node.poll()

    def body(self, prompt: object, max_tokens: int, **fields: Any) -> bytes:
        """Write the body of a request."""
        return json.dumps(
            {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | fields
        ).encode()

    def stream(self, num_streams: int, num_tokens: int, window: int, **fields: Any) -> tuple[Rate, bytes]:
        """Stream tokens to all clients; returns how fast, and what one client read first."""
        with closing(Readers(self._port)) as readers:
            body = self.body([5, 6, 7], num_tokens, stream=True, **fields)
            streams = [readers.start(_PATH, body) for _ in range(num_streams)]
            self._until(readers, lambda: self._node.num_open == num_streams or streams[0].is_done)
            begin_s, begin_cpu_s = time.perf_counter(), cpu_s_of(self._pid)
            sent = 0
            while readers.num_open:
                while self._node.num_open and sent - readers.num_events <= (window - 1) * num_streams:
                    sent += self._node.step()
                readers.poll(1.0)
                self._node.poll()
            wall_s, cpu_s = readers.last_s - begin_s, cpu_s_of(self._pid) - begin_cpu_s
            if streams[0].is_done and b" 200 " not in streams[0].first[:20]:
                raise ConfigError(f"the gateway refused: {streams[0].first!r}")
            if readers.num_events != num_streams * (num_tokens + 1):  # [DONE] is one
                raise ConfigError(f"{readers.num_events} events came for {num_streams * num_tokens} tokens")
        return Rate(num_streams * num_tokens, wall_s, cpu_s), streams[0].first

    def gaps_ms(self, long_body: bytes | None, rounds: int) -> tuple[float, float]:
        """Return the longest gap of some streams beside a long prompt (or alone), and the prompt's seconds.

        Both are medians over the rounds: the longest gap of all is whatever else the machine does.
        """
        with closing(Readers(self._port)) as readers:
            body = self.body([5, 6, 7], 1 << 18, stream=True)
            streams = [readers.start(_PATH, body, notes_times=True) for _ in range(_BESIDE_STREAMS)]
            self._until(readers, lambda: self._node.num_open == len(streams) or streams[0].is_done)
            self._step_for(readers, 0.5, lambda: False)
            gaps_s, took_s = [], []
            for _ in range(rounds):
                begin_s = time.perf_counter()
                if long_body is None:
                    self._step_for(readers, _BESIDE_ALONE_S, lambda: False)
                else:
                    long = readers.start(_PATH, long_body)
                    self._step_for(readers, _PATIENCE_S, partial(getattr, long, "is_done"))
                    took_s.append(time.perf_counter() - begin_s)
                    if b" 200 " not in long.first[:20]:
                        raise ConfigError(f"the long prompt was refused: {long.first!r}")
                self._step_for(readers, 0.1, lambda: False)
                gaps_s.append(_longest_gap_s(streams, begin_s))
            return median(gaps_s) * 1000, median(took_s or [0.0])

    def _step_for(self, readers: Readers, seconds: float, done: Callable[[], bool]) -> None:
        """Let all requests go on at a steady rate, until the time is over or it is so."""
        begin_s = due_s = time.perf_counter()
        while due_s < begin_s + seconds and not done():
            self._node.poll()
            self._node.step()
            due_s += _BESIDE_EVERY_S
            while (left_s := due_s - time.perf_counter()) > 0:
                readers.poll(left_s)

    def _until(self, readers: Readers, condition: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + _PATIENCE_S
        while not condition():
            if time.monotonic() > give_up_s:
                raise ConfigError("requests did not reach the node")
            self._node.poll()
            readers.poll(0.01)


def _longest_gap_s(streams: Sequence[Reader], since_s: float) -> float:
    times = [[t for t in stream.times_s or () if t >= since_s] for stream in streams]
    return max(b - a for ts in times for a, b in pairwise(ts))


@contextmanager
def _bench(model: str, core: int | None) -> Iterator[Bench]:
    source = resolve_model(model, lambda line: click.echo(line, err=True))
    with tempfile.TemporaryDirectory(prefix="baton-") as name:
        run_dir = Path(name)
        folder = run_dir / "model"
        folder.mkdir()
        _long_context(source, folder, 1 << 19)
        address = f"ipc://{run_dir}/gateway.sock"
        options = (
            "--load-format",
            "dummy",
            "--served-model-name",
            "model",
            "--nodes",
            address,
            "--port",
            "0",
        )
        with started([sys.executable, _CLI, "gateway", folder, *options], core) as (process, log):
            found = said(process, log, _LISTENING)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            ids = (
                Tokenizer.from_file(str(folder / "tokenizer.json"))
                .encode(_TEXT, add_special_tokens=False)
                .ids
            )
            node = StandInNode(context, address, load_spec(folder, "dummy").fingerprint, ids)
            try:
                bench = Bench(folder, process.pid, int(found[1]), node)
                bench.wait_ready()
                yield bench
            finally:
                node.close()
                context.destroy(linger=0)


def echo_rate(chunk: bytes, num_streams: int, num_chunks: int, core: int | None) -> Rate:
    """Measure the raw ASGI application with the same bytes."""
    with started([sys.executable, "-m", "benchmarks.echo"], core) as (process, log):
        port = int(said(process, log, re.compile(r"^(\d+)\n"))[1])
        with closing(Readers(port)) as readers:
            begin_s, begin_cpu_s = time.perf_counter(), cpu_s_of(process.pid)
            for _ in range(num_streams):
                readers.start("/", chunk, f"x-times: {num_chunks}\r\n")
            while readers.num_open:
                readers.poll(1.0)
            wall_s, cpu_s = readers.last_s - begin_s, cpu_s_of(process.pid) - begin_cpu_s
        return Rate(num_streams * num_chunks, wall_s, cpu_s)


def _chunk_of(first: bytes) -> bytes:
    """Return the first event of a stream."""
    at = first.index(b"data: ") if b"data: " in first else -1
    if at < 0:
        raise ConfigError(f"no event came first: {first!r}")
    return first[at : first.index(b"\n\n", at) + 2]


@click.command()
@click.option("--streams", default=256, show_default=True, help="Clients that stream at the same time.")
@click.option("--tokens", default=400, show_default=True, help="Tokens of each, one a chunk.")
@click.option("--window", default=8, show_default=True, help="Steps that may be on their way to the clients.")
@click.option("--rounds", default=3, show_default=True, help="Runs of each; the best one counts.")
@click.option("--long", default=100_000, show_default=True, help="Tokens of the long prompts; 0: none.")
@click.option("--model", default="smollm2-135m", show_default=True, help="Model whose tokenizer is used.")
@click.option("--save", is_flag=True, help="Keep the result in benchmarks/results.")
def main(streams: int, tokens: int, window: int, rounds: int, long: int, model: str, **flags: Any) -> None:
    """Measure the single-token chunks a second that a gateway streams, beside a raw ASGI application."""
    report = Report.of_command("gateway")
    with other_core() as core:
        measured = _measure(streams, tokens, window, rounds, long, model, core)
    _tell(report, measured, long)
    report.publish(save=flags["save"])


def _measure(
    streams: int, tokens: int, window: int, rounds: int, long: int, model: str, core: int | None
) -> Measured:
    with _bench(model, core) as bench:
        bench.stream(streams, max(1, tokens // 4), window)  # warm
        runs = [bench.stream(streams, tokens, window) for _ in range(rounds)]
        steps = [bench.stream(streams, tokens, 1)[0] for _ in range(rounds)]
        chunk = _chunk_of(runs[0][1])
        gaps = [bench.gaps_ms(None, rounds)]
        if long:
            # A token or so a word of the text.
            text = _TEXT * (long // len(_TEXT.split()))
            gaps.append(bench.gaps_ms(bench.body(text, 1), rounds))
            gaps.append(bench.gaps_ms(bench.body([7] * long, 1), rounds))
    echoes = [echo_rate(chunk, streams, tokens, core) for _ in range(rounds)]
    return Measured([rate for rate, _ in runs], steps, echoes, gaps, len(chunk))


def _tell(report: Report, measured: Measured, long: int) -> None:
    best, step, echo = (max(r.per_s for r in rates) for rates in measured.rates)
    cpu, step_cpu, echo_cpu = (max(r.per_cpu_s for r in rates) for rates in measured.rates)
    limit = {"limit_name": "raw ASGI, same bytes"}
    report.add("chunks a second", best, "1/s", at_least=_AIM_CHUNKS, limit=echo, **limit)
    report.add("  of the raw ASGI rate", best / echo, "x", at_least=1 / 3)
    report.add("chunks a second, one step at a time", step, "1/s", limit=echo, **limit)
    report.add("  a processor second", step_cpu, "1/s", limit=echo_cpu, **limit)
    report.add("chunks a processor second", cpu, "1/s", limit=echo_cpu, **limit)
    report.add("  of the raw ASGI rate, by processor time", cpu / echo_cpu, "x")
    report.add("bytes of a chunk", measured.chunk_bytes, "B")
    gaps = measured.gaps
    names = ("alone", f"beside a text of about {long} tokens", f"beside {long} token ids")
    for name, (gap_ms, took_s) in zip(names, gaps, strict=False):
        alone = (
            {} if name == "alone" else {"limit": gaps[0][0], "limit_name": "alone", "at_most": _AIM_GAP_MS}
        )
        report.add(f"longest gap of {_BESIDE_STREAMS} streams {name}", gap_ms, "ms", **alone)
        if took_s:
            report.add("  the prompt took", took_s * 1000, "ms")


if __name__ == "__main__":
    main()
