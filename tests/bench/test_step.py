"""`baton bench step` on a tiny model: every figure is there, and what it times is what it says."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from benchmarks import step
from benchmarks.device_profile import HOST_GAP_NS, Activity, usage_of
from benchmarks.engine_runs import (
    GREEDY,
    WARM_STEPS,
    check_context,
    decode,
    prebuilt_ms,
    prefill_s,
    tokens_needed,
)
from benchmarks.local_node import load_local
from benchmarks.parts import Parts
from benchmarks.report import Report
from benchmarks.targets import Targets
from common.engine.batch import ForwardMode, ScheduleBatch
from common.engine.loader import Engine
from common.errors import ConfigError
from common.model.spec import load_spec
from tests.bench.test_benchmarks import names, run
from tests.tiny import write_tiny_model

CONTEXT, STEPS = 64, 6
SMALL = ("--context", str(CONTEXT), "--steps", str(STEPS), "--prebuilt", "10,100", "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: Path) -> Engine:
    max_len = tokens_needed(CONTEXT, STEPS)
    return load_local(folder, "float32", num_requests=3, max_len=max_len, prefill_budget=32)


@pytest.fixture
def launched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[ScheduleBatch]:
    """The batches that the engine was given."""
    return watch(engine, monkeypatch)


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[ScheduleBatch]:
    """Return a list that gets the batches that the engine is given."""
    batches = []
    forward: Callable[[ScheduleBatch], Any] = engine.runner.forward

    def watched(batch: ScheduleBatch) -> Any:
        batches.append(batch)
        return forward(batch)

    monkeypatch.setattr(engine.runner, "forward", watched)
    return batches


def test_all_figures(folder: Path) -> None:
    record = run(step.main, str(folder), *SMALL, "--batch", "1,3", "--prefill", "20,150")
    expected = {"device copy, read + written", "matmul", "step of 1 with penalties / without"}
    expected |= {
        "PREBUILT of 10 tokens",
        "PREBUILT of 100 tokens",
        "PREBUILT, longest and shortest differ by",
    }
    for size in (1, 3):
        of = f"step of {size}"
        expected |= {of, f"{of} p99", f"{of}: share of the floor", f"{of}: bytes", f"{of}: read"}
        expected |= {f"{of} on the device", f"{of}: the device's share", f"host's work in a {of}"}
        expected |= {f"{part}, {of}" for part in ("plan", "launch", "process", "outbox")}
    for tokens in (20, 150):
        of = f"prefill of {tokens}"
        expected |= {of, f"{of}: tokens", f"{of}: operations", f"{of}: share of matmul"}
    assert expected <= set(names(record))
    zeros = {figure["name"] for figure in record["figures"] if figure["value"] <= 0}
    assert zeros <= {"parts that failed", "PREBUILT, longest and shortest differ by"}


def test_a_part_that_fails_is_told_of_and_the_others_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    parts = Parts(Targets.of(Report("parts", {}), [], []))
    with parts.part("bug"):
        raise KeyError("missing")
    with parts.part("no memory"):
        raise ConfigError("lower --batch")
    with parts.part("good"):
        parts.targets.add("count", 3, "requests")
    with pytest.raises(SystemExit, match="1"):
        parts.publish(save=False, label="")
    said = capsys.readouterr()
    assert "bug failed: \nTraceback" in said.err
    assert "\nno memory failed: lower --batch\nno memory: " in said.err
    values = {f["name"]: f["value"] for f in json.loads(said.out.splitlines()[-1])["figures"]}
    assert values == {"count": 3, "parts that failed": 2}
    assert re.search(r"^count +3 requests$", said.out, re.MULTILINE)  # a count is a whole number


# The model's 512 tokens are not to be passed by the last step, nor the prompt to be shorter than a token.
@pytest.mark.parametrize(("context", "steps"), [(499, 20), (20, 20), (300, 598), (600, 4)])
def test_a_context_that_the_middle_step_cannot_have_is_refused(
    folder: Path, context: int, steps: int
) -> None:
    options = ("--batch", "1", "--context", str(context), "--steps", str(steps), "--device", "cpu")
    result = CliRunner().invoke(step.main, [str(folder), *options])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(f"--context {context}: ")


@pytest.mark.parametrize(("context", "steps"), [(21, 20), (498, 20), (259, 496), (260, 496)])
def test_the_longest_and_shortest_context_are_what_the_middle_step_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch, context: int, steps: int
) -> None:
    check_context(context, steps, context_length=512)
    longest = tokens_needed(context, steps)
    engine = load_local(folder, "float32", num_requests=1, max_len=longest, prefill_budget=32)
    batches = watch(engine, monkeypatch)
    assert len(decode(engine, 1, context, steps).steps_s) == steps
    lengths = [batch.seq_lens[0] for batch in batches]
    assert lengths[WARM_STEPS + steps // 2 - 1] == context


def test_random_weights_are_announced_with_their_size(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    nothing = ("--batch", "", "--prefill", "", "--prebuilt", "")
    options = ("--load-format", "dummy", "--dtype", "float32", "--device", "cpu", *nothing)
    result = CliRunner().invoke(step.main, [str(tmp_path), *options])
    assert result.exit_code == 0
    assert result.stderr.startswith("making random weights: 0.0 GiB\n")


@pytest.mark.parametrize("overlap", [False, True])
def test_decode_times_the_batch_it_was_asked_for(
    engine: Engine, launched: list[ScheduleBatch], *, overlap: bool
) -> None:
    found = decode(replace(engine, overlap=overlap), 3, CONTEXT, STEPS)
    assert len(found.steps_s) == STEPS
    assert len(found.device_s) >= STEPS
    assert all(batch.mode is ForwardMode.DECODE for batch in launched)
    assert all(len(batch.req_pool_indices) == 3 for batch in launched)
    lengths = [batch.seq_lens[0] for batch in launched]
    assert lengths == list(range(lengths[0], lengths[0] + len(launched)))
    timed = lengths[-len(found.device_s) :][:STEPS]
    assert timed[0] <= CONTEXT <= timed[-1]


def test_prefill_computes_the_prompt_and_nothing_else(engine: Engine, launched: list[ScheduleBatch]) -> None:
    assert len(prefill_s(engine, 70, rounds=2)) == 2
    assert {batch.mode for batch in launched} == {ForwardMode.EXTEND}
    assert sum(batch.extend_num_tokens for batch in launched) == 3 * 70  # the first warms up


def test_prebuilt_launches_nothing(engine: Engine, launched: list[ScheduleBatch]) -> None:
    times_ms = prebuilt_ms(engine, (10, 60), rounds=4)
    assert [len(times_ms[length]) for length in (10, 60)] == [4, 4]
    assert launched == []


def test_runs_leave_nothing_behind(engine: Engine) -> None:
    decoder = engine.runner._decoder
    for _ in range(3):  # the rows and pages are enough for one at a time
        decode(engine, 3, CONTEXT, STEPS, replace(GREEDY, presence_penalty=1.0))
    assert engine.runner._decoder is decoder


def test_bytes_are_those_of_the_files(folder: Path, engine: Engine) -> None:
    tensors = load_file(folder / "model.safetensors")
    matrices = sum(t.nbytes for name, t in tensors.items() if t.dim() == 2 and "embed" not in name)
    key_values = 2 * 2 * 2 * 16 * 4  # of a token: layers, K and V, heads, size of a head, bytes
    assert step.step_bytes(engine, 3, CONTEXT) == matrices + 3 * CONTEXT * key_values


def test_operations_are_those_of_transformers(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(torch.tensor([list(range(3, 103))]), logits_to_keep=1)
    # It computes attention as if it were not causal: as much again.
    spec = load_spec(folder)
    causal = 2 * 100**2 * spec.heads * spec.head_dim * spec.layers
    rotary = counter.get_total_flops() - causal - step.prefill_flops(spec, 100)
    assert 0 <= rotary < 0.01 * counter.get_total_flops()


def test_gaps_of_the_host_are_told_from_the_gpu_s_own() -> None:
    # 100 kernels of 9 us with 1 us between, and in the middle nothing for 100 us.
    kernels = [Activity("k", at * 10_000, at * 10_000 + 9_000) for at in range(100)]
    assert usage_of(kernels).working == pytest.approx(0.9, abs=0.01)
    assert usage_of(kernels).busy == 1.0
    late = [replace(k, start_ns=k.start_ns + 100_000, end_ns=k.end_ns + 100_000) for k in kernels[50:]]
    found = usage_of(kernels[:50] + late)
    assert found.longest_gap_ns == 101_000 > HOST_GAP_NS
    assert found.busy == pytest.approx(1 - 101 / (0.8 * 1099), abs=0.001)


def test_overlapping_kernels_count_once() -> None:
    kernels = [Activity("a", 0, 100_000), Activity("b", 10_000, 20_000), Activity("c", 50_000, 100_000)]
    assert usage_of(kernels).working == 1.0


def test_nothing_on_the_gpu_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing"):
        usage_of([])
