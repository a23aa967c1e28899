"""What the rows of docs/troubleshooting.md are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.docs.provoke import Recipe


@dataclass(frozen=True, slots=True)
class NotTried:
    """Why no test makes the program say it here."""

    why: str


ON_A_GPU = NotTried("it needs an NVIDIA GPU; tests/gpu has the real thing")
BY_A_BUG = NotTried("another part refuses it before; only a fault of our own gets so far")
BY_THE_MACHINE = NotTried("the machine would have to be short of something, or broken")
BY_THE_NETWORK = NotTried("it needs a package index, or a hub, that fails in a certain way")
BY_A_FOREIGN_NODE = NotTried("a node of another make would have to say it")


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that goes wrong.

    Args:
        shown: what is printed then, as it stands in the code but for the names of its holes (`<port>`),
            each with what provokes it.
        means: what it means.
        do: what to do.
    """

    shown: Mapping[str, Recipe | NotTried]
    means: str
    do: str
