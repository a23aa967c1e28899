"""Bring a model up on this node: turn every "auto" into a value, load, size the pool, make the runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import EngineConfig, ModelConfig
from common.device.memory import free_and_total_bytes, wait_for_memory
from common.device.streams import Streams
from common.engine.attention_choice import captures_graphs, choose_attention, fell_back, make_attention
from common.engine.chunking import SATURATING_TOKENS, resolve_max_running, resolve_prefill_budget
from common.engine.cuda_graphs import NO_GRAPHS, GraphSizes, decode_sizes, extend_sizes
from common.engine.grammar_compiler import GrammarCompiler
from common.engine.model_runner import ModelRunner
from common.engine.prompt_logprobs import SLICE_TOKENS
from common.engine.sizing import (
    StepSizes,
    cpu_num_pages,
    gpu_num_pages,
    gpu_prefill_budget,
    step_bytes,
    weight_bytes,
)
from common.engine.warm_up import largest_steps
from common.errors import ConfigError
from common.gpus import node_gpu
from common.kv.layout import KVLayout
from common.kv.pool import KVPool, available_memory_bytes
from common.model.decoder import make_decoder, read_weights
from common.model.spec import ModelSpec, load_spec, resolve_dtype
from common.request import MAX_CHOICES

log = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model and the values that "auto" became."""

    spec: ModelSpec
    layout: KVLayout
    pool: KVPool
    streams: Streams
    runner: ModelRunner
    grammars: GrammarCompiler
    num_rows: int
    max_running: int
    prefill_budget: int  # tokens a batch; of a decode node: of requests that were retracted
    overlap: bool
    attention_fell_back: bool  # "auto" became what is not the fastest, and the log says why


@dataclass(frozen=True, slots=True)
class Duties:
    """What a node does with the model."""

    prefills: bool = True
    decodes: bool = True
    shares_pool: bool = False  # a process on this host may map the pool


@contextmanager
def _stage(name: str) -> Iterator[None]:
    """Say how long a stage of the start took."""
    started_s = time.monotonic()
    yield
    log.info("%s: %.1f s", name, time.monotonic() - started_s)


def load_engine(folder: Path, model: ModelConfig, config: EngineConfig, duties: Duties = Duties()) -> Engine:
    """Load the model of a folder onto this node's device.

    Raises:
        ConfigError: the model or a setting does not work here.
    """
    try:
        return _load(folder, model, config, duties)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU's memory is too small while the model is loaded ({str(error).splitlines()[0]}): lower "
            "--gpu-memory-fraction, --prefill-budget or --max-running"
        ) from error


