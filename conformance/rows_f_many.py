"""F, the rest: many at once, more than there is room for, and refusals that must reach the client."""

from __future__ import annotations

import time

from conformance.client import greedy
from conformance.fake_prefill import REASON, fake_prefill
from conformance.recipes import (
    AT_ONCE_S,
    PROMPTS,
    assert_unavailable,
    check_all,
    gateway_address,
    is_ready,
    joined,
    node_ids,
    wait_linked,
    without,
)
from conformance.rows import Needs, Proof, row
from conformance.rows_f import GROWING_TOKENS, IN_TIME_S, RETRACTED, SMALL, STARTED, growing
from conformance.setup import Setup, prompt

TWO = ("--prefill", "2", "--decode", "2")
TIGHT = ("--kv-pages", "80", "--max-running", "3", "--max-queued", "40")
BUSY = prompt(3, 200)


@row(
    "F13",
    "two and two: fifty requests, and fifty more",
    options=TWO,
    proof=Proof("one prefill node commits nothing", faults="prefill-0/drop:Commit*; prefill-0/drop:Status*"),
)
def f13(s: Setup) -> None:
    wait_linked(s)
    for seed in range(2):
        check_all(s, [prompt(seed * 50 + i, 1 + 6 * i) for i in range(50)])
        s.client.assert_ledger_clean()
    for name in s.server.nodes().keys() - {"gateway"}:
        assert s.client.metric("baton_node_steps_total", node=name) > 0, f"{name} did nothing"


@row(
    "F14",
    "more than may wait: 429 with Retry-After, and room again afterwards",
    options=TIGHT,
    proof=Proof(
        "the queue has no end",
        patch="import decode_node.admission as a\n"
        "real = a.AdmissionQueue.__init__\n"
        "a.AdmissionQueue.__init__ = lambda self, most: real(self, 1 << 30)\n",
    ),
)
def f14(s: Setup) -> None:
    outcomes = s.client.ask_all([greedy(BUSY, 60) for _ in range(80)])
    refused = [outcome for outcome in outcomes if not outcome.succeeded]
    assert 0 < len(refused) < len(outcomes), f"{len(refused)} of {len(outcomes)} were refused"
    for outcome in refused:
        assert outcome.status == 429, outcome
        assert int(outcome.headers["retry-after"]) > 0
        assert outcome.error is not None
        assert outcome.error["type"] == "rate_limit_error"
    s.client.assert_ledger_clean()
    check_all(s)


NO_DEADLINES = Proof(
    "the field is read and not used",
    patch="import gateway.openai_api as o\n"
    "real = o.parse_completion\n"
    "def parse(body):\n"
    "    body.pop('timeout', None)\n"
    "    return real(body)\n"
    "o.parse_completion = parse\n",
)


@row("F15", "a deadline holds while waiting, and gives back what it held", options=TIGHT, proof=NO_DEADLINES)
def f15(s: Setup) -> None:
    start = time.monotonic()
    bodies = [greedy(BUSY, 300, stream=i % 2 == 0, timeout=1) for i in range(40)]
    outcomes = s.client.ask_all(bodies)
    assert time.monotonic() - start < IN_TIME_S
    overdue = [outcome for outcome in outcomes if not outcome.succeeded]
    assert len(overdue) > len(outcomes) / 4, f"{len(overdue)} were overdue"
    for outcome in overdue:
        assert outcome.error is not None, outcome
        assert outcome.error["code"] == "deadline_exceeded", outcome
        assert outcome.status == 504 or (outcome.status == 200 and not outcome.done), outcome
    s.client.assert_ledger_clean()
    check_all(s)


@row(
    "F16",
    "P refuses, or cannot be reached: the client hears it within a second",
    needs=Needs.FRESH,
    proof=Proof(
        "D tries again what was refused",
        patch="import dataclasses, transfer.receiver as r\n"
        "real = r.Receiver._refused\n"
        "r.Receiver._refused = lambda self, out: real(self, dataclasses.replace(out, retryable=True))\n",
    ),
)
def f16(s: Setup) -> None:
    folder = s.server.folder
    with without(s, "prefill"):
        gateway, listen = gateway_address(s), f"ipc://{folder}/refusing.sock"
        with fake_prefill(s.models.tiny, gateway, "refusing", listen, refuses=True) as prefill:
            s.client.until(lambda: is_ready(s), "D has linked to it")
            for num_asked, stream in enumerate((False, True), 1):
                start = time.monotonic()
                outcome = s.client.ask(greedy(PROMPTS[2], 4, stream=stream))
                took_s = time.monotonic() - start
                assert outcome.status == 400, outcome
                assert outcome.error is not None
                assert REASON in outcome.error["message"]
                assert took_s < AT_ONCE_S, f"it took {took_s:.1f} s"
                assert prefill.num_refused == num_asked, "it was tried again"
        s.client.until(lambda: "refusing" not in node_ids(s) and not is_ready(s), "it is gone")
        with fake_prefill(s.models.tiny, gateway, "unreachable", f"ipc://{folder}/nobody.sock"):
            s.client.until(lambda: "unreachable" in node_ids(s), "it has joined")
            assert_unavailable(s)
        s.client.until(lambda: "unreachable" not in node_ids(s), "it is gone")
    check_all(s)


@row(
    "F17",
    "a refused handshake: both sides say why, and the client has an error at once",
    needs=Needs.FRESH,
    proof=Proof(
        "it is refused in silence",
        patch="import common.peering as p\np.Peering._refused = lambda *_, **__: None\n",
    ),
)
def f17(s: Setup) -> None:
    with joined(s, "prefill", "other", "--page-size", "32") as other:
        for said in (other.wait_for, lambda words: s.server.wait_for(words, s.client.wait_s)):
            reason = said(r"link refused: (page_size .*)")
            assert "32 at other" in reason, reason
            assert "16 at decode-0" in reason, reason
        with without(s, "prefill"):  # the other one is all that is left
            assert_unavailable(s)
    check_all(s)


@row(
    "F19",
    "128 at once on a pool for a few: the last waits long, and is served",
    options=SMALL,
    proof=Proof(
        "P holds pages for a second and no longer, and nobody tries again",
        patch="import decode_node.scheduler as d, transfer.sender as t, transfer.sender_endpoint as e\n"
        "real, until = e.SenderEndpoint.poll, {}\n"
        "def poll(self, now):\n"
        "    for key in list(self._transfers):\n"
        "        if now > until.setdefault(key, now + 1):\n"
        "            until[key] = float('inf')\n"
        "            self._feed(key, t.Fail(503, 'its lease is over'))\n"
        "    return real(self, now)\n"
        "e.SenderEndpoint.poll = poll\n"
        "d.MAX_ATTEMPTS = 1\n",
    ),
)
def f19(s: Setup) -> None:
    many = [PROMPTS[i % len(PROMPTS)] for i in range(128)]
    with s.faults("prefill/stall:plane:2s"):  # the first holds up all behind it
        check_all(s, many)


@row(
    "F21",
    "a transfer is asked for once, whatever comes after it",
    options=SMALL,
    proof=Proof(
        "who was retracted asks a prefill node again",
        patch="import decode_node.entry as e\ne.Entry.was_retracted = property(lambda self: False)\n",
    ),
)
def f21(s: Setup) -> None:
    retracted, started = (s.client.metric(name, role="decode") for name in (RETRACTED, STARTED))
    check_all(s, growing(), GROWING_TOKENS)
    assert s.client.metric(RETRACTED, role="decode") > retracted, "nobody was retracted"
    assert s.client.metric(STARTED, role="decode") - started == len(growing())
