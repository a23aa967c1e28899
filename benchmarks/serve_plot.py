"""The picture of a load on one server: latencies over time and by percentile, and tokens over time.

Measures nothing; an answer without a token is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.answers import Answer
from benchmarks.charts import Chart, Look, Series, draw
from benchmarks.percentiles import median, percentile

_SLICES = 60
_PERCENTS = (*range(0, 100, 2), 99, 99.9, 100)
_LEAST_MS = 0.1  # the scale is logarithmic, and chunks that were read together are 0 ms apart
Groups = Mapping[str, Sequence[Answer]]  # answers of one kind, by name
Points = list[tuple[float, float]]


def plot_load(title: str, groups: Groups, notes: Sequence[str]) -> str:
    """Return the picture of all answers; a colour for each group."""
    begun = {name: [answer for answer in answers if answer.chunks] for name, answers in groups.items()}
    every = [answer for answers in begun.values() for answer in answers]
    begin_s = min((answer.begun_s for answer in every), default=0.0)
    width_s = (max((answer.ended_s for answer in every), default=1.0) - begin_s) / _SLICES or 1.0

    def sliced(values: Sequence[tuple[float, float]], of: Callable[[Sequence[float]], float]) -> Points:
        """Return one value for each slice of time in which there are some, of (time, value)."""
        by_slice: dict[int, list[float]] = {}
        for at_s, value in values:
            by_slice.setdefault(min(int((at_s - begin_s) / width_s), _SLICES - 1), []).append(value)
        return [((number + 0.5) * width_s, of(by_slice[number])) for number in sorted(by_slice)]

    ttft, itl, tokens, ttft_shares, itl_shares = [], [], [], [], []
    for colour, (name, answers) in enumerate(begun.items()):
        if not answers:
            continue
        firsts = [(answer.begun_s - begin_s, max(answer.ttft_s * 1000, _LEAST_MS)) for answer in answers]
        gaps = [(at_s, max(gap_s * 1000, _LEAST_MS)) for answer in answers for at_s, gap_s in answer.gaps()]
        chunks = [(at_s, float(num)) for answer in answers for at_s, num in answer.chunks]
        ttft.append(Series(name, firsts, colour, look=Look.POINTS))
        ttft_shares.append(Series(name, _shares([ms for _, ms in firsts]), colour))
        tokens.append(Series(name, sliced(chunks, lambda nums: sum(nums) / width_s), colour))
        if gaps:
            itl.append(Series(f"{name} p50", sliced(gaps, median), colour))
            itl.append(Series(f"{name} max", sliced(gaps, max), colour, 1))
            itl_shares.append(Series(name, _shares([ms for _, ms in gaps]), colour))
    charts = [
        Chart("time to first token, by when it was asked for", "s", "ms", ttft, is_log=True),
        Chart("time to first token", "% of the requests", "ms, at most", ttft_shares, is_log=True),
        Chart("time between tokens", "s", "ms", itl, is_log=True),
        Chart("time between tokens", "% of the gaps", "ms, at most", itl_shares, is_log=True),
        Chart("output", "s", "tokens/s", tokens),
    ]
    return draw(title, charts, notes)


def _shares(values: Sequence[float]) -> Points:
    """Return (percent, the value that so many are not above)."""
    return [(percent, percentile(values, percent)) for percent in _PERCENTS]
