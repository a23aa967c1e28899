"""A: a client that leaves costs no page and no computing, wherever its request is."""

from __future__ import annotations

from conformance.client import LEDGER_S, greedy
from conformance.rows import Needs, Proof, row
from conformance.setup import Setup, prompt

NO_ABORTS = Proof("Abort and Status to D are lost", faults="gateway/drop:Abort*; gateway/drop:Status*")
NEXT_TOKENS = sum(7 * seed for seed in range(1, 6))  # of the prompts of `check_next`
TIGHT = ("--kv-pages", "48")
LONG = 8000  # tokens: 63 chunks
SUBMITTED, ABORTED = "baton_node_requests_submitted_total", "baton_node_requests_aborted_total"
RETRACTED, EARLY = "baton_node_requests_retracted_total", "baton_node_aborts_before_request_total"
COMPUTED, STARTED = "baton_node_tokens_computed_total", "baton_node_transfers_started_total"


def deaf(who: str, condition: str) -> Proof:
    """D does not hear an abort of a request of which that is so."""
    return Proof(
        f"an abort of {who} is not heard",
        patch="import decode_node.scheduler as d\n"
        "real = d.DecodeScheduler.abort\n"
        "def abort(self, key):\n"
        "    entry = self._entries.get(key)\n"
        f"    return None if entry is not None and {condition} else real(self, key)\n"
        "d.DecodeScheduler.abort = abort\n",
    )


def more_than(s: Setup, name: str, before: float) -> None:
    """Wait until something was counted."""
    s.client.until(lambda: s.client.metric(name) > before, f"more than {before:g} of {name}")


def leave_at(s: Setup, rule: str, fired: str) -> None:
    """Leave when a rule holds the request: nothing stays anywhere, though it is held on."""
    with s.faults(rule):
        pending = s.client.begin(greedy(prompt(1, 100), 8))
        s.await_fired(fired)
        pending.leave()
        s.client.assert_ledger_clean(LEDGER_S)


@row("A1", "a client that leaves before D has its request costs P nothing", proof=NO_ABORTS)
def a1(s: Setup) -> None:
    for point in ("after-prefill", "before-commit"):
        with s.faults(f"prefill/barrier:{point}:until={s.gate()}"):
            pending = s.client.begin(greedy(prompt(1, 100), 8))
            s.await_fired(point)
            assert s.client.pages("prefill")["outgoing"] > 0
            pending.leave()
            s.client.assert_ledger_clean(LEDGER_S)
    s.check_next()


@row(
    "A2",
    "an abort while queued on D leaves nothing at P",
    options=TIGHT,
    proof=deaf("who is queued", "entry.phase is d.Phase.QUEUED"),
)
def a2(s: Setup) -> None:
    started, submitted, aborted = (s.client.metric(name) for name in (STARTED, SUBMITTED, ABORTED))
    gate = s.gate()
    with s.faults(f"decode/barrier:merge:until={gate}"):
        first = s.client.begin(greedy(prompt(1, 400), 60))
        s.await_fired("merge")
        second = s.client.begin(greedy(prompt(2, 400), 60))
        s.client.until(lambda: s.client.metric(SUBMITTED) == submitted + 2, "D has both")
        second.leave()
        s.client.until(lambda: s.client.metric(ABORTED) > aborted, "D knows that it left", LEDGER_S)
        gate.touch()
        s.check(prompt(1, 400), first.wait(), 60)
    assert s.client.metric(STARTED) == started + 2, "P heard of the second"  # D and P count the first
    s.check_next()


@row(
    "A4",
    "D gets back what an aborted transfer held though P's answer, or the Abort, is lost",
    proof=Proof(
        "an Abort is said once, and Status of P is lost",
        faults="prefill/drop:Status*",
        patch="import transfer.receiver\ntransfer.receiver.ABORT_RETRY_S = 1e9\n",
    ),
)
def a4(s: Setup) -> None:
    for lost in ("prefill/drop:Quiesced", "decode/drop:Abort"):
        rule = f"prefill/barrier:after-prefill:until={s.gate()}; {lost}"
        with s.faults(rule):
            pending = s.client.begin(greedy(prompt(1, 100), 8))
            s.await_fired("after-prefill")
            pending.leave()
            s.await_fired(lost)
            s.client.assert_ledger_clean(2 * LEDGER_S)  # D asks again after a second
    s.check_next()


