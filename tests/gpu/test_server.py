"""Real servers on GPUs: every way to hand over gives the same tokens, cut requests leave nothing, nodes die.

With one GPU both nodes share it; with two each has its own.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.gpu.engines import VOCAB, write_config
from tests.model.paged import transformers_greedy
from tests.system.client import Body, Client, Outcome, greedy
from tests.system.server import START_S, Server, poll_until, running
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.system

GPU = ("--device", "cuda")
LINKED = r"linked to decode-0, plane (\S+)"


def prompts_of(lengths: Sequence[int], vocab: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, vocab) for _ in range(n)] for n in lengths]


def ask_one_by_one(client: Client, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Alone, so that no batch's shape moves the last bits."""
    outcomes = [client.ask(greedy(prompt, num_tokens)) for prompt in prompts]
    assert all(outcome.succeeded for outcome in outcomes), outcomes
    return [outcome.token_ids for outcome in outcomes]


@pytest.mark.parametrize("how", ["cuda-ipc", "frames", "colocated"])
def test_float32_equals_transformers(tiny_model: Path, gpu: torch.device, how: str) -> None:
    prompts = prompts_of([1, 15, 16, 17, 64, 129, 300], VOCAB_SIZE)
    expected = transformers_greedy(tiny_model, prompts, 48)
    args = ("--colocated",) if how == "colocated" else ("--transfer", how)
    with running(tiny_model, *GPU, "--kv-pages", "512", "--prefill-budget", "128", *args) as server:
        client = Client(server.url, server.model)
        if how != "colocated":
            assert server.process.wait_for(LINKED) == how
        assert ask_one_by_one(client, prompts, 48) == expected
        together = client.ask_all([greedy(prompt, 48) for prompt in prompts])
        assert [outcome.token_ids for outcome in together] == expected
        client.assert_ledger_clean()


@pytest.mark.parametrize("how", ["cuda-ipc", "colocated"])
def test_a_pool_too_small_for_all_answers_gives_the_tokens_of_a_large_one(
    tiny_model: Path, gpu: torch.device, how: str
) -> None:
    prompts = prompts_of([5, 17, 32, 20, 9, 30], VOCAB_SIZE)
    args = ("--colocated",) if how == "colocated" else ("--transfer", how)
    answers = []
    for pages in ("512", "60"):  # 60: the prompts, and the answers of two
        with running(tiny_model, *GPU, "--kv-pages", pages, *args) as server:
            client = Client(server.url, server.model)
            penalty = {"repetition_penalty": 1.2, "frequency_penalty": 0.1}
            outcomes = client.ask_all([greedy(prompt, 320, **penalty) for prompt in prompts])
            assert all(outcome.succeeded for outcome in outcomes), outcomes
            answers.append([outcome.token_ids for outcome in outcomes])
            assert (client.metric("baton_node_requests_retracted_total") > 0) is (pages == "60")
            client.assert_ledger_clean()
    assert answers[0] == answers[1]


def test_bfloat16_cuda_ipc_equals_frames_and_colocated(tmp_path: Path, gpu: torch.device) -> None:
    pytest.importorskip("flashinfer")
    folder = write_config(tmp_path / "model")
    prompts = prompts_of([1, 17, 128, 1000, 3000], VOCAB)
    answers = []
    for args in (("--transfer", "cuda-ipc"), ("--transfer", "frames"), ("--colocated",)):
        with running(folder, *GPU, "--load-format", "dummy", "--kv-pages", "2048", *args) as server:
            answers.append(ask_one_by_one(Client(server.url, server.model), prompts, 32))
    assert answers[0] == answers[1]
    assert answers[0] == answers[2]


