"""Grammars with an oracle of their own: transformers' logits, and a predicate that says what may come next.

No part of it is the code under test: what a token reads as is the tokenizer's, what is whole is `re`'s.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.engine.grammar_compiler import GrammarCompiler, GrammarRefusal
from common.request import Grammar, GrammarKind
from common.sockets import wait
from tests.tiny import SPECIAL_TOKENS

PATIENCE_S = 120.0


@dataclass(frozen=True, eq=False)
class Language:
    """A regex, and whether a text can go on to something that it matches."""

    regex: str
    is_prefix: Callable[[str], bool]
    grammar: Grammar = field(init=False)

    def __post_init__(self) -> None:
        """Name the grammar."""
        object.__setattr__(self, "grammar", Grammar(GrammarKind.REGEX, self.regex))

    def is_whole(self, text: str) -> bool:
        """Say whether it matches."""
        return re.fullmatch(self.regex, text) is not None


def words(*words: str) -> Language:
    """Make the language of these words."""
    return Language("|".join(words), lambda text: any(word.startswith(text) for word in words))


def letters(alphabet: str, count: int) -> Language:
    """Make the language of texts of so many of these letters."""
    return Language(
        f"[{alphabet}]{{{count}}}", lambda text: len(text) <= count and not set(text) - set(alphabet)
    )


@cache
def load(folder: Path) -> tuple[Any, Any]:
    """Return model and tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@cache
def token_texts(folder: Path) -> list[str]:
    """Return what each token reads as; half a character is U+FFFD, special tokens are empty."""
    _, tokenizer = load(folder)
    return [tokenizer.decode([i], skip_special_tokens=True) for i in range(len(tokenizer))]


def eos_of(folder: Path) -> list[int]:
    """Return the tokens that end an answer, as the model's configuration has them."""
    eos = load(folder)[0].config.eos_token_id
    return eos if isinstance(eos, list) else [eos]


def text_of(folder: Path, tokens: Sequence[int]) -> str:
    """Return what an answer reads as."""
    return load(folder)[1].decode(list(tokens), skip_special_tokens=True)


def greedy(folder: Path, prompt: Sequence[int], language: Language, max_tokens: int) -> list[int]:
    """Draw the likeliest of the tokens that keep to the language."""
    return list(_greedy(folder, tuple(prompt), language, max_tokens))


@cache
@torch.inference_mode()
def _greedy(folder: Path, prompt: tuple[int, ...], language: Language, max_tokens: int) -> list[int]:
    model, texts, eos = load(folder)[0], token_texts(folder), eos_of(folder)
    no_text = {*range(len(SPECIAL_TOKENS)), *eos}
    answer: list[int] = []
    text = ""
    while len(answer) < max_tokens and not set(answer[-1:]) & set(eos):
        logits = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, -1].tolist()
        allowed = [i for i, t in enumerate(texts) if i not in no_text and language.is_prefix(text + t)]
        allowed += eos if language.is_whole(text) else []
        answer.append(max(allowed, key=logits.__getitem__))
        text += texts[answer[-1]]
    return answer


def compiled(compiler: GrammarCompiler, grammar: Grammar) -> Any | GrammarRefusal:
    """Wait for what a compiler says of a grammar."""
    limit_s = time.monotonic() + PATIENCE_S
    while (answer := compiler.compile(grammar)) is None:
        assert time.monotonic() < limit_s, "the compiler does not answer"
        wait(compiler.pollables(), 0.1)
        compiler.collect()
    return answer
