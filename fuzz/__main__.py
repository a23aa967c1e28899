"""`python -m fuzz TARGET`: run so many inputs, and say how many different things were seen.

Guided by atheris where it is installed (`pip install -e ".[fuzz]"`), else by mutation alone. An input that
made something happen that must not is written to a file and named, and the exit status is 1. `--save` keeps
what is new in `fuzz/corpus`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from fuzz import corpus
from fuzz.plain import Found, begin
from fuzz.targets import TARGETS

MOST_KEPT_BYTES = 30_000  # a target
_ENV = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}


def _plain(name: str, runs: int, seed: int, *, save: bool) -> dict[str, Any]:
    target = TARGETS[name]()
    run = begin(target, corpus.load(name))
    try:
        done = run.go_on(runs, random.Random(seed))
    except Found as found:
        path = Path(f"fuzz-{name}-{seed}.found")
        path.write_bytes(found.data)
        click.echo(f"found something: {path}")
        raise
    finally:
        if save:
            corpus.keep(name, run.firsts.values(), target.run, most_bytes=MOST_KEPT_BYTES)
    return {"runs": done, "outcomes": len(run.firsts)}


def _guided(name: str, runs: int, seed: int, *, save: bool, jobs: int) -> dict[str, Any]:
    target = TARGETS[name]()
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder)
        for number, data in enumerate((*target.seeds, *corpus.load(name))):
            (found / f"seed-{number}").write_bytes(data)
        command = [sys.executable, "-m", "fuzz.guided", name]
        children = [
            subprocess.Popen(
                [*command, f"-runs={runs // jobs}", f"-seed={seed + job}", "-print_final_stats=1",
                 "-verbosity=1", "-timeout=60", f"-artifact_prefix=fuzz-{name}-{seed}-", found],
                stderr=subprocess.PIPE, text=True, env=os.environ | _ENV,
            )
            for job in range(jobs)
        ]  # fmt: skip
        said = [child.communicate()[1] for child in children]
        if any(child.returncode for child in children):
            raise click.ClickException("\n".join(text[-4000:] for text in said))
        inputs = [path.read_bytes() for path in found.iterdir()]
        if save:
            corpus.keep(name, inputs, target.run, most_bytes=MOST_KEPT_BYTES)
        covered = [int(number) for text in said for number in re.findall(r" cov: (\d+)", text)]
        return {"runs": runs // jobs * jobs, "inputs": len(inputs), "coverage": max(covered)}


@click.command()
@click.argument("target", type=click.Choice(list(TARGETS)))
@click.option("--runs", type=int, default=100_000, show_default=True, help="Inputs to run.")
@click.option("--seed", type=int, default=1, show_default=True, help="The same gives the same inputs again.")
@click.option("--jobs", type=int, default=1, show_default=True, help="Processes, where guided.")
@click.option("--plain", is_flag=True, help="Without atheris, though it is there.")
@click.option("--save", is_flag=True, help="Keep what is new in fuzz/corpus.")
def main(target: str, runs: int, seed: int, jobs: int, plain: bool, save: bool) -> None:
    """Fuzz a target."""
    guided = not plain and importlib.util.find_spec("atheris") is not None
    start = time.monotonic()
    if guided:
        facts = _guided(target, runs, seed, save=save, jobs=jobs)
    else:
        facts = _plain(target, runs, seed, save=save)
    took_s = time.monotonic() - start
    facts |= {"target": target, "guided": guided, "seed": seed, "seconds": round(took_s, 1)}
    click.echo(json.dumps(facts))


if __name__ == "__main__":
    main()
