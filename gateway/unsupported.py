"""What the OpenAI API documents and Baton does not do, as a table: field -> values that ask for nothing.

A field that is null or has one of these values is as if absent; any other value is refused by name, never
ignored. The names are those of the official client's request types.
"""

from __future__ import annotations

import json
from typing import Any

from common.errors import RequestRejected

Table = dict[str, tuple[Any, ...]]

COMPLETION: Table = {
    "best_of": (1,),
    "suffix": (),
}
CHAT: Table = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": ({"mode": "implicit"},),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": ("none",),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
MESSAGE: Table = {"audio": (), "function_call": (), "refusal": ()}


def _same(value: Any, default: Any) -> bool:
    # The type as well: True == 1 == 1.0 in Python, and `"n": true` is a mistake.
    return type(value) is type(default) and bool(value == default)


def without_defaults(fields: dict[str, Any], table: Table, where: str = "") -> dict[str, Any]:
    """Return the fields that ask for something: without nulls, and without what the table allows.

    Args:
        where: path of the object within the request, as a prefix of the names in errors.

    Raises:
        RequestRejected: a field asks for something that is not supported.
    """
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name not in table:
            kept[name] = value
        elif not any(_same(value, default) for default in table[name]):
            allowed = ["null", *map(json.dumps, table[name])]
            raise RequestRejected(
                f"{where}{name} is not supported; leave it out, or set it to {' or '.join(allowed)}",
                param=where + name,
                code="unsupported_parameter",
            )
    return kept
