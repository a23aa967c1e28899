"""What a completion must be, from transformers' logits alone: token by token, the whole text anew each time.

The rules of the API in one small function. Of the server's own code it has nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

UNFINISHED = "\N{REPLACEMENT CHARACTER}"

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Expected:
    """What the client must get."""

    tokens: list[int]
    text: str
    finish: str
    scores: list[Scores]  # log probabilities of the vocabulary, an array a token


class Reference:
    """Greedy decoding by the model of a folder, with all that ends an answer or changes its tokens."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._eos: list[int] = GenerationConfig.from_pretrained(folder).eos_token_id
        self._known: dict[tuple[int, ...], Scores] = {}

    def text(self, tokens: Sequence[int]) -> str:
        """The tokens as text, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def tokens(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The greedy continuation, past every end-of-sequence token."""
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": True}
        return self.expect(body).tokens

    def expect(self, body: dict[str, Any]) -> Expected:
        """Follow a request to its end."""
        prompt, least = body["prompt"], body.get("min_tokens", 0)
        stops = [*body.get("stop_token_ids", ()), *(() if body.get("ignore_eos") else self._eos)]
        tokens: list[int] = []
        scores: list[Scores] = []
        while len(tokens) < body["max_tokens"]:
            logits = self._logits([*prompt, *tokens])
            scores.append(logits - np.logaddexp.reduce(logits))
            changed = penalised(logits, body, prompt, tokens)
            if len(tokens) < least:
                changed[stops] = -np.inf
            tokens.append(int(changed.argmax()))
            if tokens[-1] in stops:  # it is counted, and is no text
                return Expected(tokens, self.text(tokens[:-1]), "stop", scores)
            if len(tokens) > least and (cut := self._cut(tokens, body.get("stop", ()))) is not None:
                return Expected(tokens, cut, "stop", scores)
        return Expected(tokens, self.text(tokens), "length", scores)

    @torch.inference_mode()
    def prompt_scores(self, prompt: Sequence[int]) -> list[float]:
        """The log probabilities of a prompt's tokens, but the first."""
        logits = self._model(torch.tensor([list(prompt)])).logits[0, :-1].double()
        told = logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
        return [float(score) for score in told]

    def likeliest(self, token: int, scores: Scores, count: int) -> dict[str, float]:
        """The `count` likeliest tokens by their texts, and the drawn one.

        Of several with one text, parts of characters, the drawn one counts, or else the likeliest.
        """
        ids = np.argsort(-scores)[:count].tolist()
        by_text = {self._name(i): float(scores[i]) for i in reversed(ids)}
        return by_text | {self._name(token): float(scores[token])}

    def _name(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def _cut(self, tokens: Sequence[int], stops: Sequence[str]) -> str | None:
        """The text before the first stop string whose end came with the last token; None: there is none."""
        text, before = self._whole(tokens), len(self._whole(tokens[:-1]))
        found = [
            at
            for stop in stops
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > before
        ]
        return text[: min(found)] if found else None

    def _whole(self, tokens: Sequence[int]) -> str:
        """The text so far, up to a character that is not complete yet."""
        return self.text(tokens).rstrip(UNFINISHED)

    @torch.inference_mode()
    def _logits(self, ids: Sequence[int]) -> Scores:
        key = tuple(ids)
        if key not in self._known:
            self._known[key] = self._model(torch.tensor([key])).logits[0, -1].double().numpy()
        return self._known[key]


def penalised(logits: Scores, body: dict[str, Any], prompt: Sequence[int], tokens: Sequence[int]) -> Scores:
    """The logits with a request's penalties; a repetition penalty knows the prompt, the others the answer."""
    changed = logits.copy()
    repetition = body.get("repetition_penalty", 1)
    for token in {*prompt, *tokens}:
        changed[token] *= repetition if changed[token] < 0 else 1 / repetition
    for token in set(tokens):
        changed[token] -= body.get("presence_penalty", 0)
        changed[token] -= body.get("frequency_penalty", 0) * tokens.count(token)
    return changed
