"""The key of the HTTP API, as an option says it: the key itself, or @ and the file that has it."""

from __future__ import annotations

from pathlib import Path

from common.errors import ConfigError


def read_api_key(text: str | None) -> str | None:
    """Return the key; None where none is asked for.

    Raises:
        ConfigError: the file cannot be read, or what is there cannot stand in a header.
    """
    if text is None:
        return None
    key = text
    if text.startswith("@"):
        try:
            key = Path(text[1:]).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key: cannot read {text[1:]}: {error}") from None
    if not key or not all("!" <= c <= "~" for c in key):
        raise ConfigError("--api-key: a key has at least one character, and only visible ones of ASCII")
    return key
