"""What a client asked for, as the nodes see it: token ids and numbers, never text.

SamplingParams travel in `Submit` and `Prefill`; both nodes sample with them, so a token is the same
wherever it is drawn. Stop *strings* are not here: text exists in the gateway alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Any

from common.codec import FloatArray, IntArray, MaxLen, Range

U64_MAX = 2**64 - 1
TokenId = Annotated[int, Range(0, 2**31 - 1)]
MOST_S = 1e12
Seconds = Annotated[float, Range(-MOST_S, MOST_S)]  # of the time.monotonic() of whoever says it


MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 20  # numbers for a prompt: they travel as arrays, each in one frame
MAX_CHOICES = 128
MAX_GRAMMAR_CHARS = 1 << 16
MAX_CHUNK_STAMPS = 64


class FinishReason(Enum):
    """Why a request ended, in OpenAI's words."""

    STOP = "stop"  # EOS, a stop token, or (decided by the gateway) a stop string
    LENGTH = "length"  # max_tokens


@dataclass(frozen=True, slots=True)
class LogitBias:
    """A number that is added to one token's logit."""

    token: Annotated[int, Range(0, 2**31 - 1)]
    bias: Annotated[float, Range(-1e6, 1e6)]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one token, from the model's own logits: before bias, penalties and temperature."""

    logprob: float  # of the token that was drawn
    top_ids: Annotated[tuple[int, ...], MaxLen(MAX_LOGPROBS)]  # the likeliest tokens, most likely first
    top_logprobs: Annotated[tuple[float, ...], MaxLen(MAX_LOGPROBS)]


