"""K, L: what can be seen of a request, and what a transfer costs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from conformance.client import Body, greedy
from conformance.recipes import PROMPTS, check_all, post
from conformance.rows import Needs, Proof, not_applicable, row
from conformance.setup import Setup, prompt

STAGES = ("tokenize_ms", "submit_ms", "queue_ms", "prefill_ms", "transfer_ms", "send_ms", "decode_ms")
TIGHT = ("--kv-pages", "80", "--max-running", "3", "--max-queued", "40")
BURST = 500
TTFT_S, ITL_S, NUM_CHUNKS = 0.2, 0.05, 6  # of a server whose delays are known

not_applicable(
    "a benchmark, not a fault: `baton bench serve` measures it, README has the numbers", "L1", "L2"
)
not_applicable("there is no offload to the host", "L4")


# K, L: what can be seen, and what it costs -----------------------------------------------------------------


class KnownDelays(BaseHTTPRequestHandler):
    """Streams an answer whose chunks come when they are due."""

    def do_GET(self) -> None:
        """The models."""
        self._head("application/json")
        self.wfile.write(b'{"data": [{"id": "known"}]}')

    def do_POST(self) -> None:
        """An answer."""
        start = time.monotonic()
        self.rfile.read(int(self.headers["content-length"]))
        self._head("text/event-stream")
        for i in range(NUM_CHUNKS):
            time.sleep(max(0.0, start + TTFT_S + i * ITL_S - time.monotonic()))
            usage = {"prompt_tokens": 8, "completion_tokens": i + 1}
            choice = {"index": 0, "text": "word ", "finish_reason": None}
            self._event(json.dumps({"choices": [choice], "usage": usage}))
        self._event("[DONE]")

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _head(self, media_type: str) -> None:
        self.send_response(200)
        self.send_header("content-type", media_type)
        self.end_headers()

    def _event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()


@contextmanager
def known_delays() -> Iterator[str]:
    """Have such a server for a while; gives its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), KnownDelays) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@row(
    "K1",
    "`baton bench serve` tells the delays of a server whose delays are known",
    proof=Proof(
        "its clock is slow",
        patch="import sys, time\n"
        "if 'bench' in sys.orig_argv:\n"
        "    real = time.perf_counter\n"
        "    time.perf_counter = lambda: real() / 100\n",
    ),
)
def k1(s: Setup) -> None:
    how = (
        "--num-requests",
        "3",
        "--warm-up",
        "0",
        "--prompt-tokens",
        "8",
        "--output-tokens",
        str(NUM_CHUNKS),
    )
    with known_delays() as url:
        words = [sys.executable, "-m", "cli", "bench", "serve", "--url", url, *how]
        done = subprocess.run(words, env=s.server.env, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    figures = json.loads(done.stdout.decode().strip().splitlines()[-1])["figures"]
    told = {figure["name"]: figure["value"] for figure in figures}
    # Never sooner; how much later is the machine's matter.
    assert TTFT_S * 1000 <= told["TTFT p50"] < TTFT_S * 5000, told
    assert ITL_S * 600 <= told["ITL p50"] < ITL_S * 5000, told
    assert told["failed"] == 0


def check_timings(s: Setup, body: Body, least: dict[str, float]) -> None:
    """Check that an answer says where its time went: not more than there was, and no less than we know of."""
    start = time.monotonic()
    response = post(s, "/v1/completions", body | {"timings": True})
    took_ms = (time.monotonic() - start) * 1000
    assert response.status_code == 200, response.text
    timings = response.json().get("timings") or {}
    assert set(STAGES) <= set(timings), timings
    for stage in STAGES:
        assert timings[stage] >= least.get(stage, 0), timings
    assert timings["prefill_ms"] > 0, timings
    assert sum(timings[stage] for stage in STAGES) < took_ms, (timings, took_ms)


@row(
    "K4",
    "an answer says how long queue, prefill, transfer and decoding took",
    needs=Needs.HTTP,
    proof=Proof(
        "all of it is 0",
        patch="import gateway.rendering as r\n"
        "real = r._timings\n"
        "r._timings = lambda answer: dict.fromkeys(real(answer), 0.0)\n",
    ),
)
def k4(s: Setup) -> None:
    for ids in (PROMPTS[4], PROMPTS[-1]):
        check_timings(s, greedy(ids, 4), {})


@row(
    "K5",
    "a first token that was held up says where",
    proof=Proof(
        "transfers take no time",
        patch="import dataclasses, gateway.rendering as r\n"
        "real = r._timings\n"
        "r._timings = lambda answer: real(answer) | {'transfer_ms': 0.0}\n",
    ),
)
def k5(s: Setup) -> None:
    with s.faults("prefill/delay:Commit:500ms"):
        check_timings(s, greedy(PROMPTS[4], 4), {"transfer_ms": 450})


@row(
    "K6",
    "a burst of 500 is shed with 429, and nothing stays closed",
    options=TIGHT,
    proof=Proof(
        "the queue has no end",
        patch="import decode_node.admission as a\n"
        "real = a.AdmissionQueue.__init__\n"
        "a.AdmissionQueue.__init__ = lambda self, most: real(self, 1 << 30)\n",
    ),
)
def k6(s: Setup) -> None:
    outcomes = s.client.ask_all([greedy(PROMPTS[0], 2) for _ in range(BURST)])
    statuses = {outcome.status for outcome in outcomes}
    assert statuses == {200, 429}, statuses
    for outcome in outcomes:
        if outcome.status == 200:
            s.check(PROMPTS[0], outcome, 2)
        else:
            assert int(outcome.headers["retry-after"]) > 0
    check_all(s)


@row(
    "L3",
    "a prompt of 19 pages in 3 pieces is 3 messages, whatever its pages and layers",
    proof=Proof(
        "a message a page",
        patch="import transfer.planes.one_sided as o\no.LAUNCH_BYTES = {'cpu': 1}\n",
    ),
)
def l3(s: Setup) -> None:
    rule = "prefill/stall:Chunk*:0ms"  # it counts, and says so at the 1st, 2nd, 4th, 8th
    since = len(s.server.log)
    with s.faults(rule):
        s.ask_right(prompt(8, 300), 4)
        s.await_fired("Chunk")
    assert f"{rule} fired, no. 4" not in s.server.log[since:], "more messages than pieces"
