"""Stop strings against a search in the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.stops import StopStrings

PIECES = st.lists(st.text(alphabet="ab", max_size=4), max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4)


def run(pieces: list[str], stops: list[str], armed_from: int) -> tuple[list[str], bool]:
    machine = StopStrings(stops)
    shown = []
    for i, piece in enumerate(pieces):
        shown.append(machine.feed(piece, armed=i >= armed_from))
        if machine.matched:
            return shown, True
    shown.append(machine.release())
    return shown, False


def visible(pieces: list[str], stops: list[str], armed_from: int) -> tuple[str, bool]:
    """Search all text so far after each piece, for matches that end in that piece."""
    text = ""
    for i, piece in enumerate(pieces):
        before, text = len(text), text + piece
        starts = [
            start
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before
        ]
        if i >= armed_from and starts:
            return text[: min(starts)], True
    return text, False


@given(pieces=PIECES, stops=STOPS, armed_from=st.integers(0, 6))
def test_text_ends_before_the_first_match(pieces: list[str], stops: list[str], armed_from: int) -> None:
    shown, matched = run(pieces, stops, armed_from)
    assert ("".join(shown), matched) == visible(pieces, stops, armed_from)


@given(pieces=PIECES, stop=st.text(alphabet="ab", min_size=1, max_size=4))
def test_one_stop_string_is_what_find_says(pieces: list[str], stop: str) -> None:
    shown, matched = run(pieces, [stop], 0)
    assert "".join(shown) == "".join(pieces).partition(stop)[0]
    assert matched == (stop in "".join(pieces))


def test_only_what_may_become_a_match_is_held_back() -> None:
    machine = StopStrings(["###"])
    assert machine.feed("a#b##", armed=True) == "a#b"
    assert machine.feed("c", armed=True) == "##c"
