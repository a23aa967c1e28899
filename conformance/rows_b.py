"""B: wrong tokens without an error. Answers are compared with the oracle, pages have checksums."""

from __future__ import annotations

import os
import random
import signal

from conformance.client import greedy
from conformance.recipes import joined
from conformance.rows import Proof, row
from conformance.setup import Setup, prompt

NUM_REQUESTS, NUM_AT_ONCE = 500, 16
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200)
CONTEXT = 512
SUBMITTED = "baton_node_requests_submitted_total"
BROKEN = "baton_node_chunks_broken_total"
PLANES = ("shm", "frames")
NO_CHECKSUMS = Proof(
    "checksums are not compared",
    patch="import transfer.planes.frames, transfer.planes.one_sided\n"
    "for plane in (transfer.planes.frames, transfer.planes.one_sided):\n"
    "    plane.verify_pages = lambda *_: None\n",
)


@row(
    "B1",
    "500 answers over few pages are right",
    options=("--kv-pages", "48"),
    proof=Proof(
        "now and then a page arrives wrong, and nobody compares checksums",
        faults="corrupt:page@200*",
        patch=NO_CHECKSUMS.patch,
    ),
)
def b1(s: Setup) -> None:
    draw = random.Random(1)
    prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS, 1)]
    asked = [(draw.choice(prompts), draw.choice((1, 2, 9, 17, 33))) for _ in range(NUM_REQUESTS)]
    for at in range(0, NUM_REQUESTS, NUM_AT_ONCE):
        some = asked[at : at + NUM_AT_ONCE]
        outcomes = s.client.ask_all([greedy(ids, most) for ids, most in some])
        for (ids, most), outcome in zip(some, outcomes, strict=True):
            s.check(ids, outcome, most)
    assert s.client.metric(BROKEN) == 0
    assert s.client.metric("baton_node_transfers_failed_total") == 0


@row(
    "B3",
    "a prompt that is too long is refused, and never answered",
    options=("--kv-pages", "20"),
    proof=Proof(
        "the gateway and D let everything in",
        patch="import gateway.prompts, decode_node.scheduler as d\n"
        "gateway.prompts.resolve_max_tokens = lambda *_: 1\n"
        "d.check_request = lambda *_, **__: None\n",
    ),
)
def b3(s: Setup) -> None:
    most = 20 * 16
    for length in (most, most + 1, CONTEXT, CONTEXT + 1):
        for stream in (False, True):
            outcome = s.client.ask(greedy(prompt(1, length), 1, stream=stream))
            assert outcome.status == 400, f"{length} tokens: {outcome}"
            assert outcome.error is not None
            assert outcome.error["code"] == "context_length_exceeded", outcome.error
            assert outcome.token_ids == []
    s.ask_right(prompt(1, most - 1), 1)


@row(
    "B4",
    "every prompt length on every page size is answered rightly",
    proof=Proof(
        "one page of a hundred arrives wrong, and nobody compares checksums",
        faults="corrupt:page@100*",
        patch=NO_CHECKSUMS.patch,
    ),
)
def b4(s: Setup) -> None:
    for size in ("1", "16", "64"):
        with s.shared(*(() if size == "16" else ("--page-size", size))) as other:
            for at in range(1, 131, 13):
                prompts = [prompt(3, length) for length in range(at, at + 13)]
                outcomes = other.client.ask_all([greedy(ids, 4) for ids in prompts])
                for ids, outcome in zip(prompts, outcomes, strict=True):
                    other.check(ids, outcome, 4)


