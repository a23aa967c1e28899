"""What a completion must be: the oracle of the conformance suite."""

from conformance.reference import Expected, Reference, Scores, penalised

__all__ = ["Expected", "Reference", "Scores", "penalised"]
