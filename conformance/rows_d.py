"""D: late or double news ends no process."""

from __future__ import annotations

from conformance.client import LEDGER_S, greedy
from conformance.rows import Proof, row
from conformance.setup import Setup, prompt


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
