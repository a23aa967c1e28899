"""Convert a GGUF file into a model folder: float32 safetensors, tokenizer, chat template, settings.

Run by `store.py` as a process: python -m common.model.convert GGUF FOLDER DTYPE. Knows no cache and no
network.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Write `folder` from `gguf`; the tensors keep every bit of what dequantization gives.

    Args:
        gguf: the file.
        folder: made here.
        dtype: what config.json says the model is made for, and `--dtype auto` takes.
    """
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # save_pretrained refuses a model that says it is quantized; its tensors no longer are.
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(model).pop(name, None)
    vars(model.config).pop("quantization_config", None)
    # End-of-sequence ids are those of the file's metadata, which transformers puts into the config.
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"dtype": dtype}, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
