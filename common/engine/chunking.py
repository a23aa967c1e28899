"""Cut prompts into chunks under a token budget: several prompts in one batch, in order.

A chunk ends on a page boundary, except the last of its prompt, so that its pages are final when it is
computed and can be sent. Pure; used by a prefill node, and by a decode node that prefills by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.config import EngineConfig
from common.errors import ConfigError
from common.request import PrefillStamps, Request

CPU_PREFILL_BUDGET, GPU_PREFILL_BUDGET = 128, 16384
# With so many tokens a batch computes at full speed (H200, products of Llama-3.1-8B: 775 TFLOP/s at 2,048
# tokens, about 700 at 8,192, where the card's power is the limit). A CPU's budget is below it.
SATURATING_TOKENS = 2048
CPU_MAX_RUNNING, GPU_MAX_RUNNING = 64, 256


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Tokens `start` to `end` of a prompt, and the pages that they fill: fixed when it is scheduled.

    By the time the result is processed the request has moved on, so nobody may ask the request instead.
    """

    request: Request
    start: int
    end: int
    is_last: bool
    samples: bool  # the last chunk brings a token, unless it was brought before a retraction
    first_page: int  # logical index of page_ids[0]
    page_ids: tuple[int, ...]


def plan_chunks(
    requests: Iterable[Request], budget: int, page_size: int, *, max_samples: int | None = None
) -> tuple[ChunkPlan, ...]:
    """Plan one batch of at most `budget` tokens (not below the page size), first come, first served.

    The first prompt may fill the batch. Others share it only until it keeps the device busy: what is beyond
    that would make the ones before wait, and be no faster. (Two long prompts one after the other take as long
    as in one batch, and the first of them half of it.)

    Each choice of a prompt is sampled: of all together at most `max_samples`, unless the first has more.
    """
    chunks: list[ChunkPlan] = []
    room = budget
    num_samples = 0
    for request in requests:
        start, left = request.computed_len, request.fill_len - request.computed_len
        num_samples += request.sampling.num_choices
        if chunks and max_samples is not None and num_samples > max_samples:
            break
        if chunks and left > room and budget > SATURATING_TOKENS:
            break  # in one piece, and without a prefix, it is computed faster: in a batch of its own
        size = min(left, room)
        if size < left:
            size -= size % page_size
        if size <= 0:
            break
        end = start + size
        first_page, end_page = start // page_size, -(-end // page_size)
        chunks.append(
            ChunkPlan(
                request=request,
                start=start,
                end=end,
                is_last=size == left,
                samples=size == left and request.resumed_ids is None,
                first_page=first_page,
                page_ids=request.page_ids[first_page:end_page],
            )
        )
        room = min(room, SATURATING_TOKENS) - size
    return tuple(chunks)


def advance(chunks: Iterable[ChunkPlan], now: float) -> None:
    """Count what was planned as launched. After `prepare_for_extend`, which reads the lengths before."""
    for chunk in chunks:
        if chunk.start == 0 and chunk.request.resumed_ids is None:
            chunk.request.prefill = PrefillStamps(now)
        chunk.request.computed_len = chunk.end
        if chunk.samples:
            chunk.request.num_sampled += 1


def note_done(chunks: Iterable[ChunkPlan], now: float) -> None:
    """Note when chunks were done, unless they are computed again, after a retraction."""
    for chunk in chunks:
        if chunk.request.resumed_ids is None:
            chunk.request.prefill = chunk.request.prefill.with_chunk(now)


def resolve_prefill_budget(config: EngineConfig, device_type: str) -> int:
    """Tokens in one EXTEND batch; `device_type` is "cpu" or "cuda".

    Raises:
        ConfigError: a budget below the page size: no chunk could end on a page boundary.
    """
    if config.prefill_budget is None:
        return max(CPU_PREFILL_BUDGET if device_type == "cpu" else GPU_PREFILL_BUDGET, config.page_size)
    if config.prefill_budget < config.page_size:
        raise ConfigError(
            f"--prefill-budget {config.prefill_budget} is below --page-size {config.page_size}: "
            "a chunk must hold a page"
        )
    return config.prefill_budget


def resolve_max_running(config: EngineConfig, device_type: str) -> int:
    """Requests that decode together at the most; `device_type` is "cpu" or "cuda"."""
    return config.max_running or (CPU_MAX_RUNNING if device_type == "cpu" else GPU_MAX_RUNNING)
