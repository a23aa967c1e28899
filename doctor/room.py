"""Where nodes run, and whether the model finds room there: what `engine/sizing.py` will say, beforehand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from common.config import EngineConfig, replace
from common.errors import ConfigError
from common.model.spec import ModelSpec
from common.supervision.gpu_plan import GpuShare
from common.supervision.serve import ServeConfig, place_nodes
from common.supervision.small_machine import available_cores, num_threads
from doctor.asked import Asked, Check
from doctor.finding import Finding, ok, problem, warning
from doctor.gpus import Gpu, read_gpus, usable_gpus
from doctor.machine import GIB
from doctor.model import KnownModel, known_model

# What a process takes beside weights and pool: Python, torch, transformers, xgrammar; measured, rounded up.
NODE_BYTES, GATEWAY_BYTES = GIB // 2, GIB // 2


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that nodes want: at once, and once all pages have been used."""

    least_bytes: int
    most_bytes: int
    pool_tokens: int  # of the smallest pool


def cpu_need(config: ServeConfig, model: KnownModel, available_bytes: int) -> Need:
    """Return what a server takes of a CPU's memory."""
    from common.engine.sizing import cpu_num_pages, weight_bytes
    from common.kv.layout import DTYPE_BYTES

    spec, num_nodes = model.spec, len(config.node_names)
    engine = replace(config.engine, local_nodes=config.engine.local_nodes or num_nodes)
    layout = spec.kv_layout(engine.page_size, model.dtype)
    num_pages = cpu_num_pages(engine, layout, available_bytes)
    weights = weight_bytes(spec, model.dtype)
    if spec.tie_word_embeddings:  # they are there as a table, and packed for the output
        weights += spec.vocab_size * spec.hidden * DTYPE_BYTES[model.dtype]
    gateways = config.supervisor.gateway_workers * GATEWAY_BYTES
    least = num_nodes * (weights + NODE_BYTES) + gateways
    pools = num_nodes * (num_pages + 1) * layout.page_bytes
    return Need(least, least + pools, num_pages * layout.page_size)


def judge_cpu_room(need: Need, available_bytes: int, context_tokens: int) -> Finding:
    """Hold what a server takes against what there is."""
    available, least, most = (size / GIB for size in (available_bytes, need.least_bytes, need.most_bytes))
    found = (
        f"weights and processes take about {least:.1f} GiB, with full KV pools {most:.1f}, of "
        f"{available:.1f} that "
        f"are available; each pool holds {need.pool_tokens} tokens"
    )
    facts = {"need_bytes": need.most_bytes, "pool_tokens": need.pool_tokens}
    if need.least_bytes > available_bytes:
        return problem(
            found, "take a smaller model, one node (--colocated), or a machine with more memory", **facts
        )
    if need.most_bytes > available_bytes:
        return warning(
            f"{found}: under load a node would be killed for want of memory",
            "lower --kv-pages, start fewer nodes, or free memory",
            **facts,
        )
    return _with_context(found, need.pool_tokens, context_tokens, facts)


def _with_context(found: str, pool_tokens: int, context_tokens: int, facts: dict[str, int]) -> Finding:
    if pool_tokens < context_tokens:
        return warning(
            f"{found}: fewer than the model's context of {context_tokens}, so longer requests are refused",
            "raise --kv-pages, or on a GPU --gpu-memory-fraction",
            **facts,
        )
    return ok(found, **facts)


def sizes_of_steps(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: str,
    device: str,
    part_bytes: int,
    *,
    prefills: bool,
    decodes: bool,
) -> tuple[int, int, int]:
    """Return tokens, samples and rows of a node's largest step, as `engine/loader.py` makes them.

    Args:
        device: "cpu" or "cuda".
        part_bytes: of a GPU's memory, for this node.
    """
    import torch

    from common.engine.attention_choice import captures_graphs, choose_attention
    from common.engine.chunking import SATURATING_TOKENS, resolve_max_running, resolve_prefill_budget
    from common.engine.cuda_graphs import NO_GRAPHS, GraphSizes, decode_sizes, extend_sizes
    from common.engine.prompt_logprobs import SLICE_TOKENS
    from common.engine.sizing import gpu_prefill_budget
    from common.request import MAX_CHOICES

    budget, max_running = resolve_prefill_budget(config, device), resolve_max_running(config, device)
    if device == "cuda" and config.prefill_budget is None:
        budget = gpu_prefill_budget(spec, dtype, budget, part_bytes, config.page_size)
    if not prefills:
        budget = max(min(budget, SATURATING_TOKENS), config.page_size)
    backend = choose_attention(config, spec, dtype, torch.device(device), prefills=prefills)
    captured = NO_GRAPHS
    if captures_graphs(config, backend):
        captured = GraphSizes(
            decode=decode_sizes(max_running) if decodes else (),
            extend=extend_sizes(budget, spec.context_length) if prefills else (),
        )
    tokens = budget + (max_running if decodes else 0) + captured.most_tokens
    samples = max(max_running, SLICE_TOKENS if prefills else 0)
    if prefills and decodes:
        samples = max(samples, max_running + MAX_CHOICES)
    return tokens, samples, 2 * max_running if decodes else max_running


