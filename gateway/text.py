"""Text -> token ids: tokenizer and chat template of the model's own folder.

`encode` and `render_chat` block and are called in a worker thread. Nothing here knows HTTP or nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from common.errors import ConfigError, RequestRejected
from gateway.detokenizer import Detokenizer
from gateway.errors import clipped


class TextPipeline:
    """The tokenizer of a model, for prompts and for answers.

    Args:
        tokenizer: a fast tokenizer of `transformers`; it is this object's own from now on.

    Raises:
        ConfigError: it is not a fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(f"{tokenizer.name_or_path}: this model has no fast tokenizer (tokenizer.json)")
        # `transformers` would switch these per call, which fails while another thread uses the tokenizer.
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = tokenizer
        self._backend = backend
        self._silent_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @classmethod
    def load(cls, folder: Path) -> TextPipeline:
        """Load tokenizer and chat template from a model folder; nothing is downloaded.

        Raises:
            ConfigError: there is no tokenizer in it.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: no tokenizer: {str(error).splitlines()[0]}") from None
        return cls(tokenizer)

    def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        """Tokenize; `special_tokens` adds those that the model puts around a plain text (BOS)."""
        # encode_batch, for one text too: it lets go of the interpreter while it works.
        return [e.ids for e in self._backend.encode_batch(texts, add_special_tokens=special_tokens)]

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """Write a chat as the model's template does, up to the point where the assistant speaks.

        Raises:
            RequestRejected: the model has no template, or the template refuses these messages.
        """
        if not self._tokenizer.chat_template:
            raise RequestRejected("this model has no chat template; use /v1/completions", param="messages")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True
                )
            )
        except (TemplateError, TypeError, ValueError) as error:  # whatever the template raises
            reason = clipped(str(error))
            raise RequestRejected(
                f"the model's chat template refuses the messages: {reason}", param="messages"
            ) from None

    def detokenizer(self) -> Detokenizer:
        """Start the text of an answer."""
        return Detokenizer(self._backend, self._silent_ids)
