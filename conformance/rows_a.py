"""A: a client that leaves costs no page and no computing, wherever its request is."""

from __future__ import annotations

from conformance.client import LEDGER_S, greedy
from conformance.rows import Proof, row
from conformance.setup import Setup, prompt

NO_ABORTS = Proof("Abort and Status to D are lost", faults="gateway/drop:Abort*; gateway/drop:Status*")


@row("A1", "a client that leaves before D has its request costs P nothing", proof=NO_ABORTS)
def a1(s: Setup) -> None:
    with s.faults(f"prefill/barrier:before-commit:until={s.gate()}"):
        pending = s.client.begin(greedy(prompt(1, 100), 8))
        s.await_fired("before-commit")
        assert s.client.pages("prefill")["outgoing"] > 0
        pending.leave()
        s.client.assert_ledger_clean(LEDGER_S)
    s.check_next()
