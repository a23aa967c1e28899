"""The model, the oracle and the answers of tests/system, for the rows of the catalogue that want them."""

from tests.system.conftest import cases, model, oracle

__all__ = ["cases", "model", "oracle"]
