"""A llama in float64 that shares no code with any engine: what the engine suite takes for the truth.

It computes whole rows without a cache, repeats key-value heads, turns them as complex numbers and, unlike any engine,
merges the adapter into the weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from spill.arrays import load_float32, read_header
from spill.engine import AdapterSpec, Int32, Row

Float64 = NDArray[np.float64]


@frozen(kw_only=True, eq=False)
class Greedy:
    """A prompt and the tokens that follow greedily."""

    prompt: Int32
    tokens: list[int]


class Reference:
    """The model of a `tiny_model` folder."""

    def __init__(self, model_dir: Path) -> None:
        self._config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        path = model_dir / "model.safetensors"
        self._base = {
            name.removesuffix(".weight"): load_float32(path, info).astype(np.float64)
            for name, info in read_header(path).items()
        }

    def logits(self, tokens: Int32, spec: AdapterSpec, adapter: Mapping[str, NDArray[Any]] | None) -> Float64:
        """(n, vocabulary) after each of the n tokens; `adapter` may be float64 too, None is the base."""
        weights = dict(self._base)
        if adapter is not None:
            for target in spec.targets:
                down = adapter[f"{target.name}.lora_A"].astype(np.float64)
                up = adapter[f"{target.name}.lora_B"].astype(np.float64)
                weights[target.name] = weights[target.name] + spec.alpha / spec.rank * up @ down
        x: Float64 = weights["model.embed_tokens"][tokens]
        for layer in range(self._config["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            inside = {key.removeprefix(name): value for key, value in weights.items() if key.startswith(name)}
            x = x + self._attend(self._norm(x, inside["input_layernorm"]), inside)
            y = self._norm(x, inside["post_attention_layernorm"])
            gate = y @ inside["mlp.gate_proj"].T
            up = y @ inside["mlp.up_proj"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ inside["mlp.down_proj"].T
        head = weights.get("lm_head", weights["model.embed_tokens"])
        return self._norm(x, weights["model.norm"]) @ head.T

    def losses(self, row: Row, spec: AdapterSpec, adapter: Mapping[str, NDArray[Any]] | None) -> Float64:
        """The loss of every answer token, in nats."""
        logits = self.logits(row.tokens, spec, adapter)
        answers = [i for i in range(len(row.tokens)) if row.mask[i]]
        return np.array([np.logaddexp.reduce(logits[i - 1]) - logits[i - 1, row.tokens[i]] for i in answers])

    def greedy(
        self, prompt: Int32, count: int, margin: float, spec: AdapterSpec, adapter: Mapping[str, NDArray[Any]] | None
    ) -> Greedy | None:
        """The `count` tokens that follow; None where one of them wins by less than `margin` logits."""
        tokens: list[int] = []
        for _ in range(count):
            logits = self.logits(np.array([*prompt, *tokens], np.int32), spec, adapter)[-1]
            second, first = np.sort(logits)[-2:]
            if first - second < margin:
                return None
            tokens.append(int(logits.argmax()))
        return Greedy(prompt=prompt, tokens=tokens)

    def _norm(self, x: Float64, weight: Float64) -> Float64:
        scaled: Float64 = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + self._config["rms_norm_eps"]) * weight
        return scaled

    def _attend(self, x: Float64, weights: Mapping[str, Float64]) -> Float64:
        size, heads, kv_heads = (self._config[k] for k in ("head_dim", "num_attention_heads", "num_key_value_heads"))
        frequencies = self._config["rope_theta"] ** (-np.arange(size // 2) / (size // 2))
        turns = np.exp(1j * np.outer(np.arange(len(x)), frequencies))
        q, k, v = (x @ weights[f"self_attn.{part}_proj"].T for part in "qkv")
        mixed = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            own, shared = slice(head * size, (head + 1) * size), slice(group * size, (group + 1) * size)
            query, key = (part[:, : size // 2] + 1j * part[:, size // 2 :] for part in (q[:, own], k[:, shared]))
            # The real part of a product with a conjugate is the dot product of the two as pairs.
            scores = np.real((query * turns) @ (key * turns).conj().T) / np.sqrt(size)
            scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
            odds = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed.append(odds / odds.sum(axis=1, keepdims=True) @ v[:, shared])
        out: Float64 = np.concatenate(mixed, axis=1) @ weights["self_attn.o_proj"].T
        return out
