"""F: no request waits for ever, and overload is answered."""

from __future__ import annotations

from conformance.rows import Proof, row
from conformance.setup import Setup, prompt


@row(
    "F6",
    "one lost completion is found, and the hand-over done again",
    proof=Proof("Status of P is lost, too", faults="prefill/drop:Status*"),
)
def f6(s: Setup) -> None:
    with s.faults("prefill/drop:Commit"):
        s.ask_right(prompt(1, 100), 8)
        s.await_fired("Commit")
    s.check_next()
