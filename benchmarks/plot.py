"""A picture of inter-token times, as SVG: for each server a panel, with the time of the long prompt shaded.

Per slice of time, the median and the longest gap over all streams; the scale of milliseconds is logarithmic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.percentiles import median

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 760, 190, 56, 34, 44
_SLICES = 150


@dataclass(frozen=True, slots=True)
class Panel:
    """Gaps between tokens (when it ended, how long it was), in seconds from when the long prompt was sent."""

    title: str
    gaps: Sequence[tuple[float, float]]
    prompt_end_s: float


def _slices(panel: Panel, start_s: float, end_s: float) -> list[tuple[float, float, float]]:
    """Return (time, median, longest) of each slice in which a gap ended."""
    by_slice: dict[int, list[float]] = {}
    for at_s, gap_s in panel.gaps:
        by_slice.setdefault(int((at_s - start_s) / (end_s - start_s) * _SLICES), []).append(gap_s * 1000)
    width_s = (end_s - start_s) / _SLICES
    return [
        (start_s + (index + 0.5) * width_s, median(gaps), max(gaps))
        for index, gaps in sorted(by_slice.items())
    ]


def _panel(panel: Panel, top: float, times: tuple[float, float], decades: tuple[int, int]) -> list[str]:
    (start_s, end_s), (low, high) = times, decades
    points = _slices(panel, start_s, end_s)

    def x(at_s: float) -> float:
        return _LEFT + (at_s - start_s) / (end_s - start_s) * _WIDTH

    def y(ms: float) -> float:
        return top + _HEIGHT * (1 - (math.log10(max(ms, 10**low)) - low) / (high - low))

    def line(values: Sequence[tuple[float, float]], color: str) -> str:
        path = " ".join(f"{x(at_s):.1f},{y(ms):.1f}" for at_s, ms in values)
        return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.3"/>'

    shade = f'<rect x="{x(0):.1f}" y="{top}" width="{x(panel.prompt_end_s) - x(0):.1f}" height="{_HEIGHT}"'
    parts = [
        f'<text x="{_LEFT}" y="{top - 8}" font-weight="bold">{panel.title}</text>',
        f'{shade} fill="#f3e3c3"/>',
    ]
    for decade in range(low, high + 1):
        at = y(10**decade)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ccc"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{10.0**decade:g} ms</text>')
    parts.append(line([(at_s, longest) for at_s, _, longest in points], "#c0392b"))
    parts.append(line([(at_s, middle) for at_s, middle, _ in points], "#1f4e9c"))
    for second in range(math.ceil(start_s), math.floor(end_s) + 1):
        parts.append(
            f'<text x="{x(second):.1f}" y="{top + _HEIGHT + 15}" text-anchor="middle">{second}</text>'
        )
    return parts


def draw(title: str, panels: Sequence[Panel]) -> str:
    """Return the picture; all panels have the same scales."""
    gaps_ms = [gap_s * 1000 for panel in panels for _, gap_s in panel.gaps if gap_s > 0]
    low, high = math.floor(math.log10(median(gaps_ms))), math.ceil(math.log10(max(gaps_ms)))
    ends = [at_s for panel in panels for at_s, _ in panel.gaps]
    times, decades = (min(ends), max(ends)), (low, max(high, low + 1))
    height = _TOP + len(panels) * (_HEIGHT + _GAP) + 20
    parts = [f'<text x="{_LEFT}" y="16">{title}</text>']
    for index, panel in enumerate(panels):
        parts += _panel(panel, _TOP + 20 + index * (_HEIGHT + _GAP), times, decades)
    parts.append(
        f'<text x="{_LEFT + _WIDTH}" y="16" text-anchor="end">seconds; '
        '<tspan fill="#c0392b">longest</tspan> and <tspan fill="#1f4e9c">median</tspan> gap</text>'
    )
    size = f'width="{_LEFT + _WIDTH + 16}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
