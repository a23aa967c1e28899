"""Charts of lines and points as one SVG file, on light and on dark ground. Knows no benchmark.

Colours are those of Okabe and Ito, which people with colour-blindness tell apart, lightened on dark ground;
lines also differ by dash and marker. Every chart and every line has its name as text and as `<title>`.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from xml.sax import saxutils

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 400, 200, 64, 64, 76
_COLUMNS = 2
_TICKS = 5
_NOTE_CHARS = 140
_LINES = 6  # distinct looks; the next line begins again
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "10 4")
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, 2.2
_STYLE = """
:root { --ground: #fff; --ink: #1b1f24; --faint: #d7dbe0; --quiet: #57606a;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #aa4499; --c4: #8a6d00; --c5: #56606b; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181d; --ink: #e6e9ed; --faint: #333a43;
  --quiet: #9aa4af; --c0: #56b4e9; --c1: #ff9248; --c2: #3ccfa0; --c3: #e29adb; --c4: #e0c341;
  --c5: #b3bcc6; } }
text { fill: var(--ink); font: 12px system-ui, sans-serif; } .quiet { fill: var(--quiet); font-size: 11px; }
.title { font-weight: 600; font-size: 13px; } .head { font-weight: 600; font-size: 15px; }
.grid { stroke: var(--faint); stroke-width: 1; } .line { fill: none; stroke-width: 1.8; }
"""


def escape(text: str) -> str:
    """Return text as XML has it, without the characters that it cannot have."""
    return saxutils.escape(_NO_XML.sub("", text))


class Look(Enum):
    """How the values of a series are shown."""

    LINE = "line"
    POINTS = "points"  # each by itself: of requests


@dataclass(frozen=True, slots=True)
class Series:
    """A named line of (x, y); one that has the same `colour` as another belongs to the same thing."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dash: int = 0
    look: Look = Look.LINE


@dataclass(frozen=True, slots=True)
class Chart:
    """Some series over the same axes; `is_log` is for y, whose values are above 0 then."""

    title: str
    x_name: str
    y_name: str
    series: Sequence[Series]
    is_log: bool = False
    y_max: float | None = None  # the axis ends there at least


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers within the range, about `_TICKS` of them."""
    rough = (high - low) / _TICKS or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten within the range; with 2 and 5 between where those are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1,) if len(powers) > 4 else (1, 2, 5)
    ticks = [step * 10.0**power for power in powers for step in steps]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def _range(chart: Chart) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return what both axes span."""
    xs = [x for series in chart.series for x, _ in series.points] or [0.0, 1.0]
    ys = [y for series in chart.series for _, y in series.points] or [1.0]
    top = max([*ys, chart.y_max or 0.0]) or 1.0
    if chart.is_log:
        low = max(min(ys), 1e-9)
        return (min(0.0, *xs), max(xs)), (low / 1.2, max(top, low * 2) * 1.2)
    return (min(0.0, *xs), max(xs)), (0.0, top * 1.05)


@dataclass(frozen=True, slots=True)
class _Axes:
    """Where values of a chart are in the picture."""

    left: float
    top: float
    x: tuple[float, float]
    y: tuple[float, float]
    is_log: bool

    def at_x(self, value: float) -> float:
        low, high = self.x
        return self.left + (value - low) / ((high - low) or 1.0) * _WIDTH

    def at_y(self, value: float) -> float:
        scale: Callable[[float], float] = math.log10 if self.is_log else float
        low, high = map(scale, self.y)
        share = (scale(max(value, self.y[0])) - low) / ((high - low) or 1.0)
        return self.top + _HEIGHT * (1 - share)


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _grid(chart: Chart, axes: _Axes) -> list[str]:
    right, bottom = axes.left + _WIDTH, axes.top + _HEIGHT
    parts = []
    for tick in (_log_ticks if chart.is_log else _ticks)(*axes.y):
        y = axes.at_y(tick)
        parts.append(f'<line class="grid" x1="{axes.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(axes.left - 6, y + 4, f"{tick:g}", "quiet", "end"))
    for tick in _ticks(*axes.x):
        parts.append(_text(axes.at_x(tick), bottom + 16, f"{tick:g}", "quiet", "middle"))
    parts.append(_text(right, bottom + 30, chart.x_name, "quiet", "end"))
    parts.append(_text(axes.left, axes.top - 8, chart.y_name, "quiet"))
    return parts


def _series(series: Series, axes: _Axes) -> list[str]:
    colour = f"var(--c{series.colour % _LINES})"
    places = [(axes.at_x(x), axes.at_y(y)) for x, y in series.points]
    parts = [f"<g><title>{escape(series.name)}</title>"]
    if series.look is Look.LINE:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dash = f' stroke-dasharray="{_DASHES[series.dash % _LINES]}"' if series.dash else ""
        parts.append(f'<polyline class="line" points="{path}" style="stroke:{colour}"{dash}/>')
    if series.look is Look.POINTS or len(places) <= 12:
        size = 2.6 if series.look is Look.LINE else 1.8
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" style="fill:{colour}"/>' for x, y in places]
    return [*parts, "</g>"]


def _legend(chart: Chart, axes: _Axes) -> list[str]:
    parts, x, y = [], axes.left, axes.top + _HEIGHT + 48.0
    for series in chart.series:
        colour = f"var(--c{series.colour % _LINES})"
        dash = f' stroke-dasharray="{_DASHES[series.dash % _LINES]}"' if series.dash else ""
        line = f'<line x1="{x:.0f}" x2="{x + 18:.0f}" y1="{y - 4:.0f}" y2="{y - 4:.0f}"'
        parts.append(f'{line} class="line" style="stroke:{colour}"{dash}/>')
        parts.append(_text(x + 22, y, series.name, "quiet"))
        x += 34 + 6.0 * len(series.name)
        if x > axes.left + _WIDTH - 120:
            x, y = axes.left, y + 15
    return parts


def _chart(chart: Chart, left: float, top: float) -> list[str]:
    axes = _Axes(left, top, *_range(chart), chart.is_log)
    parts = [f'<g role="img"><title>{escape(chart.title)}</title>']
    parts.append(_text(left, top - 26, chart.title, "title"))
    parts += _grid(chart, axes)
    for series in chart.series:
        parts += _series(series, axes)
    return [*parts, *_legend(chart, axes), "</g>"]


def draw(title: str, charts: Sequence[Chart], notes: Sequence[str] = ()) -> str:
    """Return the picture: a title, lines of text below it, and the charts, two in a row."""
    notes = [line for note in notes for line in textwrap.wrap(note, _NOTE_CHARS)]
    head = 30 + 17 * len(notes)
    column, row = _LEFT + _WIDTH + 24, _TOP + _HEIGHT + _GAP
    rows = math.ceil(len(charts) / _COLUMNS)
    width, height = column * min(_COLUMNS, max(1, len(charts))), head + rows * row
    parts = [_text(16, 26, title, "head")]
    parts += [_text(16, 46 + 17 * number, note, "quiet") for number, note in enumerate(notes)]
    for number, chart in enumerate(charts):
        down, right = divmod(number, _COLUMNS)
        parts += _chart(chart, right * column + _LEFT, head + down * row + _TOP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}">\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n'
        '<rect width="100%" height="100%" style="fill:var(--ground)"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
