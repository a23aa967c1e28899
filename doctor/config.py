"""The options that `baton doctor` has beside those of `baton serve`. `--help` loads it."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import option


@dataclass(frozen=True, slots=True)
class DoctorConfig:
    """What only `baton doctor` can be told."""

    quick: bool = option(False, "Move pages once over each data plane, and measure no rates.")
    json: bool = option(False, "Print one JSON object instead of lines.")
    join: str = option(
        "", "Address of a running gateway, of several with commas between: greet it, and say who answers."
    )