@dataclass(frozen=True, slots=True)
class LogprobArrays:
    """Log probabilities of many tokens, flat: of a prompt, where an object a token would hold others up."""

    logprobs: FloatArray = field(default_factory=lambda: array("f"))  # of the tokens themselves
    top_ids: IntArray = field(default_factory=lambda: array("i"))  # the same number a token, likeliest first
    top_logprobs: FloatArray = field(default_factory=lambda: array("f"))

    def fits(self, num_tokens: int, num_top: int) -> bool:
        """Say whether there is one for each of so many tokens, with so many likeliest ones."""
        lengths = len(self.logprobs), len(self.top_ids), len(self.top_logprobs)
        return lengths == (num_tokens, num_tokens * num_top, num_tokens * num_top)

    def rows(self, start: int, end: int) -> Iterator[TokenLogprobs]:
        """Give those of tokens `start` to `end`."""
        num_top = len(self.top_ids) // max(1, len(self.logprobs))
        for i in range(start, min(end, len(self.logprobs))):
            top = slice(i * num_top, (i + 1) * num_top)
            yield TokenLogprobs(self.logprobs[i], tuple(self.top_ids[top]), tuple(self.top_logprobs[top]))


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, with its log probabilities where the request asked for them."""

    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None  # its request cannot go on, nor have it


@dataclass(frozen=True, slots=True)
class PrefillStamps:
    """When a prompt was computed, wherever that was."""

    start_s: Seconds = 0.0  # the first chunk was launched
    chunks_s: Annotated[tuple[Seconds, ...], MaxLen(MAX_CHUNK_STAMPS)] = ()  # each was done; the last always
    committed_s: Seconds | None = None  # a prefill node had sent all

    def with_chunk(self, now: float) -> PrefillStamps:
        """A chunk was done; of more than can be told the last takes the place of the one before."""
        return replace(self, chunks_s=(*self.chunks_s[: MAX_CHUNK_STAMPS - 1], now))

    def shifted(self, by_s: float) -> PrefillStamps:
        """Move to another clock; what leads out of what can be said is cut."""

        def shift(at_s: float) -> float:
            return max(-MOST_S, min(MOST_S, at_s + by_s))

        committed_s = None if self.committed_s is None else shift(self.committed_s)
        return PrefillStamps(shift(self.start_s), tuple(map(shift, self.chunks_s)), committed_s)


class GrammarKind(Enum):
    """What a grammar is written in, in xgrammar's words."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match; every node compiles it for itself."""

    kind: GrammarKind
    text: Annotated[str, MaxLen(MAX_GRAMMAR_CHARS)]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens and when to stop.

    `temperature == 0` is greedy; `top_k == 0`, `top_p == 1` and `min_p == 0` switch their filter off, as do
    penalties of 0 (repetition: 1). `num_logprobs` None asks for none, 0 for the drawn token's alone.
    `seed` is always set (the gateway draws one), so that any node draws the same token.
    `num_prompt_logprobs` asks for the prompt's own log probabilities, by the same numbers as `num_logprobs`.
    """

    max_tokens: Annotated[int, Range(1, 2**31 - 1)]
    temperature: Annotated[float, Range(0, 1e6)] = 1.0
    top_k: Annotated[int, Range(0, 2**31 - 1)] = 0
    top_p: Annotated[float, Range(0, 1)] = 1.0
    min_p: Annotated[float, Range(0, 1)] = 0.0
    seed: Annotated[int, Range(0, U64_MAX)] = 0
    min_tokens: Annotated[int, Range(0, 2**31 - 1)] = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], MaxLen(1024)] = ()
    ignore_eos: bool = False
    presence_penalty: Annotated[float, Range(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Range(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, Range(1e-6, 1e6)] = 1.0
    logit_bias: Annotated[tuple[LogitBias, ...], MaxLen(1024)] = ()
    num_logprobs: Annotated[int, Range(0, MAX_LOGPROBS)] | None = None
    num_prompt_logprobs: Annotated[int, Range(0, MAX_LOGPROBS)] | None = None
    num_choices: Annotated[int, Range(1, MAX_CHOICES)] = 1  # answers, numbered from `choice` on
    choice: Annotated[int, Range(0, MAX_CHOICES - 1)] = 0  # draws with it: uniform(seed, choice, position)
    grammar: Grammar | None = None

    @property
    def num_prompt_numbers(self) -> int:
        """Numbers a token of the prompt, by the largest array of log probabilities; 0: there are none."""
        return 0 if self.num_prompt_logprobs is None else max(1, self.num_prompt_logprobs)

    @property
    def has_penalties(self) -> bool:
        """The tokens so far change the logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def stop_ids(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """All token ids that end this request: its own, and the model's unless they are ignored."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids + eos_token_ids

    def finish_reason(
        self, token: int, num_outputs: int, eos_token_ids: tuple[int, ...]
    ) -> FinishReason | None:
        """Say whether `token`, the `num_outputs`-th of the answer (from 1), ends the request.

        The first `min_tokens` tokens end nothing (the sampler does not draw a stop token there), as in vLLM.
        A stop token on the last place is a stop, as in OpenAI's API.
        """
        if num_outputs > self.min_tokens and token in self.stop_ids(eos_token_ids):
            return FinishReason.STOP
        if num_outputs >= self.max_tokens:
            return FinishReason.LENGTH
        return None


@dataclass(eq=False, slots=True)
class Request:
    """A request on a node. Three lengths are stored; the rest follows. One owner: the node's scheduler.

    Lengths count what was *launched*: with overlap, the last step's tokens are not yet known to the host.
    """

    prompt_ids: IntArray
    sampling: SamplingParams
    prompt_len: int
    computed_len: int = 0  # tokens whose KV is in the pages, once what was launched is done
    num_sampled: int = 0  # output tokens sampled, those in flight included
    row: int = 0
    page_ids: tuple[int, ...] = ()
    outputs: list[int] = field(default_factory=list)  # output tokens that the host has seen
    resumed_ids: IntArray | None = None  # prompt + outputs[:-1] of a request that was retracted
    shares_last_page: bool = False  # another choice writes it: the next token needs a copy
    compiled_grammar: Any = None  # the sampling's, as the engine has it
    prefill: PrefillStamps = PrefillStamps()  # as far as it was computed here
    # Those computed so far, of a request that wants them; None from the first token on: they go out with it.
    prompt_logprobs: LogprobArrays | None = field(init=False)

    def __post_init__(self) -> None:
        """Begin to collect what was asked for."""
        self.prompt_logprobs = None if self.sampling.num_prompt_logprobs is None else LogprobArrays()

    @property
    def max_len(self) -> int:
        """Tokens of prompt and answer at the most."""
        return self.prompt_len + self.sampling.max_tokens

    @property
    def fill_ids(self) -> IntArray:
        """What EXTEND computes before the request decodes: the prompt, and after a retraction more."""
        return self.prompt_ids if self.resumed_ids is None else self.resumed_ids

    @property
    def fill_len(self) -> int:
        """Their number; the prompt is not read for it."""
        return self.prompt_len if self.resumed_ids is None else len(self.resumed_ids)

    @property
    def is_prefilled(self) -> bool:
        """What EXTEND has to compute is there; the request decodes."""
        return self.computed_len >= self.fill_len

    def retract(self) -> None:
        """Forget the KV, which has to be computed again: not of the last output, which has none yet."""
        filled = array("i", self.prompt_ids)
        filled.extend(self.outputs[:-1])
        self.resumed_ids = filled
        self.computed_len = 0

    @property
    def wants_decode(self) -> bool:
        """There is a token to feed and one more to sample."""
        return 0 < self.num_sampled < self.sampling.max_tokens
