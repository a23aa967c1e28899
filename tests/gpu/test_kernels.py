"""Every kernel against plain operations in higher precision."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from common.attention.blocks import pack_blocks
from common.attention.splits import SPLIT_UNIT_TOKENS, pack_splits
from common.device.packed import PackedBlock
from common.model.rotary import rope_frequencies, rope_table, rotate

pytest.importorskip("triton")

from common.engine.batch import SampleRow
from common.engine.penalties import PenaltyState, resolve_penalties
from common.kernels.activation import silu_mul
from common.kernels.argmax import argmax
from common.kernels.decode_attention import DecodeWorkspace, attend_decode
from common.kernels.extend_attention import attend_extend, queries_per_block
from common.kernels.norm import add_rms_norm, rms_norm
from common.kernels.rotary import rotate_append
from common.kernels.skinny import can_multiply, gated, product
from common.messages import int32s
from common.request import Request, SamplingParams

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A unit in the last place of each type near 4, the largest that the inputs below give.
LAST_PLACE = {torch.float32: 5e-6, torch.bfloat16: 0.04, torch.float16: 0.005}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [96, 576, 4096])
def test_norms(gpu: torch.device, dtype: torch.dtype, width: int) -> None:
    x, residual = torch.randn(2, 33, width, dtype=dtype, device=gpu)
    weight = torch.rand(width, dtype=dtype, device=gpu)
    total = residual + x
    close = {"rtol": 0.0, "atol": LAST_PLACE[dtype]}
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (width,), weight, 1e-5), **close)
    summed = residual.clone()
    normed = add_rms_norm(x, summed, weight, 1e-5)
    assert torch.equal(summed, total)
    torch.testing.assert_close(normed, F.rms_norm(total, (width,), weight, 1e-5), **close)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activation(gpu: torch.device, dtype: torch.dtype) -> None:
    gate_up = torch.randn(17, 2 * 1536, dtype=dtype, device=gpu)
    gate, up = gate_up.chunk(2, -1)
    expected = F.silu(gate) * up
    torch.testing.assert_close(silu_mul(gate_up), expected, rtol=0.0, atol=LAST_PLACE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128), (7, 1, 80)])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_and_append(
    gpu: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, normed: bool
) -> None:
    tokens, page = 29, 16
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, device=gpu)
    table = rope_table(rope_frequencies(head_dim, 1e4, None), 512, dtype).to(gpu)
    positions = torch.randint(0, 512, (tokens,), device=gpu)
    loc = torch.randperm(20 * page, device=gpu)[:tokens] + page
    norms = (torch.rand(head_dim, dtype=dtype, device=gpu), torch.rand(head_dim, dtype=dtype, device=gpu))
    pool = torch.zeros(21, 2, page, kv_heads, head_dim, dtype=dtype, device=gpu)
    q, k = rotate_append(
        qkv.view(tokens, -1),
        table,
        positions,
        loc,
        pool,
        norms if normed else None,
        1e-5,
        heads,
        keep_k=True,
    )
    want_q, want_k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    if normed:
        want_q, want_k = (
            F.rms_norm(x, (head_dim,), w, 1e-5) for x, w in zip((want_q, want_k), norms, strict=True)
        )
    cos, sin = table[positions].unsqueeze(2).unbind(1)
    close = {"rtol": 0.0, "atol": LAST_PLACE[dtype]}
    torch.testing.assert_close(q, rotate(want_q, cos, sin), **close)
    assert k is not None
    torch.testing.assert_close(k, rotate(want_k, cos, sin), **close)
    want_pool = torch.zeros_like(pool)
    want_pool[loc // page, 0, loc % page] = k
    want_pool[loc // page, 1, loc % page] = v
    assert torch.equal(pool, want_pool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128), (28, 4, 128), (4, 2, 8)]
)
@pytest.mark.parametrize(("page", "spare"), [(16, 66), (1, 3), (64, 0)])
def test_decode_attention(
    gpu: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page: int, spare: int
) -> None:
    draw = random.Random(0)
    lens = [1, 2, 63, 64, 65, 1000, *(draw.randrange(1, 3000) for _ in range(9))]
    width = -(-max(lens) // page)
    num_pages = [-(-n // page) for n in lens]
    order = (torch.randperm(sum(num_pages)) + 1).split(num_pages)
    table = torch.zeros(len(lens) + 1, width, dtype=torch.int64)
    for row, pages in enumerate(order, 1):
        table[row, : len(pages)] = pages
    # What no request holds is NaN: reading it would show.
    pool = torch.full((sum(num_pages) + 1, 2, page, kv_heads, head_dim), torch.nan, dtype=dtype, device=gpu)
    q = torch.randn(len(lens), heads, head_dim, dtype=dtype, device=gpu)
    expected = []
    for i, n in enumerate(lens):
        tokens = torch.arange(n)
        ids = order[i][tokens // page]
        k, v = torch.randn(2, n, kv_heads, head_dim, dtype=dtype, device=gpu)
        pool[ids, 0, tokens % page], pool[ids, 1, tokens % page] = k, v
        k, v = (x.double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = torch.einsum("hd,nhd->hn", q[i].double(), k) * head_dim**-0.5
        expected.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v))
    block = PackedBlock(gpu)
    padded = len(lens) + 1
    splits = pack_splits(block, lens, padded, spare)
    rows = block.add([*range(1, len(lens) + 1), 0], np.int64)
    block.ship()
    workspace = DecodeWorkspace.of(padded + spare, padded, heads, kv_heads, head_dim, gpu)
    padded_q = torch.cat((q, q[:1]))
    seq_lens = torch.tensor([*lens, 1], dtype=torch.int32, device=gpu)
    for _ in range(3):  # the counters are ready for the next launch
        out = attend_decode(
            padded_q,
            pool,
            table.to(gpu),
            rows,
            seq_lens,
            (splits.requests, splits.starts, splits.tokens, splits.indptr),
            workspace,
            SPLIT_UNIT_TOKENS,
        )
        # Weights are rounded to the type before they meet the values.
        atol = {torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float16: 0.003}[dtype]
        torch.testing.assert_close(out[:-1].double(), torch.stack(expected), rtol=0.0, atol=atol)
    assert not workspace.arrived.any()


def beside_nan(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A matrix of random numbers in the middle of memory that is NaN: reading past its ends would show."""
    memory = torch.full((3, rows * columns), torch.nan, dtype=dtype, device=device)
    memory[1] = torch.randn(rows * columns, device=device).to(dtype) * 0.1
    return memory[1].view(rows, columns)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 16, 31, 33, 40, 64])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (1920, 576), (640, 896), (2560, 1024)])
