"""Steps to run before the first request: kernels are built, and the memory that a step needs is taken.

All of them are of row 0 and page 0, the padding, so that they leave nothing behind. Plain host values.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from common.engine.batch import ForwardMode, SampleRow, ScheduleBatch
from common.request import MAX_LOGPROBS, SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
# What takes most memory in the sampler.
EVERYTHING = SamplingParams(
    max_tokens=1,
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    num_logprobs=MAX_LOGPROBS,
)


def extend_batch(
    prefix: int, tokens: Sequence[int], page_size: int, sampling: SamplingParams = EVERYTHING
) -> ScheduleBatch:
    """Chunks of prompts, of so many tokens each, all behind a prefix of one length."""
    prompts = len(tokens)
    ends = tuple(prefix + length for length in tokens)
    return ScheduleBatch(
        mode=ForwardMode.EXTEND,
        page_size=page_size,
        req_pool_indices=(0,) * prompts,
        seq_lens=ends,
        prefix_lens=(prefix,) * prompts,
        extend_lens=tuple(tokens),
        extend_num_tokens=sum(tokens),
        page_ids=tuple((0,) * -(-end // page_size) for end in ends),
        sample_rows=tuple(SampleRow(i, sampling, end, may_stop=True) for i, end in enumerate(ends)),
        prefill_input_ids_cpu=tuple(memoryview(array("i", bytes(4 * length))) for length in tokens),
    )


def decode_batch(requests: int, page_size: int, sampling: SamplingParams = EVERYTHING) -> ScheduleBatch:
    """One token of each of so many requests."""
    return ScheduleBatch(
        mode=ForwardMode.DECODE,
        page_size=page_size,
        req_pool_indices=(0,) * requests,
        seq_lens=(1,) * requests,
        prefix_lens=(0,) * requests,
        extend_lens=(1,) * requests,
        extend_num_tokens=requests,
        page_ids=((0,),) * requests,
        sample_rows=tuple(SampleRow(i, sampling, 1, may_stop=True) for i in range(requests)),
    )


def mixed_batch(tokens: int, page_size: int) -> ScheduleBatch:
    """One prompt, beside one token of another request."""
    extend, decode = extend_batch(0, (tokens,), page_size), decode_batch(1, page_size, GREEDY)
    return replace(
        extend,
        mode=ForwardMode.MIXED,
        req_pool_indices=(0, 0),
        seq_lens=extend.seq_lens + decode.seq_lens,
        prefix_lens=extend.prefix_lens + decode.prefix_lens,
        extend_lens=extend.extend_lens + decode.extend_lens,
        extend_num_tokens=extend.extend_num_tokens + 1,
        page_ids=extend.page_ids + decode.page_ids,
        sample_rows=(*extend.sample_rows, replace(decode.sample_rows[0], index=1)),
        mix_running_indices=(0,),
    )


def largest_steps(
    *, decodes: bool, budget: int, max_running: int, context_length: int, page_size: int
) -> list[ScheduleBatch]:
    """Return steps that reach every kernel that serving will, and take as much memory as any.

    Args:
        decodes: whether requests decode here.
        budget: prompt tokens of a step; a decode node computes at least what it retracted.
        max_running: requests that decode together.
        context_length: tokens of the longest request.
        page_size: tokens of a page.
    """
    page = min(page_size, context_length)
    full = _share(budget, context_length, max_running)
    steps = [extend_batch(0, full, page_size), extend_batch(0, (page,), page_size)]
    # A prefix, short and long, takes kernels of its own.
    behind = _share(budget, context_length - page, max_running)
    far = (context_length - page) // page_size * page_size
    steps += [extend_batch(page_size, behind, page_size)] if behind and page == page_size else []
    steps += [extend_batch(far, (page,), page_size)] if far > 0 else []
    if decodes:
        steps += [decode_batch(max_running, page_size, GREEDY), decode_batch(max_running, page_size)]
        steps.append(mixed_batch(page, page_size))
    return steps


def _share(tokens: int, most: int, prompts: int) -> tuple[int, ...]:
    """Cut so many tokens into so many prompts at most, each of `most` tokens at most."""
    if most <= 0:
        return ()
    whole = min(tokens // most, prompts)
    rest = tokens - whole * most
    return (most,) * whole + ((min(rest, most),) if rest and whole < prompts else ())