@row(
    "A5",
    "aborts of retracted requests leak nothing, twenty times",
    options=TIGHT,
    proof=deaf("who was retracted", "entry.was_retracted"),
)
def a5(s: Setup) -> None:
    for _ in range(20):
        retracted = s.client.metric(RETRACTED)
        with s.faults("decode/refuse:growth*"):
            pending = [s.client.begin(greedy(prompt(seed, 60 + seed), 60)) for seed in (1, 2)]
            more_than(s, RETRACTED, retracted)
            for each in pending:
                each.leave()
            s.client.assert_ledger_clean(LEDGER_S)
    s.check_next()


@row(
    "A6",
    "an abort between arrival and the running batch leaks nothing",
    proof=deaf("who has arrived and does not run yet", "entry.phase is d.Phase.ARRIVED"),
)
def a6(s: Setup) -> None:
    for point in ("arrived", "merge"):
        leave_at(s, f"decode/barrier:{point}:until={s.gate()}", point)
    s.check_next()


@row(
    "A8",
    "what is aborted while it waits at P is never computed",
    proof=Proof(
        "P does not take out of its queue what is over",
        patch="import prefill_node.scheduler as p\n"
        "for name in ('stop', 'end'):\n"
        "    def over(self, key, real=getattr(p.PrefillScheduler, name)):\n"
        "        return None if key in self._queued else real(self, key)\n"
        "    setattr(p.PrefillScheduler, name, over)\n",
    ),
)
def a8(s: Setup) -> None:
    computed = s.client.metric(COMPUTED)
    leave_at(s, "prefill/refuse:allocation*", "allocation")
    s.check_next()  # P computes in order: those come behind it
    assert s.client.metric(COMPUTED) == computed + NEXT_TOKENS, "P computed it"


@row(
    "A10",
    "behind a long prompt whose client left, a short one is computed at once",
    needs=Needs.NOTHING,
    proof=Proof(
        "P goes on",
        patch="import prefill_node.scheduler as p\n"
        "p.PrefillScheduler.stop = p.PrefillScheduler.end = lambda *_: None\n",
    ),
)
def a10(s: Setup) -> None:
    model = s.models.other("long", max_position_embeddings=8192)
    with s.serving("--prefill-budget", "64", model=model) as other:
        pending = other.client.begin(greedy(prompt(1, LONG), 8))
        other.client.until(lambda: other.client.metric(COMPUTED) > 0, "P computes it")
        pending.leave()
        outcome = other.client.ask(greedy(prompt(2, 20), 4))
        assert outcome.succeeded, outcome
        computed = other.client.metric(COMPUTED)
        assert computed < LONG * 3 / 4, f"P computed {computed:g} tokens"


@row(
    "A13",
    "with a pool that no request fits in, those who wait end in time, and the pool comes back",
    options=TIGHT,
    proof=Proof(
        "D ends what is overdue only when it can let somebody in",
        patch="import decode_node.scheduler as d\nd.DecodeScheduler.expire = lambda *_: []\n",
    ),
)
def a13(s: Setup) -> None:
    gate = s.gate()
    with s.faults(f"decode/barrier:merge:until={gate}"):
        first = s.client.begin(greedy(prompt(1, 400), 60))
        s.await_fired("merge")
        waiting = [s.client.begin(greedy(prompt(seed, 400), 60, timeout=0.5)) for seed in (2, 3)]
        for each in waiting:
            outcome = each.wait()
            assert outcome.status == 504, outcome
            assert outcome.error is not None
            assert "says nothing" not in outcome.error["message"], "the gateway had to speak for D"
        first.leave()
        s.client.assert_ledger_clean(LEDGER_S)
    s.check_next()


@row(
    "A15",
    "an abort that comes before its request is remembered, at D and at P",
    proof=Proof(
        "early aborts are forgotten",
        patch="import common.remembered as r\nr.EarlyAborts.take = lambda *_: False\n",
    ),
)
def a15(s: Setup) -> None:
    computed = s.client.metric(COMPUTED)
    for rule, kind in (("gateway/reorder:Submit", "Submit"), ("decode/reorder:Prefill", "Prefill")):
        early = s.client.metric(EARLY)
        with s.faults(rule):
            pending = s.client.begin(greedy(prompt(1, 100), 400))
            s.await_fired(kind)
            pending.leave()
            if kind == "Prefill":
                more_than(s, EARLY, early)
            s.client.assert_ledger_clean(LEDGER_S)
    assert s.client.metric(COMPUTED) == computed, "it was computed"
    s.check_next()
