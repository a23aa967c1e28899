"""Log probabilities of prompts are those of transformers' logits, however the prompts are cut and batched."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

import common.engine.prompt_logprobs
from common.config import EngineConfig, ModelConfig
from common.engine.batch import ForwardMode, ScheduleBatch, prepare_for_extend
from common.engine.chunking import advance, plan_chunks
from common.engine.loader import Engine, load_engine
from common.engine.prompt_logprobs import SLICE_TOKENS
from common.messages import int32s
from common.request import LogprobArrays, Request, SampledToken, SamplingParams
from tests.engine.test_mixed import PAGE, Node
from tests.tiny import VOCAB_SIZE

NUM_PAGES = 220
TOLERANCE = 1e-4
LENGTHS = (1, 2, 5, 16, 17, 40, SLICE_TOKENS + 44)  # the last is more than a slice
PLAIN = SamplingParams(6, temperature=0.0, ignore_eos=True)
# How many of the likeliest each prompt wants; None: nothing of its prompt.
WISHES = (20, 0, None, 3, 1, None, 5)

Scored = NDArray[np.float64]


def prompt_of(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


def load(folder: Path, budget: int) -> Engine:
    config = EngineConfig(
        page_size=PAGE, kv_pages=NUM_PAGES, max_running=8, prefill_budget=budget, debug_checks=True
    )
    return load_engine(folder, ModelConfig(str(folder), dtype="float32"), config)


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> dict[int, Scored]:
    """Log probabilities behind every token of each prompt, by its length: [tokens, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.inference_mode():
        logits = {n: model(torch.tensor([prompt_of(n)])).logits[0].double() for n in LENGTHS}
    return {n: values.log_softmax(-1).numpy() for n, values in logits.items()}


def check(arrays: LogprobArrays | None, length: int, num_top: int | None, oracle: dict[int, Scored]) -> None:
    """Compare with the oracle: row i of it scores token i + 1."""
    if num_top is None:
        assert arrays is None
        return
    assert arrays is not None
    assert arrays.fits(length - 1, num_top)
    rows = list(arrays.rows(0, length))
    for told, token, expected in zip(rows, prompt_of(length)[1:], oracle[length][:-1], strict=True):
        assert told.logprob == pytest.approx(expected[token], abs=TOLERANCE)
        likeliest = np.sort(expected)[::-1][:num_top]
        assert told.top_logprobs == pytest.approx(likeliest, abs=TOLERANCE)
        assert [expected[i] for i in told.top_ids] == pytest.approx(likeliest, abs=TOLERANCE)
        assert len(set(told.top_ids)) == num_top


def computed(engine: Engine, budget: int) -> tuple[list[Request], list[SampledToken], list[ScheduleBatch]]:
    """All prompts in EXTEND steps of so many tokens: as on a prefill node."""
    requests = []
    at = 1
    for row, (length, num_top) in enumerate(zip(LENGTHS, WISHES, strict=True), 1):
        pages = tuple(range(at, at := at + engine.layout.pages_for(length)))
        sampling = replace(PLAIN, num_prompt_logprobs=num_top)
        requests.append(Request(int32s(prompt_of(length)), sampling, length, row=row, page_ids=pages))
        engine.runner.grant(requests[-1])
    tokens, batches = [], []
    while left := [request for request in requests if not request.is_prefilled]:
        plans = plan_chunks(left, budget, PAGE)
        batches.append(prepare_for_extend(plans, PAGE))
        advance(plans, 0.0)
        record = engine.runner.launch(batches[-1])
        record.copy_done.synchronize()
        record.deliver_scores()
        tokens += record.result()
    return requests, tokens, batches


@pytest.mark.parametrize("budget", [8, 60, 1000])
def test_prompts_in_chunks_and_whole(tiny_model: Path, oracle: dict[int, Scored], budget: int) -> None:
    requests, tokens, batches = computed(load(tiny_model, budget), budget)
    assert len(batches) == 1 or budget < 1000
    assert max(len(batch.req_pool_indices) for batch in batches) > 1
    for request, num_top in zip(requests, WISHES, strict=True):
        check(request.prompt_logprobs, request.prompt_len, num_top, oracle)
    # And nothing else changed: each prompt's first token is the likeliest one behind it.
    assert [sampled.token for sampled in tokens] == [int(oracle[n][-1].argmax()) for n in LENGTHS]


def test_a_prompt_of_one_token_has_none(tiny_model: Path) -> None:
    """Nor does it cost a step anything."""
    engine = load(tiny_model, 16)
    sampling = replace(PLAIN, num_prompt_logprobs=2)
    request = Request(int32s([7]), sampling, 1, row=1, page_ids=(1,))
    batch = prepare_for_extend(plan_chunks([request], 16, PAGE), PAGE)
    assert batch.score_spans == ()
    assert engine.runner.launch(batch).scores is None
    assert request.prompt_logprobs == LogprobArrays()


@pytest.mark.parametrize("overlap", [False, True])
def test_beside_decoding_and_once(tiny_model: Path, oracle: dict[int, Scored], overlap: bool) -> None:
    """With the first token, and never again; in MIXED steps, beside prompts that nothing is asked about."""
    node = Node(load(tiny_model, 16), overlap=overlap)
    for length, num_top in zip(LENGTHS, WISHES, strict=True):
        node.submit(length, prompt_of(length), replace(PLAIN, num_prompt_logprobs=num_top))
        node.turn()
        node.turn()
    while node.turn():
        pass
    assert ForwardMode.MIXED in node.modes
    for length, num_top in zip(LENGTHS, WISHES, strict=True):
        first, *others = node.prompt_logprobs[length]
        check(first, length, num_top, oracle)
        assert set(others) <= {None}


def test_after_a_retraction_they_do_not_come_again(tiny_model: Path, oracle: dict[int, Scored]) -> None:
    node = Node(load(tiny_model, 16), overlap=True)
    lengths = (40, 17, 16)
    num_tokens = 400  # more than what admission keeps free for each, and not for all
    node.scheduler = replace(node.scheduler, num_pages=NUM_PAGES)
    for length in lengths:
        node.submit(length, prompt_of(length), replace(PLAIN, max_tokens=num_tokens, num_prompt_logprobs=2))
    while node.turn():
        pass
    assert node.scheduler.num_retracted > 0
    for length in lengths:
        first, *others = node.prompt_logprobs[length]
        check(first, length, 2, oracle)
        assert len(others) == num_tokens - 1
        assert set(others) == {None}


@pytest.fixture
def most_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens' logits existed at once, for each slice."""
    seen: list[int] = []
    score_slice = common.engine.prompt_logprobs._score

    def watch(logits: torch.Tensor, *rest: object) -> object:
        seen.append(len(logits))
        return score_slice(logits, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(common.engine.prompt_logprobs, "_score", watch)
    return seen


def test_logits_of_a_long_prompt_are_never_there_at_once(tiny_model: Path, most_rows: list[int]) -> None:
    computed(load(tiny_model, 1000), 1000)
    assert max(most_rows) == SLICE_TOKENS
    assert len(most_rows) > 1
