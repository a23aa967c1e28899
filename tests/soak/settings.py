"""How long the soak runs are: each size has a variable in the environment, for a short form of it."""

from __future__ import annotations

import os


def setting(name: str, default: int) -> int:
    """The number in the variable SOAK_`name`, or else the size of the full run."""
    return int(os.environ.get(f"SOAK_{name}", default))
