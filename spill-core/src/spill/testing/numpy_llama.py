"""A llama in numpy: the forward pass with a key-value cache, and the backward pass down to the adapter arrays.

Everything is float32 and takes one row at a time. Arrays are named by their axes: `n` tokens of the row, `p` tokens
before it in the cache, `g` key-value heads, `r` query heads per key-value head, `d` a head's size.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, frozen

from spill.arrays import load_float32, read_header
from spill.engine import Arrays, Float32, Int32, Row, Tick
from spill.errors import ModelError

Tape = dict[str, Float32]


@frozen(kw_only=True)
class Sizes:
    """What config.json says of the model."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    epsilon: float
    rotary_base: float


@frozen(kw_only=True, eq=False)
class Adapter:
    """The arrays of an adapter, named as `AdapterSpec.shapes` does, and its scale, alpha / rank."""

    arrays: Arrays
    scale: float


@define(kw_only=True, eq=False)
class Cache:
    """Rotated keys and values (g, p, d) of the tokens so far, per layer; `length` is p."""

    keys: dict[int, Float32]
    values: dict[int, Float32]
    length: int = 0


class Llama:
    """The frozen base. Reads config.json and model.safetensors once and changes nothing afterwards."""

    def __init__(self, model_dir: Path, tick: Tick) -> None:
        """Calls `tick` before every tensor.

        Raises:
            ModelError: the files are missing, damaged, or of a model that this class does not compute.
        """
        self.sizes = _read_sizes(model_dir)
        path = model_dir / "model.safetensors"
        self._weights: dict[str, Float32] = {}
        for name, info in read_header(path).items():
            tick()
            self._weights[name.removesuffix(".weight")] = load_float32(path, info)
        self._head = "lm_head" if "lm_head" in self._weights else "model.embed_tokens"

    def linears(self) -> dict[str, tuple[int, int]]:
        """Every linear layer that an adapter may be put on, with its (out, in)."""
        return {
            name: (weight.shape[0], weight.shape[1])
            for name, weight in self._weights.items()
            if weight.ndim == 2 and name != "model.embed_tokens"
        }

    def losses(self, row: Row, adapter: Adapter | None, gradient: dict[str, Float32] | None = None) -> Float32:
        """The loss of every answer token, float32 (answer tokens,), in nats.

        Args:
            gradient: if given, the gradient of the losses' sum by every adapter array is added to it in place.
        """
        answers = np.flatnonzero(row.mask)
        if not len(answers):
            return np.zeros(0, np.float32)
        tape: Tape | None = None if gradient is None else {}
        hidden = self._hidden(row.tokens[:-1], adapter, tape, None)
        logits = self._linear(self._head, hidden[answers - 1], adapter, tape)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        exponentials: Float32 = np.exp(shifted)
        totals = exponentials.sum(axis=-1, keepdims=True)
        places = np.arange(len(answers))
        losses: Float32 = np.log(totals[:, 0]) - shifted[places, row.tokens[answers]]
        if gradient is not None and tape is not None and adapter is not None:
            by_logits: Float32 = exponentials / totals
            by_logits[places, row.tokens[answers]] -= 1.0
            by_hidden: Float32 = np.zeros_like(hidden)
            by_hidden[answers - 1] = self._linear_back(self._head, by_logits, adapter, tape, gradient)
            self._hidden_back(by_hidden, adapter, tape, gradient)
        return losses

    def next_logits(self, tokens: Int32, adapter: Adapter | None, cache: Cache) -> Float32:
        """The logits (vocabulary,) after `tokens`, which follow those in `cache` and are added to it."""
        hidden = self._hidden(tokens, adapter, None, cache)
        logits: Float32 = self._linear(self._head, hidden[-1:], adapter, None)[0]
        return logits

    def _hidden(self, tokens: Int32, adapter: Adapter | None, tape: Tape | None, cache: Cache | None) -> Float32:
        """(n, hidden) after the last norm."""
        x: Float32 = self._weights["model.embed_tokens"][tokens]
        for layer in range(self.sizes.layers):
            name = f"model.layers.{layer}"
            normed = self._norm(f"{name}.input_layernorm", x, tape)
            x = x + self._attention(layer, normed, adapter, tape, cache)
            normed = self._norm(f"{name}.post_attention_layernorm", x, tape)
            x = x + self._mlp(f"{name}.mlp", normed, adapter, tape)
        if cache is not None:
            cache.length += len(tokens)
        return self._norm("model.norm", x, tape)

    def _hidden_back(self, by_hidden: Float32, adapter: Adapter, tape: Tape, gradient: dict[str, Float32]) -> None:
        by_x = self._norm_back("model.norm", by_hidden, tape)
        for layer in reversed(range(self.sizes.layers)):
            name = f"model.layers.{layer}"
            by_normed = self._mlp_back(f"{name}.mlp", by_x, adapter, tape, gradient)
            by_x = by_x + self._norm_back(f"{name}.post_attention_layernorm", by_normed, tape)
            by_normed = self._attention_back(layer, by_x, adapter, tape, gradient)
            by_x = by_x + self._norm_back(f"{name}.input_layernorm", by_normed, tape)

    def _linear(self, name: str, x: Float32, adapter: Adapter | None, tape: Tape | None) -> Float32:
        y = x @ self._weights[name].T
        if adapter is not None and f"{name}.lora_A" in adapter.arrays:
            low = x @ adapter.arrays[f"{name}.lora_A"].T
            y = y + (low @ adapter.arrays[f"{name}.lora_B"].T) * adapter.scale
            if tape is not None:
                tape[f"{name}.x"], tape[f"{name}.low"] = x, low
        return y

    def _linear_back(
        self, name: str, by_y: Float32, adapter: Adapter, tape: Tape, gradient: dict[str, Float32]
    ) -> Float32:
        by_x = by_y @ self._weights[name]
        if f"{name}.lora_A" in adapter.arrays:
            by_scaled = by_y * adapter.scale
            by_low = by_scaled @ adapter.arrays[f"{name}.lora_B"]
            gradient[f"{name}.lora_B"] += by_scaled.T @ tape[f"{name}.low"]
            gradient[f"{name}.lora_A"] += by_low.T @ tape[f"{name}.x"]
            by_x = by_x + by_low @ adapter.arrays[f"{name}.lora_A"]
        return by_x

    def _norm(self, name: str, x: Float32, tape: Tape | None) -> Float32:
        factor: Float32 = ((x * x).mean(axis=-1, keepdims=True) + self.sizes.epsilon) ** -0.5
        if tape is not None:
            tape[f"{name}.x"], tape[f"{name}.factor"] = x, factor
        return x * factor * self._weights[name]

    def _norm_back(self, name: str, by_y: Float32, tape: Tape) -> Float32:
        x, factor = tape[f"{name}.x"], tape[f"{name}.factor"]
        by_scaled: Float32 = by_y * self._weights[name]
        by_x: Float32 = by_scaled * factor - x * factor**3 * (by_scaled * x).mean(axis=-1, keepdims=True)
        return by_x

    def _mlp(self, name: str, x: Float32, adapter: Adapter | None, tape: Tape | None) -> Float32:
        gate = self._linear(f"{name}.gate_proj", x, adapter, tape)
        up = self._linear(f"{name}.up_proj", x, adapter, tape)
        opened: Float32 = np.reciprocal(1.0 + np.exp(-gate))
        if tape is not None:
            tape[f"{name}.gate"], tape[f"{name}.up"], tape[f"{name}.opened"] = gate, up, opened
        return self._linear(f"{name}.down_proj", gate * opened * up, adapter, tape)

    def _mlp_back(
        self, name: str, by_y: Float32, adapter: Adapter, tape: Tape, gradient: dict[str, Float32]
    ) -> Float32:
        gate, up, opened = tape[f"{name}.gate"], tape[f"{name}.up"], tape[f"{name}.opened"]
        by_product = self._linear_back(f"{name}.down_proj", by_y, adapter, tape, gradient)
        by_up: Float32 = by_product * gate * opened
        slope: Float32 = opened + gate * opened * (1.0 - opened)
        by_gate: Float32 = by_product * up * slope
        return self._linear_back(f"{name}.gate_proj", by_gate, adapter, tape, gradient) + self._linear_back(
            f"{name}.up_proj", by_up, adapter, tape, gradient
        )

    def _attention(
        self, layer: int, x: Float32, adapter: Adapter | None, tape: Tape | None, cache: Cache | None
    ) -> Float32:
        name, sizes, n = f"model.layers.{layer}.self_attn", self.sizes, len(x)
        past = 0 if cache is None else cache.length
        q = self._split(self._linear(f"{name}.q_proj", x, adapter, tape), sizes.heads)
        k = self._split(self._linear(f"{name}.k_proj", x, adapter, tape), sizes.kv_heads)
        v = self._split(self._linear(f"{name}.v_proj", x, adapter, tape), sizes.kv_heads)
        cosine, sine = self._rotary(past, n)
        q, k = _rotate(q, cosine, sine), _rotate(k, cosine, sine)
        if cache is not None:
            if past:
                k = np.concatenate([cache.keys[layer], k], axis=1)
                v = np.concatenate([cache.values[layer], v], axis=1)
            cache.keys[layer], cache.values[layer] = k, v
        q = q.reshape(sizes.kv_heads, -1, n, sizes.head_size)  # (g, r, n, d)
        scores = q @ k[:, None].swapaxes(-1, -2) * sizes.head_size**-0.5  # (g, r, n, p + n)
        scores[..., ~np.tri(n, past + n, past, dtype=bool)] = -np.inf
        weights: Float32 = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        mixed = self._join((weights @ v[:, None]).reshape(sizes.heads, n, sizes.head_size))
        if tape is not None:
            tape[f"{name}.q"], tape[f"{name}.k"], tape[f"{name}.v"] = q, k, v
            tape[f"{name}.weights"] = weights
        return self._linear(f"{name}.o_proj", mixed, adapter, tape)

    def _attention_back(
        self, layer: int, by_y: Float32, adapter: Adapter, tape: Tape, gradient: dict[str, Float32]
    ) -> Float32:
        name, sizes, n = f"model.layers.{layer}.self_attn", self.sizes, len(by_y)
        q, k, v, weights = (tape[f"{name}.{part}"] for part in ("q", "k", "v", "weights"))
        by_mixed = self._split(self._linear_back(f"{name}.o_proj", by_y, adapter, tape, gradient), sizes.heads)
        by_mixed = by_mixed.reshape(q.shape)
        by_weights = by_mixed @ v[:, None].swapaxes(-1, -2)
        by_scores = weights * (by_weights - (by_weights * weights).sum(axis=-1, keepdims=True))
        by_scores = by_scores * sizes.head_size**-0.5
        by_q = (by_scores @ k[:, None]).reshape(sizes.heads, n, sizes.head_size)
        by_k = (by_scores.swapaxes(-1, -2) @ q).sum(axis=1)
        by_v = (weights.swapaxes(-1, -2) @ by_mixed).sum(axis=1)
        cosine, sine = self._rotary(0, n)
        by_x: Float32 = np.zeros((n, self._weights[f"{name}.q_proj"].shape[1]), np.float32)
        # A rotation's transpose turns the other way.
        for part, by_part in (("q", _rotate(by_q, cosine, -sine)), ("k", _rotate(by_k, cosine, -sine)), ("v", by_v)):
            by_x = by_x + self._linear_back(f"{name}.{part}_proj", self._join(by_part), adapter, tape, gradient)
        return by_x

    def _split(self, x: Float32, heads: int) -> Float32:
        """(n, heads * d) to (heads, n, d)."""
        return x.reshape(len(x), heads, self.sizes.head_size).swapaxes(0, 1)

    def _join(self, x: Float32) -> Float32:
        """(heads, n, d) to (n, heads * d)."""
        return x.swapaxes(0, 1).reshape(x.shape[1], -1)

    def _rotary(self, past: int, n: int) -> tuple[Float32, Float32]:
        """Cosines and sines (n, d / 2) of the positions from `past` on."""
        exponents = np.arange(0, self.sizes.head_size, 2, dtype=np.float32) / self.sizes.head_size
        frequencies = (self.sizes.rotary_base**-exponents).astype(np.float32)
        angles = np.arange(past, past + n, dtype=np.float32)[:, None] * frequencies
        return np.cos(angles), np.sin(angles)


def _rotate(x: Float32, cosine: Float32, sine: Float32) -> Float32:
    """Turn each pair (x[i], x[i + d / 2]) of the last axis by its angle: the halves are the pairs' two sides."""
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    return np.concatenate([left * cosine - right * sine, right * cosine + left * sine], axis=-1)


def _read_sizes(model_dir: Path) -> Sizes:
    path = model_dir / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}; is the model whole?") from error
    only: dict[str, object] = {"model_type": "llama", "hidden_act": "silu", "rope_scaling": None}
    only |= {"attention_bias": False, "mlp_bias": False}
    for key, value in only.items():
        if config.get(key, value) != value:
            raise ModelError(f"{path}: the numpy engine computes {key} {value!r} only, not {config[key]!r}")
    try:
        return Sizes(
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_size=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            epsilon=config["rms_norm_eps"],
            rotary_base=config["rope_theta"],
        )
    except KeyError as error:
        raise ModelError(f"{path} lacks {error}, which the numpy engine reads from its top level") from error
