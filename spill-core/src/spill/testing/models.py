"""Tiny language models on disk for tests: real files that numpy, transformers and mlx-lm load alike."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from spill.arrays import read_header, write_parts
from spill.engine import Float32, Target

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
VOCABULARY = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 48,
    vocabulary: int | None = None,
    tied: bool = True,
    max_positions: int = 512,
    rope_theta: float = 50000.0,
) -> Path:
    """Write a llama of random weights with tokenizer and chat template into `directory`, and return it.

    The files depend on the arguments alone. Token ids are the bytes of UTF-8, then `SPECIAL_TOKENS`;
    `<|im_end|>` ends a turn, and generation_config.json names `<|endoftext|>` as a second end. The rotary base
    is not the usual default, so that an engine that overlooks it computes another function.

    Args:
        vocabulary: rows of the embedding, at least `VOCABULARY`, which is also the default.
        tied: whether the head is the embedding; if not, the file holds `lm_head.weight`.
    """
    size = VOCABULARY if vocabulary is None else vocabulary
    if size < VOCABULARY or hidden % heads or heads % kv_heads or hidden // heads % 2:
        raise ValueError(f"no llama has these sizes: hidden {hidden}, {heads} / {kv_heads} heads, vocabulary {size}")
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "max_position_embeddings": max_positions,
        "vocab_size": size,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": VOCABULARY - 2,
        "eos_token_id": VOCABULARY - 1,
        "pad_token_id": VOCABULARY - 1,
        "torch_dtype": "float32",
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": [VOCABULARY - 1, 256]})
    _write_tokenizer(directory, max_positions)
    with (directory / "model.safetensors").open("wb") as file:
        for part in write_parts(_weights(config, seed), {"format": "pt"}):
            file.write(part)
    return directory


def block_targets(model_dir: Path) -> tuple[Target, ...]:
    """Every linear layer of the blocks of a `tiny_model`, in the file's order."""
    infos = read_header(model_dir / "model.safetensors")
    return tuple(
        Target(name=name.removesuffix(".weight"), in_features=info.shape[1], out_features=info.shape[0])
        for name, info in infos.items()
        if ".layers." in name and len(info.shape) == 2
    )


def _weights(config: dict[str, Any], seed: int) -> dict[str, Float32]:
    # Uniform draws are the same on every platform; normal ones pass through the platform's logarithm. Every weight is
    # a bfloat16 number, as in most published models, so that an engine which keeps the base so loses nothing.
    generator = np.random.Generator(np.random.Philox(seed))
    hidden, intermediate, size = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]

    def draw(*shape: int, deviation: float, mean: float = 0.0) -> Float32:
        drawn = ((generator.random(shape) - 0.5) * (deviation * 12**0.5) + mean).astype(np.float32)
        return (drawn.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    weights = {"model.embed_tokens.weight": draw(size, hidden, deviation=0.5)}
    linears = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = draw(hidden, deviation=0.2, mean=1.0)
        for name, shape in linears.items():
            weights[f"{prefix}.{name}.weight"] = draw(*shape, deviation=1.5 * shape[1] ** -0.5)
    weights["model.norm.weight"] = draw(hidden, deviation=0.2, mean=1.0)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = draw(size, hidden, deviation=0.5)
    return weights


def _write_tokenizer(directory: Path, max_positions: int) -> None:
    """A byte-level BPE without merges, as plain JSON: what the library writes depends on its version."""
    specials = [
        {
            "id": 256 + index,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, content in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": _byte_symbols() | {content: 256 + index for index, content in enumerate(SPECIAL_TOKENS)},
            "merges": [],
        },
    }
    _write_json(directory / "tokenizer.json", tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": TURN_START,
        "eos_token": TURN_END,
        "pad_token": TURN_END,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _byte_symbols() -> dict[str, int]:
    """GPT-2's printable sign for every byte: Latin-1's visible ones stand for themselves, the others take, in
    order, the signs from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols: dict[str, int] = {}
    hidden = 0
    for byte in range(256):
        symbols[chr(byte if byte in visible else 0x100 + hidden)] = byte
        hidden += byte not in visible
    return symbols


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8", newline="\n")
