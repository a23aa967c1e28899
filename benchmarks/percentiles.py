"""Percentiles of what was measured. Knows no benchmark."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that `percent` of all values are not above."""
    return float(np.percentile(np.asarray(values), percent, method="higher"))


def median(values: Sequence[float]) -> float:
    """Return the middle value."""
    return float(np.median(np.asarray(values)))
