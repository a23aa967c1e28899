"""A model without weights and tokenizer can be measured, and one with a stand-in tokenizer has text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.server import running
from benchmarks.stand_in_tokenizer import stand_in
from common.model.spec import load_spec
from gateway.text import TextPipeline
from tests.bench.test_serve import run_serve

LLAMA = Path(__file__).parents[2] / "benchmarks" / "llama-3.1-8b"


@pytest.mark.system
def test_baton_without_weights_and_tokenizer_is_measured(tmp_path: Path) -> None:
    config = json.loads((LLAMA / "config.json").read_text())
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {**sizes, "head_dim": 16, "intermediate_size": 128, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with running(tmp_path, "--load-format", "dummy") as url:
        sizes_of = ("--vocab-size", "512", "--prompt-tokens", "64", "--output-tokens", "8")
        values = run_serve(url, *sizes_of, "--num-requests", "6", "--concurrency", "2")
    assert values["failed"] == 0
    assert values["prompt length"] == 64
    assert values["output"] == pytest.approx(8 * values["answered"])


def test_stand_in_tokenizer_has_a_text_for_each_id_and_reads_any_text(tmp_path: Path) -> None:
    stand_in(1000).save_pretrained(tmp_path)
    pipeline = TextPipeline.load(tmp_path)
    (ids,) = pipeline.encode(["fox, \N{FOX FACE}"], special_tokens=True)
    assert max(ids) < 256
    detokenizer = pipeline.detokenizer()
    assert "".join(map(detokenizer.add, ids)) + detokenizer.flush() == "fox, \N{FOX FACE}"
    words = {pipeline.token_texts.of(token_id).text for token_id in range(256, 1000)}
    assert len(words) == 744
    assert all(word.startswith(" ") and len(word) == 5 for word in words)


def test_shape_of_llama_is_accepted() -> None:
    spec = load_spec(LLAMA, "dummy")
    assert (spec.hidden, spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == (4096, 32, 32, 8, 128)
    assert (spec.intermediate, spec.vocab_size, spec.dtype) == (14336, 128256, "bfloat16")
    assert spec.rope_scaling is not None
