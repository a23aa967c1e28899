"""A prompt in chunks through our engine against one forward of the same model in transformers, in turns.

The model's own forward computes the prompt as a whole, with the logits of its last token alone: what chunks
and pages cost beyond it is the ratio.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM

from benchmarks.local_node import LocalNode, load_local
from benchmarks.measure import model_folder, random_prompt
from benchmarks.report import Report
from common.request import SamplingParams


def time_of_ours(node: LocalNode, prompt: Sequence[int]) -> float:
    """Return the seconds to a prompt's first token."""
    started_s = time.perf_counter()
    key = node.submit(prompt, SamplingParams(max_tokens=1, temperature=0.0))
    while node.turn() is not None:
        pass
    elapsed_s = time.perf_counter() - started_s
    node.end([key])
    return elapsed_s


@torch.inference_mode()
def time_of_transformers(model: Any, prompt: Sequence[int]) -> float:
    """Return the seconds of the model's own forward."""
    ids = torch.tensor([prompt])
    started_s = time.perf_counter()
    model(ids, logits_to_keep=1, use_cache=True).logits.argmax(-1).item()
    return time.perf_counter() - started_s


@click.command()
@click.option("--model", default="smollm2-135m", help="Model: a name, a folder, or `tiny`.")
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--tokens", default=2048, show_default=True, help="Length of the prompt.")
@click.option("--budget", default=512, show_default=True, help="Tokens in a chunk.")
@click.option("--rounds", default=3, show_default=True, help="Rounds of each; the best counts.")
@click.option("--save", is_flag=True, help="Keep the result in benchmarks/results.")
def main(model: str, dtype: str, tokens: int, budget: int, rounds: int, *, save: bool) -> None:
    """Time a prompt: our engine in chunks, and the model's own forward."""
    report = Report.of_command("prefill")
    with model_folder(model, tokens + 1) as folder:
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        engine = load_local(folder, dtype, num_requests=1, max_len=tokens + 1, prefill_budget=budget)
        ours = LocalNode(engine, colocated=True)
        prompt = random_prompt(tokens, engine.spec.vocab_size, seed=0)
        their_s, our_s = [], []
        for _ in range(rounds + 1):  # the first warms up
            their_s.append(time_of_transformers(theirs, prompt))
            our_s.append(time_of_ours(ours, prompt))
    best_s, limit_s = min(our_s[1:]), min(their_s[1:])
    report.add(
        f"{tokens} tokens, chunks of {budget}",
        best_s,
        "s",
        limit=limit_s,
        limit_name="transformers, one forward",
    )
    report.add("ours / theirs", best_s / limit_s, "x", at_most=1.15)
    report.add("prompt tokens a second", tokens / best_s, "1/s", limit=tokens / limit_s, limit_name="theirs")
    report.publish(save=save)


if __name__ == "__main__":
    main()
