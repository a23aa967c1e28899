"""B: wrong tokens without an error. Every answer is compared with the oracle, and every page has a checksum."""

from __future__ import annotations

import random

from conformance.client import greedy
from conformance.rows import Proof, row
from conformance.setup import Setup, prompt

NUM_REQUESTS, NUM_AT_ONCE = 500, 16
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200)
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
        "pages are given out twice",
        patch="import common.kv.fence as f\n"
        "f.FencedFreeList.take = lambda self, n: tuple(self._free)[:n] if n <= len(self._free) else None\n",
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
    assert s.client.metric("baton_node_chunks_broken_total") == 0
    assert s.client.metric("baton_node_transfers_failed_total") == 0


def spoiled(s: Setup, rule: str) -> None:
    """Spoil what is handed over, by a rule: it is found and counted, and the answer is right all the same."""
    for plane in PLANES:
        with s.serving("--transfer", plane) as other, other.faults(rule):
            other.ask_right(prompt(1, 100), 12)
            assert other.client.metric("baton_node_chunks_broken_total") == 1
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
