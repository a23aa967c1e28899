"""docs/api.md is what the code says now, and has every field that a request can have."""

from __future__ import annotations

import re

import pytest

from gateway.endpoints import CHAT, COMPLETIONS, Endpoint
from tests import openai_fields
from tests.docs.api import api_page
from tests.docs.generate import API


def sections() -> dict[str, dict[str, list[str]]]:
    """Return the rows of the page's tables, by heading and first cell."""
    found: dict[str, dict[str, list[str]]] = {}
    for part in api_page().split("\n## ")[1:]:
        heading, _, rest = part.partition("\n")
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in rest.splitlines() if line.startswith("| `")]
        found[heading] = {first.strip(" `"): [cell.strip() for cell in cells] for first, *cells in rows}
    return found


def test_the_page_is_current() -> None:
    assert API.read_text() == api_page(), "run: python -m tests.docs.generate"


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT], ids=lambda endpoint: endpoint.body_object)
def test_every_field_is_there_once_with_its_standing(endpoint: Endpoint) -> None:
    rows = sections()[f"POST {endpoint.path}"]
    ours, official = set(endpoint.request_type.model_fields), openai_fields.BY_PATH[endpoint.path]
    by_standing = {
        standing: {name for name, cells in rows.items() if cells[0] == standing}
        for standing in ("supported", "extension", "refused")
    }
    assert by_standing["supported"] == ours & official
    assert by_standing["extension"] == ours - official
    assert by_standing["refused"] == official - ours
    assert [name for name, cells in rows.items() if cells[0] != "refused" and not cells[3]] == []
    assert {name for name, cells in rows.items() if cells[2] == "required"} == {
        name for name, info in endpoint.request_type.model_fields.items() if info.is_required()
    }


def test_what_fields_hold_is_said_in_words() -> None:
    rows = sections()["POST /v1/completions"]
    assert rows["temperature"][1:3] == ["number (0 to 2)", "`1.0`"]
    assert rows["seed"][1] == "integer (-2^63 to 2^63 - 1)"
    assert (
        rows["stop"][1] == "text (1 to 1024 characters) or list (0 to 4 items) of text (1 to 1024 characters)"
    )
    assert rows["suffix"][:2] == ["refused", "null"]
    assert sections()["StreamOptions"]["continuous_usage_stats"][0] == "extension"
    assert re.findall(r"<class|typing\.|\{'", api_page()) == []


def test_links_within_the_page_lead_somewhere() -> None:
    page = api_page()
    anchors = {heading.lower().replace(" ", "-") for heading in sections()}
    assert set(re.findall(r"\]\(#([\w-]+)\)", page)) <= anchors
    for name in re.findall(r"\]\((examples/\S+)\)", page):
        assert (API.parent / name).is_file()


def test_routes_and_errors_are_there() -> None:
    assert "POST /v1/completions" in sections()["Routes"]
    assert {"400", "429", "503"} <= set(re.findall(r"^\| (\d{3}) \|", api_page(), re.MULTILINE))
