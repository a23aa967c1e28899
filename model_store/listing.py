"""Which models are here, and which could be: the cache's folders and the names that Baton knows.

It must not fetch or change anything; `store.py` does.
"""

from __future__ import annotations

from pathlib import Path

from model_store.cache import default_cache_dir
from model_store.store import MODELS

MB = 1_000_000  # as in `download_mb`


def list_models(cache_dir: Path | None = None) -> str:
    """Return a table of all models, by name. A folder in the cache is a whole one: it is renamed last."""
    rows = {
        name: (name, f"{model.download_mb} MB", "not downloaded", f"(baton models pull {name})")
        for name, model in MODELS.items()
    }
    # A name with a dot before it is work in progress.
    for config in (cache_dir or default_cache_dir()).glob("[!.]*/config.json"):
        folder = config.parent
        size_mb = round(sum(path.stat().st_size for path in folder.iterdir()) / MB)
        rows[folder.name] = (folder.name, f"{size_mb} MB", "converted", str(folder))
    table = [("NAME", "SIZE", "STATE", "PATH"), *(row for _, row in sorted(rows.items()))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        f"{name:<{widths[0]}}  {size:>{widths[1]}}  {state:<{widths[2]}}  {path}"
        for name, size, state, path in table
    )
