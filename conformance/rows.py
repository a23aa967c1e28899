"""The rows of the fault catalogue: what each is called, what it needs, and the function that tries it.

A row is a function that takes a `Setup` and raises AssertionError when the fault is there. Rows that do not
apply have a reason instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conformance.setup import Setup

Run = Callable[["Setup"], None]


class Needs(Enum):
    """What a row needs to be tried."""

    HTTP = "HTTP and the ledger"  # of any Baton server
    SERVER = "its own server"  # shared with the rows of the same options; left as it was
    FRESH = "a server for itself"  # something of it ends
    NOTHING = "nothing"  # starts what it wants by itself


@dataclass(frozen=True, slots=True)
class Proof:
    """What puts a row's fault back in, so that the row fails: proof that it can.

    Args:
        what: in a few words, for the table.
        faults: rules that are added to the row's own.
        patch: Python that every process of the server runs at its start.
    """

    what: str
    faults: str = ""
    patch: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the catalogue that is tried here."""

    id: str
    title: str
    needs: Needs
    options: tuple[str, ...]
    proof: Proof | None
    run: Run


ROWS: dict[str, Row] = {}
NOT_APPLICABLE: dict[str, str] = {}  # row -> reason


def row(
    id_: str,
    title: str,
    *,
    needs: Needs = Needs.SERVER,
    options: tuple[str, ...] = (),
    proof: Proof | None = None,
) -> Callable[[Run], Run]:
    """Register a row.

    Args:
        title: what must not happen, or what must hold, in a few words.
        options: of `baton serve`, beside the usual ones.
        proof: how the row is made to fail.
    """

    def decorate(run: Run) -> Run:
        assert id_ not in ROWS, id_
        ROWS[id_] = Row(id_, title, needs, options, proof, run)
        return run

    return decorate


def not_applicable(reason: str, *ids: str) -> None:
    """Say why rows are not tried."""
    for id_ in ids:
        assert id_ not in NOT_APPLICABLE, id_
        NOT_APPLICABLE[id_] = reason


def order(id_: str) -> tuple[str, int]:
    """Sort A2 before A10."""
    return id_[0], int(id_[1:])


def load_rows() -> dict[str, Row]:
    """Import all modules of rows; return the rows in order."""
    for path in sorted(Path(__file__).parent.glob("rows_*.py")):
        import_module(f"conformance.{path.stem}")
    return {id_: ROWS[id_] for id_ in sorted(ROWS, key=order)}