def judge_gpu_room(config: ServeConfig, model: KnownModel, name: str, share: GpuShare, gpu: Gpu) -> Finding:
    """Say how large a node's pool gets on its GPU."""
    from common.engine.sizing import StepSizes, gpu_num_pages, step_bytes, weight_bytes

    engine = replace(config.engine, gpu=share.gpu, gpu_memory_fraction=share.memory_fraction)
    spec, dtype = model.spec, model.dtype
    layout = spec.kv_layout(engine.page_size, dtype)
    duties = {
        "prefills": name.startswith("prefill") or config.decode.colocated,
        "decodes": name.startswith("decode"),
    }
    part = int(gpu.total_bytes * share.memory_fraction)
    tokens, samples, rows = sizes_of_steps(engine, spec, dtype, "cuda", part, **duties)
    weights = weight_bytes(spec, dtype)
    try:
        num_pages = gpu_num_pages(
            engine,
            layout,
            total_bytes=gpu.total_bytes,
            free_bytes=gpu.free_bytes - weights,
            weight_bytes=weights,
            beside_bytes=step_bytes(spec, dtype, StepSizes(tokens, samples, rows), engine.page_size),
        )
    except ConfigError as error:
        return problem(f"{name}: {error}", "do what the message says, or take a smaller model")
    pool_tokens = num_pages * engine.page_size
    found = (
        f"{name} on GPU {gpu.index}: weights {weights / GIB:.1f} GiB, and a KV pool of "
        f"{num_pages * layout.page_bytes / GIB:.1f} GiB that holds {pool_tokens} tokens"
    )
    return _with_context(
        found, pool_tokens, spec.context_length, {"gpu": gpu.index, "pool_tokens": pool_tokens}
    )


def describe_places(config: ServeConfig, shares: Mapping[str, GpuShare], cores: int) -> str:
    """Say where each node runs."""
    if shares:
        return ", ".join(
            f"{name} on GPU {share.gpu} with {share.memory_fraction:g} of its memory"
            for name, share in shares.items()
        )
    counted = Counter(name.partition("-")[0] for name in config.node_names)
    nodes = " and ".join(f"{count} {role} node{'s' * (count > 1)}" for role, count in counted.items())
    local_nodes = config.engine.local_nodes or len(config.node_names)
    threads = num_threads(cores, local_nodes, colocated=config.decode.colocated)
    return f"{nodes} on the CPU, {threads} thread{'s' * (threads > 1)} each"


def _nodes(asked: Asked) -> Iterator[Finding]:
    from common.gpus import count_gpus

    config = asked.config
    try:
        shares = place_nodes(config, count_gpus(config.engine))
    except ConfigError as error:
        yield problem(str(error), "change the option that it names")
        return
    yield ok(describe_places(config, shares, available_cores()))


def _room(asked: Asked) -> Iterator[Finding]:
    model = known_model(asked)
    if model is None:
        return
    num_gpus = usable_gpus(asked)
    if num_gpus == 0:
        from common.kv.pool import available_memory_bytes

        available = available_memory_bytes()
        yield judge_cpu_room(cpu_need(asked.config, model, available), available, model.spec.context_length)
        return
    try:
        shares = place_nodes(asked.config, num_gpus)
    except ConfigError:
        return  # the check `nodes` says it
    gpus = {gpu.index: gpu for gpu in read_gpus(num_gpus)}
    for name, share in shares.items():
        yield judge_gpu_room(asked.config, model, name, share, gpus[share.gpu])


CHECKS = (
    Check(
        "nodes",
        "Where each node runs, by the options: the GPU and its part of the memory, or the threads on the "
        "CPU.",
        "",
        "The options do not go together, or not with the GPUs that there are.",
        _nodes,
        limit_s=60.0,
    ),
    Check(
        "room",
        "What weights, KV pools and processes take, against the memory that is free; how many tokens a pool "
        "holds.",
        "With full pools the memory would not do, or a pool is smaller than the model's context.",
        "The model does not fit.",
        _room,
        limit_s=60.0,
    ),
)