def _load(folder: Path, model: ModelConfig, config: EngineConfig, duties: Duties) -> Engine:
    gpu = node_gpu(config)
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    budget = resolve_prefill_budget(config, device.type)
    max_running = resolve_max_running(config, device.type)
    spec = load_spec(folder, model.load_format)
    dtype = resolve_dtype(model.dtype, spec, on_gpu=on_gpu)
    layout = spec.kv_layout(config.page_size, dtype)
    if on_gpu and config.prefill_budget is None:
        part_bytes = int(free_and_total_bytes(device)[1] * config.gpu_memory_fraction)
        budget = gpu_prefill_budget(spec, dtype, budget, part_bytes, config.page_size)
    if not duties.prefills:  # only what was retracted is computed here, beside what decodes
        budget = max(min(budget, SATURATING_TOKENS), config.page_size)
    # A decode node has requests that run, and as many whose pages are on their way.
    num_rows = 2 * max_running if duties.decodes else max_running
    backend = choose_attention(config, spec, dtype, device, prefills=duties.prefills)
    captured = NO_GRAPHS
    if captures_graphs(config, backend):
        captured = GraphSizes(
            decode=decode_sizes(max_running) if duties.decodes else (),
            extend=extend_sizes(budget, spec.context_length) if duties.prefills else (),
        )
    # A step of prompts beside requests that decode has both; what graphs work in is theirs alone.
    tokens = budget + (max_running if duties.decodes else 0) + captured.most_tokens
    samples = max(max_running, SLICE_TOKENS if duties.prefills else 0)
    if duties.prefills and duties.decodes:
        samples = max(samples, max_running + MAX_CHOICES)  # the first of a prompt, beside those that decode
    sizes = StepSizes(tokens=tokens, samples=samples, rows=num_rows)
    beside_bytes = step_bytes(spec, dtype, sizes, config.page_size)
    if on_gpu:
        _await_memory(config, layout, device, weight_bytes(spec, dtype), beside_bytes)
    with _stage(f"weights of {folder.name} as {dtype}"):
        weights = read_weights(folder, spec, dtype, device, model.load_format)
        if on_gpu:
            torch.cuda.synchronize(device)
    pool = _make_pool(config, layout, device, beside_bytes, duties)
    streams = Streams(device)
    attention = make_attention(backend, pool, spec.heads, max_running)
    runner = ModelRunner(
        make_decoder(spec, weights, dtype, pool, attention, fused=on_gpu),
        spec.eos_token_ids,
        num_rows=num_rows,
        max_pages=layout.pages_for(spec.context_length),
        pages=pool.pages,
        streams=streams,
        graph_sizes=captured,
        debug=config.debug_checks,
    )
    if on_gpu:
        with _stage("largest steps, and kernels that had to be built"):
            runner.warm_up(
                largest_steps(
                    decodes=duties.decodes,
                    budget=budget,
                    max_running=max_running,
                    context_length=spec.context_length,
                    page_size=config.page_size,
                )
            )
    log.info(
        "loaded %s as %s on %s: %d pages of %d tokens (%d MiB), %d tokens a prefill batch, attention %s",
        folder.name,
        dtype,
        _device_name(device),
        pool.num_pages,
        layout.page_size,
        pool.num_pages * layout.page_bytes >> 20,
        budget,
        backend,
    )
    return Engine(
        spec=spec,
        layout=layout,
        pool=pool,
        streams=streams,
        runner=runner,
        grammars=GrammarCompiler(folder, spec.vocab_size, spec.eos_token_ids),
        num_rows=num_rows,
        max_running=max_running,
        prefill_budget=budget,
        overlap=on_gpu if config.overlap == "auto" else config.overlap == "on",
        attention_fell_back=fell_back(config, backend, device, prefills=duties.prefills),
    )


def _make_pool(
    config: EngineConfig, layout: KVLayout, device: torch.device, beside_bytes: int, duties: Duties
) -> KVPool:
    if device.type == "cpu":
        num_pages = cpu_num_pages(config, layout, available_memory_bytes())
        return KVPool(layout, num_pages, device, shared=duties.shares_pool)
    free_bytes, total_bytes = free_and_total_bytes(device)
    num_pages = gpu_num_pages(
        config,
        layout,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        weight_bytes=torch.cuda.memory_reserved(device),
        beside_bytes=beside_bytes,
    )
    return KVPool(layout, num_pages, device, shared=duties.shares_pool)


def _await_memory(
    config: EngineConfig, layout: KVLayout, device: torch.device, weight_bytes: int, beside_bytes: int
) -> None:
    """Wait until this node's part of the GPU is free: what a node that died here had comes back late.

    Raises:
        ConfigError: what is free in the end does not do.
    """
    _, total_bytes = free_and_total_bytes(device)
    wanted = int(total_bytes * config.gpu_memory_fraction)
    if config.kv_pages is not None:
        wanted = weight_bytes + beside_bytes + (config.kv_pages + 1) * layout.page_bytes
    free_bytes = wait_for_memory(device, wanted)
    gpu_num_pages(
        config,
        layout,
        total_bytes=total_bytes,
        free_bytes=free_bytes - weight_bytes,
        weight_bytes=weight_bytes,
        beside_bytes=beside_bytes,
    )


def _device_name(device: torch.device) -> str:
    return (
        f"GPU {device.index} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "the CPU"
    )
