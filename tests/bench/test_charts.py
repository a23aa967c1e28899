"""Pictures are well-formed whatever is drawn: every series by its name, every point inside its chart."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.answers import Answer
from benchmarks.charts import Chart, Look, Series, draw
from benchmarks.serve_plot import plot_load

NUMBERS = st.floats(0, 1e9, allow_subnormal=False)
POSITIVE = st.floats(1e-6, 1e9)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=20)


def series_of(y: st.SearchStrategy[float]) -> st.SearchStrategy[Series]:
    points = st.lists(st.tuples(NUMBERS, y), max_size=20)
    return st.builds(Series, NAMES, points, st.integers(0, 9), st.integers(0, 9), st.sampled_from(Look))


def chart_of(y: st.SearchStrategy[float], is_log: bool) -> st.SearchStrategy[Chart]:
    return st.builds(
        Chart, NAMES, NAMES, NAMES, st.lists(series_of(y), max_size=4), st.just(is_log), st.none() | POSITIVE
    )


CHARTS = st.lists(chart_of(NUMBERS, False) | chart_of(POSITIVE, True), min_size=1, max_size=3)


def elements(picture: str, kind: str) -> list[ElementTree.Element]:
    return [e for e in ElementTree.fromstring(picture).iter() if e.tag.endswith("}" + kind)]


@given(NAMES, CHARTS, st.lists(NAMES, max_size=3))
def test_everything_is_named_and_inside(title: str, charts: list[Chart], notes: list[str]) -> None:
    picture = draw(title, charts, notes)
    (root,) = elements(picture, "svg")
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    titles = [element.text or "" for element in elements(picture, "title")]
    assert titles == [title, *(n for chart in charts for n in (chart.title, *(s.name for s in chart.series)))]
    places = [
        tuple(map(float, place.split(",")))
        for line in elements(picture, "polyline")
        for place in line.attrib["points"].split()
    ] + [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in elements(picture, "circle")]
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
    lines = [s for chart in charts for s in chart.series if s.look is Look.LINE]
    assert len(elements(picture, "polyline")) == len(lines)


def test_what_xml_cannot_have_is_left_out() -> None:
    chart = Chart("a\x00b", "x\x1b", "y", [Series("s\ud800<&", [(0.0, 1.0)], 0)])
    titles = [element.text for element in elements(draw("<t>\x07", [chart], ["a\ufffe note"]), "title")]
    assert titles == ["<t>", "ab", "s<&"]


def test_larger_is_higher_and_later_is_further_right() -> None:
    for is_log in (False, True):
        chart = Chart("t", "x", "y", [Series("s", [(0.0, 1.0), (1.0, 10.0), (2.0, 100.0)], 0)], is_log)
        (line,) = elements(draw("", [chart]), "polyline")
        places = [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
        (x0, y0), (x1, y1), (x2, y2) = places
        assert x0 < x1 < x2
        assert y0 > y1 > y2
        assert (abs((y0 - y1) - (y1 - y2)) < 0.2) == is_log  # of the same factor


def test_colours_follow_the_reader_s_scheme() -> None:
    picture = draw("t", [Chart("c", "x", "y", [Series("s", [(0.0, 1.0)], 0)])])
    assert "prefers-color-scheme: dark" in picture
    assert "fill=" not in picture  # colours are all of the style
    assert "stroke=" not in picture


def test_load_is_drawn_with_a_line_for_each_kind_of_answer() -> None:
    answers = [Answer(i, [(i + 0.5, 1), (i + 0.7, 2), (i + 1.0, 1)], 10, 4, "") for i in range(5)]
    cut, nothing = Answer(2.0, [(2.5, 1)], 10, 1, "it ended early"), Answer(2.0, [], None, 0, "refused")
    picture = plot_load(
        "a load", {"short": [*answers, nothing], "long": [cut], "none": [nothing]}, ["a note"]
    )
    titles = [element.text for element in elements(picture, "title")]
    assert titles.count("short") == 4  # first tokens by time and by share, gaps by share, output
    assert titles.count("short p50") == titles.count("short max") == 1
    assert titles.count("long") == 3  # an answer of one token has no gap
    assert "none" not in titles
    assert "a note" in [element.text for element in elements(picture, "text")]
    # Five first tokens, and one of the answer that was cut: a point each.
    first, *_ = [e for e in elements(picture, "g") if e[0].text == "short"]
    assert len([e for e in first if e.tag.endswith("circle")]) == 5