@row(
    "B7",
    "pages that a stopped P may still write are given to nobody",
    options=("--kv-pages", "20", "--transfer", "shm"),
    proof=Proof(
        "D takes pages back at once, as if it placed the bytes itself",
        patch="import transfer.receiver as r\n"
        "real = r.Receiver.__init__\n"
        "r.Receiver.__init__ = lambda self, *a, one_sided, **k: real(self, *a, one_sided=False, **k)\n",
    ),
)
def b7(s: Setup) -> None:
    def is_quarantined(pages: dict[str, int]) -> bool:
        return pages["incoming"] == 0 and pages["quarantined"] == 13

    submitted = s.client.metric(SUBMITTED)
    with s.faults(f"prefill/barrier:after-prefill:until={s.gate()}"):
        first = s.client.begin(greedy(prompt(1, 200), 8))
        s.await_fired("after-prefill")
        pid = s.server.nodes()["prefill-0"]
        os.kill(pid, signal.SIGSTOP)
        try:
            first.leave()
            # Whoever asks waits 2 s for the stopped P, and after 10 s P is taken for dead: so few questions.
            s.client.until(lambda: is_quarantined(s.client.pages("decode")), "D gives it up")
            second = s.client.begin(greedy(prompt(2, 200), 8))
            s.client.until(lambda: s.client.metric(SUBMITTED) == submitted + 2, "D has both")
            assert s.client.pages("decode")["incoming"] == 0, "the pages were given out"
        finally:
            os.kill(pid, signal.SIGCONT)
        s.check(prompt(2, 200), second.wait(), 8)
    s.check_next()


@row(
    "B12",
    "nodes of another page layout are refused, with both values named",
    proof=Proof(
        "layouts are not compared",
        patch="import common.link\ncommon.link.mismatch.__code__ = (lambda ours, theirs: None).__code__\n",
    ),
)
def b12(s: Setup) -> None:
    with joined(s, "prefill", "odd", "--page-size", "8") as odd:
        odd.wait_for(r"link refused: (page_size 8 at odd, 16 at \S+)")
        s.check_next()


@row(
    "B14",
    "when the data plane is dead for good, nobody gets a token of what did not arrive",
    proof=Proof(
        "D takes a Commit though pages are missing",
        patch="import transfer.receiver as r\n"
        "def commit(self, commit, now):\n"
        "    self._step(r.ReceiverEvent.COMMIT)\n"
        "    return (r.Done(commit),)\n"
        "r.Receiver._commit = commit\n"
        "r.RECEIVER_TABLE[r.ReceiverState.GRANTED, r.ReceiverEvent.COMMIT] = r.ReceiverState.DONE\n",
    ),
)
def b14(s: Setup) -> None:
    with s.faults("prefill/drop:Chunk*"):  # P believes that all is well
        for seed in (1, 2, 3):
            outcome = s.client.ask(greedy(prompt(seed, 100), 8))
            assert (outcome.status, outcome.token_ids) == (503, []), outcome
    with s.faults("prefill/cut:plane*"):  # P knows that it is not through
        outcome = s.client.ask(greedy(prompt(4, 100), 8, timeout=1.0))
        assert (outcome.status, outcome.token_ids) == (504, []), outcome
    s.check_next()


def spoiled(s: Setup, rule: str) -> None:
    """Spoil what is handed over, by a rule: it is found and counted, and the answer is right all the same."""
    for plane in PLANES:
        with s.shared("--transfer", plane) as other, other.faults(rule):
            broken = other.client.metric(BROKEN)
            other.ask_right(prompt(1, 100), 12)
            assert other.client.metric(BROKEN) == broken + 1
            with other.faults(f"{rule}*"):  # again and again: an error, and no token
                outcome = other.client.ask(greedy(prompt(2, 100), 12))
                assert outcome.status == 503, outcome
                assert outcome.token_ids == []
            other.check_next()


@row("B15", "a flipped bit is found, counted and not served", proof=NO_CHECKSUMS)
def b15(s: Setup) -> None:
    spoiled(s, "corrupt:page")


@row("B16", "pages that changed places are found, counted and not served", proof=NO_CHECKSUMS)
def b16(s: Setup) -> None:
    spoiled(s, "swap:pages")