def test_products_of_a_few_tokens(gpu: torch.device, dtype: torch.dtype, tokens: int, n: int, k: int) -> None:
    x, weight = beside_nan(tokens, k, dtype, gpu), beside_nan(n, k, dtype, gpu)
    if not can_multiply(tokens, weight):
        assert k % 128 or n % 128, "a model's usual sizes are taken"
        return
    exact = x.double() @ weight.double().T
    parts = product(x, weight)
    assert parts.shape[1:] == (tokens, n)
    torch.testing.assert_close(parts.sum(0).double(), exact, rtol=0.0, atol=1e-4)
    gate, up = exact.chunk(2, -1)
    torch.testing.assert_close(
        gated(x, weight).double(), F.silu(gate) * up, rtol=0.02, atol=LAST_PLACE[dtype]
    )


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_norm_and_rotation_sum_the_parts_of_a_product(gpu: torch.device, parts: int) -> None:
    tokens, heads, kv_heads, head_dim, page = 7, 8, 2, 64, 16
    x = torch.randn(parts, tokens, 768, device=gpu)
    residual, weight = torch.randn(tokens, 768, device=gpu).bfloat16(), torch.rand(768, device=gpu).bfloat16()
    summed = residual.clone()
    normed = add_rms_norm(x, summed, weight, 1e-5)
    total = (residual.float() + x.sum(0).bfloat16().float()).bfloat16()
    close = {"rtol": 0.0, "atol": LAST_PLACE[torch.bfloat16]}
    torch.testing.assert_close(summed, total, **close)
    torch.testing.assert_close(normed, F.rms_norm(total, (768,), weight, 1e-5), **close)
    qkv = torch.randn(parts, tokens, (heads + 2 * kv_heads) * head_dim, device=gpu)
    table = rope_table(rope_frequencies(head_dim, 1e4, None), 64, torch.bfloat16).to(gpu)
    positions, loc = torch.arange(tokens, device=gpu), torch.arange(tokens, device=gpu) + page
    pools = [torch.zeros(2, 2, page, kv_heads, head_dim, dtype=torch.bfloat16, device=gpu) for _ in range(2)]
    args = (table, positions, loc)
    q, _ = rotate_append(qkv, *args, pools[0], None, 1e-5, heads, keep_k=False)
    want, _ = rotate_append(qkv.sum(0).bfloat16(), *args, pools[1], None, 1e-5, heads, keep_k=False)
    torch.testing.assert_close(q, want, **close)
    torch.testing.assert_close(pools[0], pools[1], **close)


