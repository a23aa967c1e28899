"""Commands that stand on a page in fenced blocks, with what the page says that they print.

A block of `sh` is run; one of `text` behind it (prose may be between, a heading not) is its output, where
`...` stands for anything. `<!-- not run: WHY -->` before a block leaves it out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_PART = re.compile(
    r"<!-- not run: (?P<why>.*?) -->\n|^```(?P<kind>\w*)\n(?P<text>.*?)^```$|^(?P<heading>#+ [^\n]*)$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """Commands of a page.

    Args:
        printed: what they print; None: the page does not say.
        not_run: why they are not run; None: they are.
    """

    commands: str
    printed: str | None = None
    not_run: str | None = None


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of commands, in order."""
    waiting: Block | None = None
    why: str | None = None
    for part in _PART.finditer(page):
        if part["why"] is not None:
            why = part["why"]
            continue
        if part["kind"] == "text" and waiting is not None:
            yield Block(waiting.commands, part["text"], waiting.not_run)
            waiting = None
            continue
        if waiting is not None:
            yield waiting
            waiting = None
        if part["kind"] == "sh":
            waiting = Block(part["text"], not_run=why)
        why = None
    if waiting is not None:
        yield waiting


def is_as_said(said: str, printed: str) -> bool:
    """Compare what a page says with what was printed: words, whatever is between them; `...` is anything."""
    parts = [r"\s*".join(map(re.escape, part.split())) for part in said.split("...")]
    return re.fullmatch(r"\s*" + r".*?".join(parts) + r"\s*", printed, re.DOTALL) is not None