def test_a_thousand_requests_with_checksums_a_third_cut(tmp_path: Path, gpu: torch.device) -> None:
    pytest.importorskip("flashinfer")
    folder = write_config(tmp_path / "model")
    draw = random.Random(9)
    few = prompts_of([5, 100, 700, 1500], VOCAB)

    async def follow(client: Client, body: Body, cut_s: float | None) -> Outcome | None:
        async with client.session() as http:
            if cut_s is None:
                return await client.follow(http, body, Outcome())
            try:
                await asyncio.wait_for(client.follow(http, body, Outcome()), cut_s)
            except TimeoutError:
                return None
            return None

    async def all_visits(client: Client) -> list[tuple[int, Outcome]]:
        gate = asyncio.Semaphore(48)

        async def one(index: int) -> tuple[int, Outcome] | None:
            which, cut_s = draw.randrange(len(few)), draw.uniform(0, 0.4) if index % 3 == 0 else None
            async with gate:
                body = greedy(few[which], 24, stream=bool(index % 2))
                outcome = await follow(client, body, cut_s)
            return None if outcome is None else (which, outcome)

        visits = await asyncio.gather(*(one(index) for index in range(1000)))
        return [visit for visit in visits if visit is not None]

    args = ("--load-format", "dummy", "--kv-pages", "2048")
    with running(folder, *GPU, *args) as server:  # --verify-pages is among a test server's options
        client = Client(server.url, server.model)
        assert server.process.wait_for(LINKED) == "cuda-ipc"
        whole = asyncio.run(all_visits(client))
        assert len(whole) > 600
        assert all(outcome.succeeded and len(outcome.token_ids) == 24 for _, outcome in whole)
        client.assert_ledger_clean(10.0)
        assert client.metric("baton_node_pages_received_total") > 1000
        assert client.metric("baton_node_chunks_broken_total") == 0


def assert_back(server: Server, client: Client, victim: str, before: dict[str, int]) -> None:
    def is_back() -> bool:
        pids = server.pids()
        return victim in pids and pids[victim] != before[victim]

    poll_until(is_back, START_S, f"{victim} is started again", server.process.log)
    server.wait_ready()
    outcome = client.ask(greedy([5, 6, 7], 8))
    assert outcome.succeeded, (outcome, server.process.log())


@pytest.mark.parametrize("victim", ["decode", "prefill"])
def test_a_node_is_killed_in_mid_transfer_with_pools_that_fill_the_card(
    tmp_path: Path, gpu: torch.device, victim: str
) -> None:
    """The survivor keeps its pid, and the restarted node gets the memory that the dead one had."""
    pytest.importorskip("flashinfer")
    folder = write_config(tmp_path / "model")
    prompts = prompts_of([4000] * 40, VOCAB)
    args = ("--load-format", "dummy", "--gpu-memory-fraction", "0.94")
    with running(folder, *GPU, *args, calm=False) as server:
        client = Client(server.url, server.model)

        async def load_and_kill() -> list[Outcome]:
            async with client.session() as http, asyncio.TaskGroup() as group:
                outcomes = [Outcome() for _ in prompts]
                for prompt, outcome in zip(prompts, outcomes, strict=True):
                    group.create_task(client.follow(http, greedy(prompt, 16, stream=True), outcome))
                while not any(outcome.token_ids for outcome in outcomes):
                    await asyncio.sleep(0.001)
                os.kill(before[victim], signal.SIGKILL)
            return outcomes

        before = server.pids()
        pages = {n["role"]: n["pages"]["total"] for n in client.get("/debug/kv").json()["nodes"]}
        outcomes = asyncio.run(load_and_kill())
        assert all(outcome.done or outcome.error or outcome.status >= 500 for outcome in outcomes)
        assert_back(server, client, victim, before)
        after = server.pids()
        assert {role for role in before if after[role] != before[role]} == {victim}
        client.assert_ledger_clean(30.0)
        again = {n["role"]: n["pages"]["total"] for n in client.get("/debug/kv").json()["nodes"]}
        assert all(again[role] > 0.95 * pages[role] for role in pages)
        assert "Traceback" not in server.process.log()
