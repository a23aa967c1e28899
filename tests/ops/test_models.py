"""`baton models`: what is listed."""

from __future__ import annotations

from pathlib import Path

from model_store.listing import list_models

NAME = "smollm2-135m"


def write_model(folder: Path, size_bytes: int) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\0" * size_bytes)


def rows(cache: Path) -> list[list[str]]:
    return [line.split(maxsplit=3) for line in list_models(cache).splitlines()]


def test_model_that_is_not_here_is_listed_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    head, row = list_models(tmp_path / "none").splitlines()
    assert head.split() == ["NAME", "SIZE", "STATE", "PATH"]
    assert row.split(maxsplit=3)[:3] == [NAME, "98", "MB"]
    assert "not downloaded" in row
    assert row.endswith(f"(baton models pull {NAME})")


def test_models_in_the_cache_are_listed_by_name_with_size_and_folder(tmp_path: Path) -> None:
    write_model(tmp_path / NAME, 3_000_000)
    write_model(tmp_path / "another", 2_000_000)
    assert rows(tmp_path)[1:] == [
        ["another", "2", "MB", f"converted  {tmp_path}/another"],
        [NAME, "3", "MB", f"converted  {tmp_path}/{NAME}"],
    ]


def test_work_in_progress_is_no_model(tmp_path: Path) -> None:
    write_model(tmp_path / f".{NAME}.abc" / "model", 10)
    write_model(tmp_path / ".hidden", 10)
    (tmp_path / f"{NAME}.lock").touch()
    assert [row[0] for row in rows(tmp_path)] == ["NAME", NAME]
    assert "not downloaded" in list_models(tmp_path)
