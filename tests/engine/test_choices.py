"""Several choices of one prompt, computed on one node: each is what it is alone, with all of sampling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.engine.batch import prepare_for_extend
from common.engine.chunking import plan_chunks
from common.messages import int32s
from common.request import Request
from decode_node import admission
from tests.engine.test_graph_sizes import resolve
from tests.engine.test_mixed import NUM_PAGES, SAMPLING, Node, assert_same, load, prompts, run_alone

N = 4
RANDOM = [replace(params, temperature=1.0, seed=3 + i) for i, params in enumerate(SAMPLING)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_pages", [NUM_PAGES, 42])
def test_choices_equal_requests_alone(
    tiny_model: Path, overlap: bool, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "NEAR_TOKENS", 2)
    node = Node(load(tiny_model), overlap=overlap, num_pages=num_pages)
    requests = [(prompt, RANDOM[i % len(RANDOM)]) for i, prompt in enumerate(prompts())]
    for number, (prompt, params) in enumerate(requests):
        node.submit(1 + number * N, prompt, replace(params, num_choices=N))
        node.turn()
    while node.turn():
        pass
    assert (node.scheduler.num_retracted > 0) == (num_pages < NUM_PAGES)
    assert node.scheduler.ledger().free == num_pages
    alone = load(tiny_model)
    for number, (prompt, params) in enumerate(requests):
        for choice in range(N):
            right = run_alone(alone, prompt, replace(params, choice=choice))
            assert_same(node.answers[1 + number * N + choice], right)


def test_more_choices_than_may_run_take_turns(tiny_model: Path) -> None:
    node = Node(load(tiny_model), overlap=True)
    prompt, params = prompts()[10], RANDOM[4]
    node.submit(1, prompt, replace(params, num_choices=16))
    node.turn()
    while node.turn():
        pass
    alone = load(tiny_model)
    for choice in range(16):
        assert_same(node.answers[1 + choice], run_alone(alone, prompt, replace(params, choice=choice)))
    assert node.scheduler.ledger().free == NUM_PAGES


def test_a_step_samples_from_each_prompts_logits_once(tiny_model: Path) -> None:
    engine = load(tiny_model)
    lengths, choices = (3, 5, 4), (3, 1, 2)
    requests = [
        Request(
            int32s(range(5, 5 + n)), replace(RANDOM[1], num_choices=k), n, row=i, page_ids=(2 * i, 2 * i + 1)
        )
        for i, (n, k) in enumerate(zip(lengths, choices, strict=True), 1)
    ]
    for request in requests:
        engine.runner.grant(request)
    record = engine.runner.launch(prepare_for_extend(plan_chunks(requests, 16, 4), 4))
    assert [row.index for row in record.batch.sample_rows] == [0, 0, 0, 1, 2, 2]
    assert [row.sampling.choice for row in record.batch.sample_rows] == [0, 1, 2, 0, 0, 1]
    assert record.inputs.logits_indices is not None
    assert record.inputs.logits_indices.tolist() == [2, 7, 11]
    drawn = [sampled.token for sampled in record.result()]
    alone = load(tiny_model)
    right = [
        run_alone(alone, request.prompt_ids.tolist(), replace(RANDOM[1], choice=choice))[0].token
        for request, k in zip(requests, choices, strict=True)
        for choice in range(k)
    ]
    assert drawn == right


def test_a_captured_step_takes_more_choices_than_it_has_prompts() -> None:
    requests = [
        Request(int32s(range(n)), replace(RANDOM[1], num_choices=k), n, row=i, page_ids=(1, 2, 3))
        for i, (n, k) in enumerate(((3, 40), (5, 1)), 1)
    ]
    batch = prepare_for_extend(plan_chunks(requests, 16, 4), 4)
    inputs = resolve(batch, 32, 5)
    plain = resolve(replace(batch, sample_rows=(batch.sample_rows[0], batch.sample_rows[-1])), 32, 5)
    assert inputs.logits_indices is not None
    assert plain.logits_indices is not None
    assert inputs.logits_indices.tolist() == plain.logits_indices.tolist() == [2, 7, 0, 0, 0]
    assert inputs.logits_indices.storage_offset() == plain.logits_indices.storage_offset()
    assert inputs.logits_of is not None
    assert inputs.logits_of.tolist() == [0] * 40 + [1]
    assert plain.logits_of is None


def test_a_step_samples_as_often_as_there_is_memory_for() -> None:
    def planned(*choices: int) -> int:
        requests = [
            Request(int32s([5] * 4), replace(RANDOM[1], num_choices=k), 4, row=i, page_ids=(i,))
            for i, k in enumerate(choices, 1)
        ]
        return len(plan_chunks(requests, 64, 4, max_samples=8))

    assert planned(1, 1, 1) == 3
    assert planned(3, 4, 2) == 2
    assert planned(20, 1) == 1, "the first may always"
