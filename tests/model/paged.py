"""Drive the raw decoder over shuffled, dirty pages, and ask transformers what is right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from common.attention.base import AttentionInputs
from common.attention.sdpa import SdpaAttention
from common.kv.pool import KVPool
from common.model.decoder import Decoder, make_decoder, read_weights
from common.model.spec import ModelSpec, load_spec


def transformers_greedy(folder: Path, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Continue each prompt by transformers' greedy search in float32, past every end-of-sequence token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        result = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens
        )
        outputs.append(result[0, len(prompt) :].tolist())
    return outputs


@dataclass
class PagedSequence:
    """A request: its tokens, how many of them are in KV, and where."""

    ids: list[int]
    cached: int = 0
    pages: list[int] = field(default_factory=list)


def load_decoder(folder: Path, spec: ModelSpec, dtype: str, pool: KVPool) -> Decoder:
    """Load a folder's weights onto the pool's device, with reference attention and plain operations."""
    weights = read_weights(folder, spec, dtype, pool.device, "auto")
    return make_decoder(spec, weights, dtype, pool, SdpaAttention(pool, spec.heads), fused=False)


class PagedRunner:
    """Owns a pool whose pages are handed out in random order and hold rubbish at first (`dirt`, or noise)."""

    def __init__(self, folder: Path, *, page_size: int, num_pages: int, dirt: float | None = None) -> None:
        spec = load_spec(folder)
        self.pool = KVPool(spec.kv_layout(page_size, "float32"), num_pages, torch.device("cpu"))
        self.pool.data[:, 1:].uniform_(-5, 5, generator=torch.Generator().manual_seed(0))
        if dirt is not None:
            self.pool.data[:, 1:] = dirt
        self.decoder = load_decoder(folder, spec, "float32", self.pool)
        self.page_size = page_size
        self.free = list(range(1, num_pages + 1))
        random.Random(0).shuffle(self.free)

    def step(self, batch: Sequence[tuple[PagedSequence, int]]) -> torch.Tensor:
        """Compute the next `n` tokens of each sequence; return the logits after each."""
        ids, positions, locs, lasts = [], [], [], []
        for sequence, n in batch:
            end = sequence.cached + n
            while len(sequence.pages) * self.page_size < end:
                sequence.pages.append(self.free.pop())
            for i in range(sequence.cached, end):
                ids.append(sequence.ids[i])
                positions.append(i)
                locs.append(sequence.pages[i // self.page_size] * self.page_size + i % self.page_size)
            lasts.append(len(ids) - 1)
        width = max(len(s.pages) for s, _ in batch) + 1  # one column of padding more than needed
        inputs = AttentionInputs(
            rows=torch.arange(len(batch)),
            page_table=torch.tensor([s.pages + [0] * (width - len(s.pages)) for s, _ in batch]),
            positions=torch.tensor(positions),
            seq_lens=torch.tensor([s.cached + n for s, n in batch]),
            prefix_lens_cpu=tuple(s.cached for s, _ in batch),
            extend_lens_cpu=tuple(n for _, n in batch),
            out_cache_loc=torch.tensor(locs),
        )
        logits = self.decoder.forward(torch.tensor(ids), inputs, torch.tensor(lasts))
        for sequence, n in batch:
            sequence.cached += n
        return logits

    def generate(
        self, prompts: Sequence[list[int]], num_tokens: int, *, budget: int = 10**9
    ) -> list[list[int]]:
        """Prefill all prompts in chunks of `budget` tokens in all, then decode all together."""
        sequences = [PagedSequence(list(prompt)) for prompt in prompts]
        firsts: dict[int, int] = {}
        while len(firsts) < len(sequences):
            left, batch = budget, []
            for sequence in sequences:
                if n := min(left, len(sequence.ids) - sequence.cached):
                    batch.append((sequence, n))
                    left -= n
            for (sequence, _), token in zip(batch, self.step(batch).argmax(-1).tolist(), strict=True):
                if sequence.cached == len(sequence.ids):
                    firsts[id(sequence)] = token
        for sequence in sequences:
            sequence.ids.append(firsts[id(sequence)])
        for _ in range(num_tokens - 1):
            tokens = self.step([(sequence, 1) for sequence in sequences]).argmax(-1).tolist()
            for sequence, token in zip(sequences, tokens, strict=True):
                sequence.ids.append(token)
        for sequence in sequences:
            self.free += sequence.pages
        return [s.ids[len(prompt) :] for s, prompt in zip(sequences, prompts, strict=True)]
