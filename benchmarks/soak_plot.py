"""A picture of the soak, as SVG: how requests ended, memory and file descriptors, and when what happened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 860, 170, 60, 30, 46
_COLORS = ("#1f4e9c", "#c0392b", "#27824a", "#8e44ad", "#b9770e", "#5d6d7e", "#17a2b8", "#000000")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over seconds."""

    title: str
    lines: Mapping[str, Points]


def _chart(chart: Chart, top: float, end_s: float) -> list[str]:
    most = max((y for points in chart.lines.values() for _, y in points), default=1.0) or 1.0
    parts = [f'<text x="{_LEFT}" y="{top - 8}" font-weight="bold">{chart.title}</text>']
    for share in (0.0, 0.5, 1.0):
        at = top + _HEIGHT * (1 - share)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ccc"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{most * share:.4g}</text>')
    at = _LEFT + 10.0 + 7 * len(chart.title)
    for number, (name, points) in enumerate(chart.lines.items()):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join(
            f"{_LEFT + x / end_s * _WIDTH:.1f},{top + _HEIGHT * (1 - y / most):.1f}" for x, y in points
        )
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.1"/>')
        parts.append(f'<text x="{at:.0f}" y="{top - 8}" fill="{color}">{name}</text>')
        at += 12 + 6.2 * len(name)
    return parts


def draw(title: str, charts: Sequence[Chart], happened: Sequence[tuple[float, str]], end_s: float) -> str:
    """Return the picture; what happened is a tick on top of each chart."""
    parts = [f'<text x="{_LEFT}" y="16">{title}</text>']
    names = sorted({what for _, what in happened})
    for number, chart in enumerate(charts):
        top = _TOP + 20 + number * (_HEIGHT + _GAP)
        parts += _chart(chart, top, end_s)
        for at_s, what in happened:
            x, color = _LEFT + at_s / end_s * _WIDTH, _COLORS[names.index(what) % len(_COLORS)]
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + 7}" stroke="{color}"/>')
    bottom = _TOP + 20 + len(charts) * (_HEIGHT + _GAP)
    for number, what in enumerate(names):
        parts.append(
            f'<text x="{_LEFT + number * 110}" y="{bottom}" fill="{_COLORS[number]}">| {what}</text>'
        )
    parts.append(f'<text x="{_LEFT + _WIDTH}" y="{bottom}" text-anchor="end">{end_s:.0f} s</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 16}" height="{bottom + 14}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
