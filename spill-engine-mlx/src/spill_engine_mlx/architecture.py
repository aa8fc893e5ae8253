"""What config.json means: read as transformers reads it, put into mlx-lm's words, refused where that cannot be."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from spill.errors import ModelError

# Behind rotary positions of any other kind (yarn, longrope, dynamic, ...) lie differences in defaults, and scales that
# depend on a row's length.
_PLAIN_ROPE = frozenset({"default"})
_SCALED_ROPE = frozenset({"default", "linear", "llama3"})


@frozen(kw_only=True)
class _Family:
    """A model type: the module of mlx_lm.models that computes it, the rotary positions it shares with transformers,
    values that the module takes for granted, by their name in the config, and which layers have sliding windows."""

    module: str
    rope: frozenset[str]
    fixed: Mapping[str, Any]
    windows: str  # "none", "all", or "typed": those that `layer_types` lists
    partial_rotary: bool = False


_SILU = {"hidden_act": "silu"}
# Exactly the families that tests/hop compares with transformers: losses, gradients, windows, padding, generation.
_FAMILIES = {
    "gemma2": _Family(
        module="gemma2",
        rope=_PLAIN_ROPE,
        fixed={
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "use_bidirectional_attention": (None, False),
        },
        windows="typed",
    ),
    "llama": _Family(module="llama", rope=_SCALED_ROPE, fixed=_SILU, windows="none"),
    "mistral": _Family(module="llama", rope=_SCALED_ROPE, fixed=_SILU, windows="all"),
    "phi3": _Family(module="phi3", rope=_PLAIN_ROPE, fixed=_SILU, windows="all", partial_rotary=True),
    "qwen2": _Family(module="qwen2", rope=_SCALED_ROPE, fixed=_SILU, windows="typed"),
    "qwen3": _Family(module="qwen3", rope=_SCALED_ROPE, fixed={**_SILU, "attention_bias": False}, windows="typed"),
}


@frozen(kw_only=True)
class Architecture:
    """A model as this engine builds it.

    Attributes:
        module: the module of mlx_lm.models.
        arguments: for that module's ModelArgs.
        windows: per layer, how many tokens a token sees, itself included; 0 is all before it.
        activation: a name in `layers.ACTIVATIONS`.
        tied: whether the head may be the embedding.
        embedding_scale: what embeddings are multiplied with.
        logit_cap: logits are `cap tanh(logits / cap)`; 0 is no cap.
        norm_offset: what is added to the weights of norms.
        grouped_scores: whether attention scores have an axis more, (rows, key heads, heads per key head, queries,
            keys), so that a mask needs one too.
    """

    module: str
    arguments: Mapping[str, Any]
    windows: tuple[int, ...]
    activation: str
    tied: bool
    embedding_scale: float = 1.0
    logit_cap: float = 0.0
    norm_offset: float = 0.0
    grouped_scores: bool = False


def read_architecture(model_dir: Path) -> Architecture:
    """Read config.json.

    Raises:
        ModelError: it cannot be read, or names something that mlx-lm does not compute as transformers does.
    """
    path = model_dir / "config.json"
    kind = _read_kind(path)
    family = _FAMILIES[kind]
    config = _read_config(path)
    rope = _read_rope(config, kind, family)
    for name, value in family.fixed.items():
        found = getattr(config, name, None)
        if found not in (value if isinstance(value, tuple) else (value,)):
            raise _refusal(kind, f"{name} {found!r}, where mlx-lm computes {value!r}")
    gemma = kind == "gemma2"
    caps = {name: getattr(config, name, None) or 0.0 for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    if gemma and not all(caps.values()):
        raise _refusal(kind, f"{caps}, where mlx-lm computes caps")
    return Architecture(
        module=family.module,
        arguments=_arguments(config, rope),
        windows=_windows(config, kind, family),
        activation=config.hidden_activation if gemma else config.hidden_act,
        tied=bool(config.tie_word_embeddings),
        embedding_scale=config.hidden_size**0.5 if gemma else 1.0,
        logit_cap=float(caps["final_logit_softcapping"]) if gemma else 0.0,
        norm_offset=1.0 if gemma else 0.0,
        grouped_scores=gemma and config.num_attention_heads > config.num_key_value_heads,
    )


def _read_kind(path: Path) -> str:
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}; is the model whole?") from error
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ModelError(
            f"the engine mlx does not compute models of type {kind!a}, only {', '.join(_FAMILIES)}: "
            "choose another engine or model"
        )
    for name in ("quantization", "quantization_config", "per_layer_config"):
        if raw.get(name):
            raise _refusal(kind, f"{name}, which this engine does not read")
    return kind


def _read_config(path: Path) -> PreTrainedConfig:
    try:
        with _quiet():
            return AutoConfig.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its validators raise a dozen kinds, down to ZeroDivisionError
        raise ModelError(f"transformers cannot read {path}: {' '.join(str(error).split())}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No log lines of transformers below errors, for a while."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _refusal(kind: str, what: str) -> ModelError:
    return ModelError(f"the engine mlx does not compute this {kind} model: it has {what}; choose another engine")


def _read_rope(config: PreTrainedConfig, kind: str, family: _Family) -> dict[str, Any]:
    """The rotary positions' parameters, complete: transformers moves them here from wherever the file has them."""
    rope = dict(config.rope_parameters or {})
    name = rope.get("rope_type")
    if name not in family.rope or not isinstance(rope.get("rope_theta"), (int, float)):
        known = " and ".join(sorted(family.rope))
        raise _refusal(kind, f"rotary positions {rope}, of which only {known} are known to be the same")
    if not family.partial_rotary and rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise _refusal(kind, f"partial_rotary_factor {rope['partial_rotary_factor']!r}, which mlx-lm ignores")
    return rope


def _arguments(config: PreTrainedConfig, rope: Mapping[str, Any]) -> dict[str, Any]:
    """The config in mlx-lm's words. Windows are left out: masks carry them."""
    arguments = config.to_dict()
    for name in ("layer_types", "sliding_window", "rope_parameters"):
        arguments.pop(name, None)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    scaling["type"] = rope["rope_type"]
    return {
        **arguments,
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_traditional": False,
        "partial_rotary_factor": rope.get("partial_rotary_factor") or 1.0,
    }


def _windows(config: PreTrainedConfig, kind: str, family: _Family) -> tuple[int, ...]:
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    if family.windows == "typed":
        types = list(config.layer_types)
    else:
        sliding = family.windows == "all" and window is not None
        types = ["sliding_attention" if sliding else "full_attention"] * layers
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown or len(types) != layers:
        raise _refusal(kind, f"{len(types)} layer types {sorted(set(types))} for {layers} layers")
    if "sliding_attention" not in types:
        return (0,) * layers
    if not isinstance(window, int) or window < 1:
        raise _refusal(kind, f"layers with a sliding window of {window!r}")
    return tuple(window if name == "sliding_attention" else 0 for name in types)
