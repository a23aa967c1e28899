"""What an answer must be: transformers' greedy search over the same weights, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.system.client import Body, Outcome, greedy


@dataclass(frozen=True)
class Case:
    """A prompt and the tokens that must follow."""

    prompt: list[int]
    answer: list[int]

    def body(self, max_tokens: int | None = None, **fields: object) -> Body:
        """The request for it, or for the beginning of it."""
        return greedy(self.prompt, max_tokens or len(self.answer), **fields)

    def check(self, outcome: Outcome, max_tokens: int | None = None) -> None:
        """Check the outcome of `body`: complete, and token for token right."""
        expected = self.answer[:max_tokens]
        assert outcome.succeeded, outcome
        assert outcome.prompt_token_ids == self.prompt
        assert outcome.token_ids == expected
        assert outcome.finish == "length"
        if outcome.usage is not None:
            assert outcome.usage["completion_tokens"] == len(expected)
            assert outcome.usage["prompt_tokens"] == len(self.prompt)


class Oracle:
    """The model and the tokenizer of a folder, loaded by transformers."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The next tokens, past every end-of-sequence token."""
        ids = torch.tensor([list(prompt)])
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def follows(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Say whether greedy search would give this answer, in one pass over both.

        If the likeliest token behind prompt + answer[:i] is answer[i] for every i, then greedy search takes
        these very tokens. For large models: one pass costs about as much as two tokens of `continuation`.
        """
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *answer[:-1]]]), logits_to_keep=len(answer)).logits
        return bool((logits[0].argmax(-1) == torch.tensor(answer)).all())

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """A chat as the template renders it, up to where the answer begins."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def case(self, prompt: Sequence[int], num_tokens: int) -> Case:
        """A prompt with its answer."""
        return Case(list(prompt), self.continuation(prompt, num_tokens))

    def text(self, tokens: Sequence[int]) -> str:
        """The tokens as text, without special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
