"""A prompt as its answers begin with it (`echo`): its text, and where in it each token's text begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.fields import INT32_MAX
from gateway.text import TextPipeline


@dataclass(frozen=True, slots=True)
class Echo:
    """The beginning of a prompt's answers."""

    text: str
    offsets: tuple[int, ...]  # characters, one a token of the prompt


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as token ids, and its echo where it is asked for."""

    ids: Sequence[int]
    echo: Echo | None = None


def echo_of(ids: Sequence[int], given: str | None, text: TextPipeline) -> Echo:
    """Read a prompt's ids as text; takes its time for a long one.

    Args:
        given: the text that they come from, which is what is shown. None: it was given as ids.
    """
    if min(ids, default=0) < 0 or max(ids, default=0) > INT32_MAX:
        return Echo("", ())  # no tokens: the prompt is refused when it is checked
    detokenizer = text.detokenizer()
    offsets, parts, size = [], [], 0
    for token_id in ids:
        offsets.append(size)
        parts.append(detokenizer.add(token_id))
        size += len(parts[-1])
    parts.append(detokenizer.flush())
    shown = "".join(parts) if given is None else given
    return Echo(shown, tuple(min(offset, len(shown)) for offset in offsets))
