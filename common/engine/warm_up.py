"""Steps to run before the first request: kernels are built, and the memory that a step needs is taken.

All of them are of row 0 and page 0, the padding, so that they leave nothing behind. Plain host values.
"""

from __future__ import annotations

from array import array
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
    prefix: int, tokens: int, page_size: int, sampling: SamplingParams = EVERYTHING
) -> ScheduleBatch:
    """One prompt's chunk."""
    end = prefix + tokens
    return ScheduleBatch(
        mode=ForwardMode.EXTEND,
        page_size=page_size,
        req_pool_indices=(0,),
        seq_lens=(end,),
        prefix_lens=(prefix,),
        extend_lens=(tokens,),
        extend_num_tokens=tokens,
        page_ids=((0,) * -(-end // page_size),),
        sample_rows=(SampleRow(0, sampling, end, may_stop=True),),
        prefill_input_ids_cpu=(memoryview(array("i", bytes(4 * tokens))),),
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
    extend, decode = extend_batch(0, tokens, page_size), decode_batch(1, page_size, GREEDY)
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
