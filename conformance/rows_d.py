"""D: late or double news ends no process."""

from __future__ import annotations

import asyncio
import random

from conformance.client import LEDGER_S, greedy
from conformance.recipes import BUSY, PROMPTS, begin_all, check_all, leave
from conformance.rows import Needs, Proof, row
from conformance.setup import Setup, prompt

NUM_CANCELS, NUM_STREAMS = 160, 20
MAX_RUNNING = 3
SMALL = ("--kv-pages", "60")  # of 16 tokens: three of the answers that grow begin, two end
TIGHT = ("--kv-pages", "80", "--max-running", str(MAX_RUNNING), "--max-queued", "40")
STARTED = "baton_node_transfers_started_total"
BUSY_TOKENS = 300
PAGE_SIZE = 16
LONG = prompt(6, 300)  # three chunks of the default budget
TIMEOUT_S = 1


@row(
    "D1",
    "the end of an aborted transfer, a second late, is counted and dropped",
    proof=Proof(
        "D looks the transfer up without asking whether it is there",
        patch="import transfer.receiver_endpoint as r\n"
        "def take(self, node, transfer_id, message, now):\n"
        "    self._feed(self._transfers[transfer_id], message, now)\n"
        "r.ReceiverEndpoint._transfer_message = take\n",
    ),
)
def d1(s: Setup) -> None:
    late = s.client.metric("baton_node_messages_late_total")
    gate = s.gate()
    with s.faults(f"prefill/delay:Commit:until={gate}"):
        pending = s.client.begin(greedy(prompt(1, 100), 8))
        s.await_fired("Commit")
        pending.leave()
        s.client.assert_ledger_clean(LEDGER_S)
        gate.touch()
        s.client.until(
            lambda: s.client.metric("baton_node_messages_late_total") > late, "the late Commit is counted"
        )
    s.check_next()


@row(
    "D3",
    "160 clients that leave at random moments end no process",
    needs=Needs.HTTP,
    proof=Proof(
        "an abort of a request whose pages are on their way ends D",
        patch="import decode_node.scheduler as d\n"
        "real = d.DecodeScheduler.abort\n"
        "def abort(self, key):\n"
        "    entry = self._entries.get(key)\n"
        "    assert entry is None or entry.transfer_id is None\n"
        "    return real(self, key)\n"
        "d.DecodeScheduler.abort = abort\n",
    ),
)
def d3(s: Setup) -> None:
    gone, draw = s.client.metric("baton_requests_total", outcome="client_gone"), random.Random(3)
    restarts = s.client.metric("baton_restarts_total")

    async def one() -> None:
        for _ in range(NUM_CANCELS // NUM_STREAMS):
            request = greedy(draw.choice(PROMPTS), 64, stream=draw.random() < 0.8)
            reads = draw.choice((0, draw.randint(1, 90)))
            await leave(s.client, request, half=draw.random() < 0.2, reads=reads, reset=draw.random() < 0.5)

    async def run() -> None:
        await asyncio.gather(*(one() for _ in range(NUM_STREAMS)))

    asyncio.run(run())
    s.client.assert_ledger_clean()
    check_all(s)
    gone = s.client.metric("baton_requests_total", outcome="client_gone") - gone
    assert gone > NUM_CANCELS / 4, f"only {gone} of {NUM_CANCELS} left something that was alive"
    assert s.client.metric("baton_restarts_total") == restarts, "a process ended"


@row(
    "D4",
    "who leaves while queued, and never had pages, disturbs nobody",
    options=TIGHT,
    proof=Proof(
        "the end of a request gives back what it must have had",
        patch="import decode_node.holdings as h, decode_node.scheduler as d\n"
        "real = d.DecodeScheduler.abort\n"
        "def abort(self, key):\n"
        "    entry = self._entries.get(key)\n"
        "    assert entry is None or entry.lease is not None\n"
        "    return real(self, key)\n"
        "d.DecodeScheduler.abort = abort\n",
    ),
)
def d4(s: Setup) -> None:
    names = ("baton_node_requests_submitted_total", "baton_node_requests_aborted_total", STARTED)
    submitted, aborted, started = (s.client.metric(name, role="decode") for name in names)
    running = begin_all(s, [greedy(BUSY, BUSY_TOKENS)] * MAX_RUNNING)
    gate, num = s.gate(), len(PROMPTS)
    with s.faults(f"prefill/stall:plane:until={gate}"):  # nobody else arrives
        queued = [s.client.begin(greedy(ids, 8)) for ids in PROMPTS]
        s.client.until(
            lambda: s.client.metric(names[0]) == submitted + MAX_RUNNING + num, "D has all of them"
        )
        for each in queued:
            each.leave()
        s.client.until(lambda: s.client.metric(names[1]) == aborted + num, "D has heard that they left")
        gate.touch()
    granted = s.client.metric(STARTED, role="decode") - started - MAX_RUNNING
    assert granted < num, "all of them had pages"
    for each in running:
        s.check(BUSY, each.wait(), BUSY_TOKENS)
    s.client.assert_ledger_clean()
    check_all(s)


@row(
    "D6",
    "pages of a stalled transfer are given to nobody, however long it takes",
    options=SMALL,
    proof=Proof(
        "a timeout frees them",
        patch="import transfer.receiver as r\n"
        "real = r.Receiver._give_up\n"
        "def give_up(self, event, now):\n"
        "    self._one_sided = False\n"
        "    return real(self, event, now)\n"
        "r.Receiver._give_up = give_up\n",
    ),
)
def d6(s: Setup) -> None:
    gate, num_pages = s.gate(), -(-len(LONG) // PAGE_SIZE)
    with s.faults(f"prefill/stall:plane@2:until={gate}; prefill/stall:Quiesced:until={gate}"):
        for _ in range(2):  # P is given nothing else meanwhile
            outcome = s.client.ask(greedy(LONG, 8, timeout=TIMEOUT_S))
            assert outcome.status == 504, outcome
            held = s.client.pages("decode")
            assert held["quarantined"] == num_pages, held
        gate.touch()
        s.client.assert_ledger_clean()
    check_all(s, PROMPTS * 2, 8)


@row(
    "D7",
    "metrics can be read whatever ends before it began",
    needs=Needs.HTTP,
    proof=Proof(
        "a request without a first token is not expected in the counters",
        patch="import decode_node.node as n\n"
        "real = n.DecodeNode._stats\n"
        "def stats(self):\n"
        "    for entry in self._scheduler._entries.values():\n"
        "        entry.request.outputs[0]\n"
        "    return real(self)\n"
        "n.DecodeNode._stats = stats\n",
    ),
)
def d7(s: Setup) -> None:
    bodies = [greedy(ids, most, stream=most == 2) for ids in PROMPTS for most in (1, 2)]
    bodies += [greedy(BUSY, 4, timeout=0.001) for _ in range(10)]
    pending = [s.client.begin(each) for each in bodies]
    num_read = 0
    while num_read < 20 or not all(each.ended for each in pending):
        page = s.client.get("/metrics")
        assert page.status_code == 200
        assert 'role="decode"' in page.text, "D did not answer"
        num_read += 1
    assert {each.wait().status for each in pending} <= {200, 504}
    s.client.assert_ledger_clean()
    check_all(s, PROMPTS[:4])
