"""A tokenizer for a model that has none: its vocabulary, with a text for each id, and no language.

With it, a server of random weights does the work of a real one: it detokenizes, and takes text. Each byte of
text is a token, so a prompt has more tokens than words.
"""

from __future__ import annotations

import string
from itertools import islice, product
from pathlib import Path
from typing import Any

import click
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.model.spec import load_spec

_SPACE = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # as byte-level tokenizers write it
_LETTERS = 4  # of a word; enough for 456,976 of them


def stand_in(vocab_size: int) -> Any:
    """Return a byte-level tokenizer of so many ids: the 256 bytes, then words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (_SPACE + "".join(letters) for letters in product(string.ascii_lowercase, repeat=_LETTERS))
    pieces = [*alphabet, *islice(words, max(0, vocab_size - len(alphabet)))][:vocab_size]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
def main(folder: Path) -> None:
    """Write a tokenizer of the size that config.json names into a model's FOLDER."""
    stand_in(load_spec(folder, "dummy").vocab_size).save_pretrained(folder)


if __name__ == "__main__":
    main()
