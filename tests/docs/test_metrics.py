"""The page on metrics and the dashboard name what there is, and the page names all of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest

from gateway.failures import FAILURES
from tests.docs.generate import DOCS, METRICS
from tests.docs.metrics import all_families, fill_page, shown_name

PAGE = METRICS.read_text()
DASHBOARD = json.loads((DOCS / "grafana.json").read_text())
VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$node": ".*"}
ROWS = ["Overview", "Latency", "Nodes", "KV pages", "Transfers", "Failures"]


def series() -> dict[str, set[str]]:
    """Every series that a query can name, with its labels."""
    found: dict[str, set[str]] = {}
    for family in all_families():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


SERIES = series()


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    listed = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    in_page = re.findall(r"^\|[^|]*\|(.*)\|$", PAGE[: PAGE.index("## Failures")], re.MULTILINE)
    return [*shown, *listed, *(query for cell in in_page for query in re.findall(r"`(.*?)`", cell))]


def selectors(expr: Any) -> Iterator[Any]:
    """Every selector in a parsed query, and every grouping as a pair of labels and what is grouped."""
    match expr:
        case promql_parser.VectorSelector():
            yield expr
        case promql_parser.MatrixSelector():
            yield expr.vector_selector
        case promql_parser.Call():
            for arg in expr.args:
                yield from selectors(arg)
        case promql_parser.BinaryExpr():
            yield from (*selectors(expr.lhs), *selectors(expr.rhs))
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            return
        case _:
            yield from selectors(expr.expr)


def groupings(expr: Any) -> Iterator[tuple[list[str], Any]]:
    if isinstance(expr, promql_parser.AggregateExpr) and expr.modifier is not None:
        yield expr.modifier.labels, expr.expr
    inside = (expr.lhs, expr.rhs) if isinstance(expr, promql_parser.BinaryExpr) else getattr(expr, "args", ())
    for each in (*inside, *([expr.expr] if hasattr(expr, "expr") else [])):
        yield from groupings(each)


def test_the_page_is_current() -> None:
    assert fill_page(PAGE) == PAGE, "run: python -m tests.docs.generate"


def test_the_page_has_every_family_and_every_kind_once() -> None:
    named = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    families = [shown_name(f) for f in all_families() if not f.name.startswith("process_")]
    assert sorted(named) == sorted([*families, *(kind.value for kind in FAILURES)])


def test_other_words_of_the_page_are_names_of_series() -> None:
    for name in set(re.findall(r"\bbaton_\w+", PAGE)):
        assert name in SERIES or any(series_.startswith(f"{name}_") for series_ in SERIES), name


@pytest.mark.parametrize("query", queries())
def test_a_query_parses_and_names_what_there_is(query: str) -> None:
    if query.startswith("label_values("):
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert label in SERIES[name]
        return
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    assert "$" not in query
    parsed = promql_parser.parse(query)
    used = list(selectors(parsed))
    assert used
    for selector in used:
        assert selector.name in SERIES, selector.name
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels <= SERIES[selector.name], (selector.name, labels)
    for labels, inside in groupings(parsed):
        for selector in selectors(inside):
            assert set(labels) <= SERIES[selector.name], (labels, selector.name)
    for counter in re.findall(r"\b(\w+(?:_total|_bucket|_sum|_count))\b(?!.*label_values)", query):
        assert re.search(rf"(rate|increase)\({counter}[{{\[]", query), f"{counter} without rate()"


def test_a_quantile_keeps_its_buckets() -> None:
    for query in queries():
        assert ("histogram_quantile" in query) == ("_bucket" in query)
        if "histogram_quantile" in query:
            assert re.search(r"by \((\w+, )*le\)", query), query


def test_the_dashboard_can_be_imported() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"] == ROWS
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells = set()
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells, panel["title"]  # nothing lies on something else
        cells |= own
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label in target["expr"], panel["title"]


def test_the_dashboard_shows_every_kind_of_failure_and_restarts() -> None:
    shown = " ".join(queries())
    for name in ("baton_failures_total", "baton_node_failures_total", "baton_restarts_total"):
        assert name in shown
