"""Text -> token ids: tokenizer and chat template of the model's own folder.

A model may have no tokenizer (random weights for a benchmark): prompts are token ids, answers have no text.
`encode` and `render_chat` block and are called in a worker thread. Nothing here knows HTTP or nodes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from common.errors import ConfigError, RequestRejected
from gateway.byte_level import ByteLevelDetokenizer, BytePieces, is_byte_level
from gateway.detokenizer import Detokenizer, WindowDetokenizer
from gateway.errors import clipped
from gateway.hermes import in_plain_messages
from gateway.token_text import TokenTexts
from gateway.tool_calls import CLOSE, OPEN

LONG_TEXT_CHARS = 1 << 18
_KNOWS_TOOLS = re.compile(r"\btools\b")


class TextPipeline:
    """The tokenizer of a model, for prompts and for answers.

    Args:
        tokenizer: a fast tokenizer of `transformers`; it is this object's own from now on. None: no text.

    Raises:
        ConfigError: it is not a fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        empty = Tokenizer(models.BPE())
        backend = empty if tokenizer is None else getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(f"{tokenizer.name_or_path}: this model has no fast tokenizer (tokenizer.json)")
        # `transformers` would switch these per call, which fails while another thread uses the tokenizer.
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = tokenizer
        self._backend = backend
        self.token_texts = TokenTexts(backend)
        self._longest_token_bytes = max((len(token.encode()) for token in backend.get_vocab()), default=1)
        self._one_long_text = threading.Lock()
        added = backend.get_added_tokens_decoder().items()
        self._silent_ids: Container[int] = (
            range(2**31)
            if tokenizer is None
            # Some models have the tags of tool calls as special tokens; nobody could read the calls without.
            else frozenset(i for i, token in added if token.special and token.content not in (OPEN, CLOSE))
        )
        self._pieces = BytePieces(backend, self._silent_ids) if is_byte_level(backend) else None

    @classmethod
    def load(cls, folder: Path, *, optional: bool = False) -> TextPipeline:
        """Load tokenizer and chat template from a model folder; nothing is downloaded.

        Args:
            optional: without a tokenizer, it is a model without text.

        Raises:
            ConfigError: there is no tokenizer in it.
        """
        if not (folder / "tokenizer.json").exists():
            if optional:
                return cls(None)
            raise ConfigError(f"{folder} has no tokenizer.json: put it there, or take --load-format dummy")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever a broken file makes of it
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigError(f"the tokenizer in {folder} cannot be read: {clipped(reason)}") from None
        pipeline = cls(tokenizer)
        pipeline.check_template(folder)
        return pipeline

    def check_template(self, folder: Path) -> None:
        """Find a broken chat template at the start, not at the first chat.

        Raises:
            ConfigError: it does not compile.
        """
        try:
            if self._tokenizer.chat_template:
                self._tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template in {folder} is broken: {error}") from None
        except (TemplateError, TypeError, ValueError):
            pass  # it does not like this chat; it may like another

    def check_length(self, texts: Sequence[str], context_length: int, param: str) -> None:
        """Refuse what is longer than the context whatever its tokens are, before time is spent on it.

        Raises:
            RequestRejected: a text of more bytes than `context_length` of the longest tokens have, or any
                text where there is no tokenizer.
        """
        if texts and self._tokenizer is None:
            raise RequestRejected("this model has no tokenizer: give the prompt as token ids", param=param)
        most = context_length * self._longest_token_bytes
        if any(len(text) > most or len(text.encode()) > most for text in texts):
            raise RequestRejected(
                f"a text of more than {most} bytes cannot fit the model's context of {context_length} tokens",
                code="context_length_exceeded",
                param=param,
            )

    def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        """Tokenize; `special_tokens` adds those that the model puts around a plain text (BOS)."""
        if sum(len(text) for text in texts) > LONG_TEXT_CHARS:
            with self._one_long_text:  # it takes some hundred times its size in memory
                return self._encode(texts, special_tokens)
        return self._encode(texts, special_tokens)

    def _encode(self, texts: Sequence[str], special_tokens: bool) -> list[list[int]]:
        # A batch, for one text too: it lets go of the interpreter while it works. The fast one keeps no
        # offsets: of 100,000 tokens they take 10 ms to be forgotten, in which nobody else gets on.
        return [e.ids for e in self._backend.encode_batch_fast(texts, add_special_tokens=special_tokens)]

    def render_chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> str:
        """Write a chat as the model's template does, up to the point where the assistant speaks.

        Args:
            tools: that the model may call. A template that knows none finds them in the messages.

        Raises:
            RequestRejected: the model has no template, or the template refuses these messages.
        """
        if self._tokenizer is None or not self._tokenizer.chat_template:
            raise RequestRejected("this model has no chat template; use /v1/completions", param="messages")
        try:
            template = self._tokenizer.get_chat_template(tools=tools)
            if not _KNOWS_TOOLS.search(template):
                messages, tools = in_plain_messages(messages, tools), None
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=tools and list(tools),
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=True,
                )
            )
        except (TemplateError, TypeError, ValueError) as error:  # whatever the template raises
            reason = clipped(str(error))
            raise RequestRejected(
                f"the model's chat template refuses the messages: {reason}", param="messages"
            ) from None

    def detokenizer(self) -> Detokenizer:
        """Start the text of an answer."""
        if self._pieces is not None:
            return ByteLevelDetokenizer(self._pieces)
        return WindowDetokenizer(self._backend, self._silent_ids)
