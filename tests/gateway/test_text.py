"""Prompts as the model's own tokenizer and template write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import decoders
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from common.errors import ConfigError, RequestRejected
from gateway.detokenizer import WindowDetokenizer
from gateway.text import TextPipeline

PROMPTS = ["the quick brown fox", "你好 😀", " two  spaces\n", "<|im_start|>user\nhi<|im_end|>"]
MESSAGES = [{"role": "system", "content": "short"}, {"role": "user", "content": "你好"}]


def test_tokens_are_those_of_transformers(text: TextPipeline, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert text.encode(PROMPTS, special_tokens=True) == [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    rendered = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert text.encode([text.render_chat(MESSAGES)], special_tokens=False) == [rendered["input_ids"]]


def test_a_bos_token_is_put_before_plain_texts_and_not_before_chats(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    plain = tokenizer("fox")["input_ids"]
    text = TextPipeline(tokenizer)
    assert plain[0] == 0
    assert text.encode(["fox"], special_tokens=True) == [plain]
    assert text.encode(["fox"], special_tokens=False) == [plain[1:]]


def test_a_tokenizer_that_was_saved_with_truncation_keeps_the_whole_prompt(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    (ids,) = TextPipeline(tokenizer).encode(["the quick brown fox"], special_tokens=True)
    assert tokenizer.decode(ids) == "the quick brown fox"


@pytest.mark.parametrize("window", [False, True])
def test_tags_of_tool_calls_are_text_where_they_are_special_tokens(tiny_model: Path, window: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>", "<pad>"]})
    if window:
        tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    text = TextPipeline(tokenizer)
    (ids,) = text.encode(["<tool_call>fox</tool_call><pad>"], special_tokens=False)
    detokenizer = text.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer) is window
    assert "".join(map(detokenizer.add, ids)) + detokenizer.flush() == "<tool_call>fox</tool_call>"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content + 'x' }}", "refuses the messages"),
        ("{{ messages[0].content + 5 }}", "refuses the messages"),
        (None, "no chat template"),
    ],
)
def test_a_template_that_fails_is_the_messages_fault(
    tiny_model: Path, template: str | None, reason: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = template
    with pytest.raises(RequestRejected, match=reason) as caught:
        TextPipeline(tokenizer).render_chat(MESSAGES)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="no tokenizer") as caught:
            TextPipeline.load(folder)
        assert "\n" not in str(caught.value)
