"""Log probabilities of prompts from whole nodes are those of transformers' logits, in float32.

The test is the gateway, so that it sees what the nodes say and not what HTTP makes of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import zmq
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from common.host import this_process
from common.messages import Hello, Role, int32s
from common.model.spec import load_spec
from common.request import SamplingParams, TokenLogprobs
from gateway.client import NodeClient
from gateway.nodes import RequestStream, TokenEvent
from tests.faults.world import world
from tests.faults.world_cases import answer, check_answer, prompt
from tests.system.client import Client
from tests.system.server import START_S, Process, temporary_folder

TOLERANCE = 1e-4
NUM_TOKENS = 8
# (tokens of the prompt, likeliest ones that are wanted, None: nothing); all at once, in chunks of 32 tokens.
REQUESTS = ((100, 5), (33, None), (1, 3), (16, 0), (64, 20), (31, 1))
CHECKS = ("--debug-checks", "--prefill-budget", "32", "--device", "cpu")
SET_UPS: dict[str, tuple[tuple[str, ...], ...]] = {
    "pair, shm": (("prefill", "--transfer", "shm"), ("decode", "--transfer", "shm")),
    "pair, frames": (
        ("prefill", "--transfer", "frames", "--overlap", "on"),
        ("decode", "--transfer", "frames", "--overlap", "on"),
    ),
    "colocated": (("decode", "--colocated"),),
    "colocated, overlapped": (("decode", "--colocated", "--overlap", "on"),),
}


@cache
def _logprobs(folder: Path, ids: tuple[int, ...]) -> NDArray[np.float64]:
    """Behind every token: [tokens, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        scores: NDArray[np.float64] = model(torch.tensor([ids])).logits[0].double().log_softmax(-1).numpy()
    return scores


def check(
    folder: Path, ids: Sequence[int], told: Sequence[TokenLogprobs] | None, num_top: int | None
) -> None:
    """Compare with transformers: what is behind a token scores the next one."""
    if num_top is None:
        assert told is None
        return
    assert told is not None
    expected = _logprobs(folder, tuple(ids))
    for ours, token, theirs in zip(told, ids[1:], expected[:-1], strict=True):
        assert ours.logprob == pytest.approx(theirs[token], abs=TOLERANCE)
        likeliest = np.sort(theirs)[::-1][:num_top]
        assert ours.top_logprobs == pytest.approx(likeliest, abs=TOLERANCE)
        assert [theirs[i] for i in ours.top_ids] == pytest.approx(likeliest, abs=TOLERANCE)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("plane", ["frames", "shm"])
def test_handed_over(tiny_model: Path, plane: str, overlap: bool) -> None:
    with world(tiny_model, plane=plane, overlap=overlap) as w:
        asked = [
            w.ask(prompt(length, length), NUM_TOKENS, num_prompt_logprobs=num_top)
            for length, num_top in REQUESTS
        ]
        w.until_ended(*asked)
        for one, (_, num_top) in zip(asked, REQUESTS, strict=True):
            check_answer(tiny_model, one)
            check(tiny_model, one.prompt, one.prompt_logprobs, num_top)
        w.until(w.is_clean)


async def events_of(stream: RequestStream) -> list[TokenEvent]:
    """Read to the end."""
    events = [await stream.next()]
    while events[-1].finish is None:
        events.append(await stream.next())
    return events


async def all_events(address: str, folder: Path, *asked: tuple[Sequence[int], SamplingParams]) -> Any:
    """Submit all as soon as that is possible; returns the events of every choice of each."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    hello = Hello("gateway-0", Role.GATEWAY, this_process(), load_spec(folder).fingerprint)
    client = NodeClient(context, address, hello, 7)
    try:
        async with asyncio.timeout(START_S):
            while not client.usable():
                await asyncio.sleep(0.05)
            streams = [client.submit(int32s(ids), sampling) for ids, sampling in asked]
            choices = (asyncio.gather(*map(events_of, each)) for each in streams)
            return await asyncio.gather(*choices)
    finally:
        client.close()
        context.destroy(linger=0)


def run_beside(
    folder: Path, model: Path, nodes: Sequence[Sequence[str]], work: Coroutine[Any, Any, Any]
) -> Any:
    """Have real nodes there while something is done."""
    processes: list[Process] = []
    join = ("--join", f"ipc://{folder}/g", *CHECKS)
    try:
        for role, *args in nodes:
            log = folder / f"{role}.log"
            processes.append(Process(folder, log, role, str(model), *join, *args))
        return asyncio.run(work)
    finally:
        for process in processes:
            process.kill()
            assert "Traceback" not in process.log()


@pytest.mark.system
@pytest.mark.parametrize("set_up", SET_UPS)
def test_real_nodes(tiny_model: Path, set_up: str) -> None:
    fields: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    asked = [
        (prompt(length, length), SamplingParams(NUM_TOKENS, num_prompt_logprobs=num_top, **fields))
        for length, num_top in REQUESTS
    ]
    several = SamplingParams(NUM_TOKENS, num_prompt_logprobs=2, num_choices=3, **fields)
    asked.append((prompt(70, 70), several))
    with temporary_folder() as folder:
        work = all_events(f"ipc://{folder}/g", tiny_model, *asked)
        answers = run_beside(folder, tiny_model, SET_UPS[set_up], work)
    for (ids, sampling), choices in zip(asked, answers, strict=True):
        assert len(choices) == sampling.num_choices
        for i, events in enumerate(choices):
            tokens = [token for event in events for token in event.token_ids]
            assert tokens == answer(tiny_model, ids, NUM_TOKENS)
            first, *others = events
            # Those of the prompt come once, with the first choice.
            check(tiny_model, ids, first.prompt_logprobs, None if i else sampling.num_prompt_logprobs)
            assert all(event.prompt_logprobs is None for event in others)


@pytest.mark.system
@pytest.mark.parametrize("server", ["pair", "colocated"])
def test_over_http(server: str, model: Path, request: pytest.FixtureRequest) -> None:
    """As vLLM tells them, and as OpenAI's `echo` does; the answer's own come behind."""
    client: Client = request.getfixturevalue(server)
    ids = list(prompt(5, 300))
    body = {"model": client.model, "prompt": ids, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    asked = body | {"prompt_logprobs": 3, "echo": True, "logprobs": 2, "return_token_ids": True}
    reply = httpx.post(client.url + "/v1/completions", json=asked, timeout=START_S)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    all_ids = [*ids, *choice["token_ids"]]
    expected = _logprobs(model, tuple(all_ids))[:-1]
    own = [scores[token] for scores, token in zip(expected, all_ids[1:], strict=True)]
    none, *told = choice["logprobs"]["token_logprobs"]
    assert none is None
    assert told == pytest.approx(own, abs=TOLERANCE)
    none, *ranked = choice["prompt_logprobs"]
    assert none is None
    for entry, token, scores in zip(ranked, ids[1:], expected[: len(ids) - 1], strict=True):
        assert entry[str(token)]["logprob"] == pytest.approx(scores[token], abs=TOLERANCE)
        by_rank = sorted(
            (e for e in entry.values() if e["rank"] is not None and e["rank"] <= 3), key=lambda e: e["rank"]
        )
        likeliest = np.sort(scores)[::-1][:3]
        assert [e["logprob"] for e in by_rank] == pytest.approx(likeliest, abs=TOLERANCE)