@pytest.mark.parametrize("vocab", [320, 4096, 49152, 128256])
def test_the_likeliest_token_is_the_first_among_equals(gpu: torch.device, vocab: int) -> None:
    logits = torch.randn(9, vocab, device=gpu)
    logits[3, [7, vocab - 1]] = 30.0
    logits[4] = torch.nan
    logits[5] = -torch.inf
    found = argmax(logits)
    assert ((found >= 0) & (found < vocab)).all()
    sound = [0, 1, 2, 3, 6, 7, 8]
    assert torch.equal(found[sound], logits[sound].argmax(-1))
    assert found[3] == 7
    assert torch.equal(argmax(logits[:3].bfloat16()), logits[:3].bfloat16().float().argmax(-1))


def test_penalties_and_counts(gpu: torch.device) -> None:
    vocab, cpu = 5000, torch.device("cpu")
    samplings = [
        SamplingParams(max_tokens=9, presence_penalty=0.5, frequency_penalty=-0.3, repetition_penalty=1.3),
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, repetition_penalty=0.7),
    ]
    rows, draw = (3, 1, 2), random.Random(4)
    prompts = [int32s(draw.randrange(vocab) for _ in range(200)) for _ in rows]
    logits, token_steps = torch.randn(3, vocab), torch.randint(0, 40, (6, 3))
    outcomes = []
    for device in (cpu, gpu):
        state = PenaltyState(4, vocab, device)
        for row, prompt, sampling in zip(rows, prompts, samplings, strict=True):
            state.prime(Request(prompt, sampling, len(prompt), row=row))
        block = PackedBlock(device)
        samples = [SampleRow(i, sampling, 5, may_stop=True) for i, sampling in enumerate(samplings)]
        inputs = resolve_penalties(samples, rows, block)
        block.ship()
        assert inputs is not None
        for tokens in token_steps:
            state.count(inputs.rows, tokens.to(device))
        outcomes.append(state.apply(logits.to(device, copy=True), inputs).cpu())
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=0.0, atol=1e-6)
    assert torch.equal(outcomes[1][1], logits[1])
    assert not torch.equal(outcomes[1][0], logits[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128), (7, 1, 80), (4, 2, 8)])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_extend_attention(
    gpu: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page: int
) -> None:
    # Tokens before, and of the chunk; a padded step has some without any.
    chunks = [(0, 5), (37, 70), (0, 0), (0, 130), (16, 1), (1000, 333), (0, 0)]
    total = sum(extend for _, extend in chunks)
    pages_each = 1400 // page
    ids = (torch.randperm(pages_each * len(chunks)) + 1).view(len(chunks), -1)
    rows = torch.tensor([3, 1, 7, 5, 2, 4, 6], device=gpu)
    table = torch.zeros(8, pages_each, dtype=torch.int64, device=gpu)
    table[rows] = ids.to(gpu)
    pool = torch.full((ids.numel() + 1, 2, page, kv_heads, head_dim), torch.nan, dtype=dtype, device=gpu)
    q = torch.randn(total, heads, head_dim, dtype=dtype, device=gpu)
    expected, at = [], 0
    for i, (prefix, extend) in enumerate(chunks):
        tokens = torch.arange(prefix + extend)
        k, v = torch.randn(2, prefix + extend, kv_heads, head_dim, dtype=dtype, device=gpu)
        where = ids[i][tokens // page]
        pool[where, 0, tokens % page], pool[where, 1, tokens % page] = k, v
        k, v = (x.double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,nhd->hqn", q[at : at + extend].double(), k) * head_dim**-0.5
        later = tokens[None] > prefix + torch.arange(extend)[:, None]
        weights = scores.masked_fill(later.to(gpu), -torch.inf).softmax(-1)
        expected.append(torch.einsum("hqn,nhd->qhd", weights, v))
        at += extend
    block = PackedBlock(gpu)
    prefix_lens, extend_lens = zip(*chunks, strict=True)
    plan = pack_blocks(block, prefix_lens, extend_lens, queries_per_block(heads, kv_heads))
    block.ship()
    cut = (plan.requests, plan.starts, plan.token_starts, plan.prefix_lens)
    out = attend_extend(q, pool, table, rows, cut)
    atol = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}[dtype]
    torch.testing.assert_close(out.double(), torch.cat(expected), rtol=0.0, atol=atol)
