"""The client of the conformance suite: the tests' too."""

from conformance.client import LEDGER_S, WAIT_S, Body, Client, Outcome, greedy

__all__ = ["LEDGER_S", "WAIT_S", "Body", "Client", "Outcome", "greedy"]
