"""Models small enough to compute thousands of steps in a test, with a real tokenizer and chat template.

The weights are drawn at ten times the usual spread: at the usual one, off-by-one positions leave nearly
every greedy token as it was, and a test would not see them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers.utils.logging
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 320
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
IM_END = 2
EOS_PROMPT = [11, 205, 84, 40]  # see write_eos_model
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
transformers.utils.logging.disable_progress_bar()
_CORPUS = [
    "the quick brown fox jumps over the lazy dog and then tells a long story about other things",
    "she sells sea shells by the shore while seven sailors sing softly under a silver summer sky",
] * 4


def write_tiny_model(
    folder: Path,
    seed: int = 0,
    *,
    eos_token_id: int | list[int] = IM_END,
    tie_word_embeddings: bool = False,
    max_position_embeddings: int = 512,
    config_type: type[PreTrainedConfig] = LlamaConfig,
    **settings: Any,
) -> Path:
    """Write a 2-layer model (hidden 64, 4 heads, 2 KV heads, float32) and return its folder.

    Args:
        config_type: of the model's family.
        settings: of that type, beside those given here.
    """
    config = config_type(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        dtype="float32",
        **settings,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            # transformers makes them 0 and 1: nobody would notice that they are not used.
            if name.endswith((".bias", "q_norm.weight", "k_norm.weight")):
                parameter.data.normal_(1, 0.5)
    model.generation_config = GenerationConfig(eos_token_id=eos_token_id, pad_token_id=0)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def write_eos_model(folder: Path) -> Path:
    """Write the tiny model with one more end-of-sequence token: what it says at once to EOS_PROMPT."""
    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(folder), dtype=torch.float32)
    with torch.inference_mode():
        first = int(model(torch.tensor([EOS_PROMPT])).logits[0, -1].argmax())
    return write_tiny_model(folder, eos_token_id=[IM_END, first])


def _tokenizer() -> PreTrainedTokenizerFast:
    """Train byte-level BPE on ASCII alone: an emoji or a Chinese character is several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
