"""The layers that take the place of mlx-lm's: frozen weights of any dtype, LoRA beside them, nothing compiled.

A layer answers in the dtype of its input, whatever its weights' dtype, and MLX computes in the wider of the two. So one
loaded base answers in its own dtype, and in float32 where the embedding is asked for float32. mlx-lm's own layers call
functions that MLX compiles; on a CPU that runs g++ where there is one and keeps its output in a folder under /tmp.
"""

from collections.abc import Callable, Mapping

import mlx.core as mx
import numpy as np

Activation = Callable[[mx.array], mx.array]


class Adapters:
    """What every adapted layer of one model reads when it is called: the adapter arrays by name, and their scale.
    None: the base."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.arrays: Mapping[str, mx.array] | None = None


class Linear:
    """`x W^T + bias + scale (x A^T) B^T` for x (..., in), W (out, in), A (rank, in), B (out, rank).

    A and B are float32, so their part is computed in float32, forwards and backwards.
    """

    def __init__(self, weight: mx.array, bias: mx.array | None) -> None:
        self.weight = weight
        self.bias = bias
        self._name = ""
        self._adapters: Adapters | None = None

    def adapt(self, name: str, adapters: Adapters) -> None:
        self._name, self._adapters = name, adapters

    def __call__(self, x: mx.array) -> mx.array:
        y = x @ self.weight.T
        if self.bias is not None:
            y = y + self.bias
        if self._adapters is not None and self._adapters.arrays is not None:
            a, b = (self._adapters.arrays[f"{self._name}.lora_{side}"] for side in "AB")
            y = y + ((x @ a.T) * self._adapters.scale) @ b.T
        return y.astype(x.dtype)


class Norm:
    """Root mean square normalisation (Zhang and Sennrich 2019)."""

    def __init__(self, weight: mx.array, epsilon: float) -> None:
        self.weight, self.epsilon = weight, epsilon

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self.epsilon).astype(x.dtype)


class Rotary:
    """Rotary positions (Su et al. 2021) on the first `dims` numbers of a head, its halves paired.

    The wavelengths are powers in float32, as in transformers. Those that MLX computes from a base differ in the last
    digits, which shows at long positions.
    """

    def __init__(self, dims: int, base: float, scale: float) -> None:
        self.dims = dims
        self._wavelengths = mx.array(np.float32(base) ** (np.arange(0, dims, 2, dtype=np.float32) / dims) / scale)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        freqs = self._wavelengths
        return mx.fast.rope(x, self.dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=freqs)


class GatedMLP:
    """`down(activation(gate(x)) * up(x))`; where the file fuses gate and up, `gate` computes both and `up` is None."""

    def __init__(self, gate: Linear, up: Linear | None, down: Linear, activation: Activation) -> None:
        self.gate, self.up, self.down, self.activation = gate, up, down, activation

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = (self.gate(x), self.up(x)) if self.up is not None else mx.split(self.gate(x), 2, axis=-1)
        return self.down(self.activation(gate) * up)


def silu(x: mx.array) -> mx.array:
    """`x sigmoid(x)`."""
    return x * mx.sigmoid(x)


def gelu_tanh(x: mx.array) -> mx.array:
    """GELU in its tanh form (Hendrycks and Gimpel 2016)."""
    return 0.5 * x * (1 + mx.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


ACTIVATIONS: dict[str, Activation] = {"silu": silu, "gelu_pytorch_tanh": gelu_tanh}
