"""The layers that replace a model's linears and input embedding: frozen weights of any dtype, with LoRA beside them.

Weights keep the dtype they were loaded in; a layer computes in the dtype of its input. So one loaded base answers in
its own dtype, and in float32 where the input embedding is asked for float32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call


class Mode:
    """What every replaced layer of one model reads when it is called: whether adapters take part, and whether the
    embedding answers in float32 instead of the weights' dtype."""

    def __init__(self) -> None:
        self.adapter = True
        self.float32 = False


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which to multiply for an input like `x`.

    CPUs below AVX-512 multiply bfloat16 some ten to a hundred times slower than float32. There the same bfloat16
    numbers are multiplied in float32 and the product is rounded, which is what accumulation in float32 means.
    """
    if x.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        return torch.float32
    return x.dtype


class _AdaptedProduct(torch.autograd.Function):
    """`x W^T + bias + scale (x A^T) B^T` for x (tokens, in), W (out, in), A (rank, in), B (out, rank).

    Written out because W is frozen: only x and the rank-sized product are kept for backward. A and B may be None.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, scale: float
    ) -> Tensor:
        y, low = _product(x, weight, bias, a, b, scale)
        ctx.save_for_backward(x, low, a, b)
        ctx.weight, ctx.scale = weight, scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, low, a, b = ctx.saved_tensors
        dtype = matmul_dtype(x)
        g = gradient.to(dtype)
        g_x = g_a = g_b = g_low = None
        if low is not None:
            g_low = (g @ b.to(dtype)).mul_(ctx.scale)
            # What leaves for the optimizer is float32 from the product on, whatever the factors' dtype.
            g_a = g_low.float().t() @ x.float()
            g_b = (g.float().t() @ low.float()).mul_(ctx.scale)
        if ctx.needs_input_grad[0]:
            g_x = g @ ctx.weight.to(dtype)
            if low is not None:
                g_x.addmm_(g_low, a.to(dtype))
            g_x = g_x.to(x.dtype)
        return g_x, None, None, g_a, g_b, None


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    dtype = matmul_dtype(x)
    wide = x.to(dtype)
    y = F.linear(wide, weight.to(dtype), None if bias is None else bias.to(dtype))
    low = None
    if a is not None and b is not None:
        low = F.linear(wide, a.to(dtype))
        y.addmm_(low, b.to(dtype).t(), alpha=scale)
    return y.to(x.dtype), low


class Linear(nn.Module):
    """Takes the place of a frozen `nn.Linear`; `adapt` gives it an adapter that `mode.adapter` switches."""

    def __init__(self, base: nn.Linear, mode: Mode) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.in_features, self.out_features = base.in_features, base.out_features
        self._mode = mode
        self._a: Tensor | None = None
        self._b: Tensor | None = None
        self._scale = 0.0

    def adapt(self, a: Tensor, b: Tensor, scale: float) -> None:
        """Adapt with a (rank, in) and b (out, rank), both float32 and owned by the training state."""
        self._a, self._b, self._scale = a, b, scale

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        a, b = (self._a, self._b) if self._mode.adapter else (None, None)
        if torch.is_grad_enabled():
            y = _AdaptedProduct.apply(flat, self.weight, self.bias, a, b, self._scale)
        else:
            y, _ = _product(flat, self.weight, self.bias, a, b, self._scale)
        return y.view(*x.shape[:-1], self.out_features)


class InputEmbedding(nn.Module):
    """Takes the place of the input embedding, and answers in float32 when `mode.float32` asks for it.

    The original computes on the float32 copy of just the rows it looks up: families differ in what they do with them.
    """

    def __init__(self, base: nn.Embedding, mode: Mode) -> None:
        super().__init__()
        base.padding_idx = None  # only steers gradients, and there are none
        self.base = base
        self._mode = mode

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, ids: Tensor) -> Tensor:
        if not self._mode.float32 or self.base.weight.dtype == torch.float32:
            return self.base(ids)
        rows = self.base.weight[ids.reshape(-1)].float()
        local = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        return functional_call(self.base, {"weight": rows}, (local,))


class SelectingHead(nn.Module):
    """Takes the place of the output layer and computes logits only at `positions` of the flattened input.

    Every family's own work on the logits (caps, scales) follows, on (positions, vocabulary) instead of (rows, tokens,
    vocabulary). A model's `logits_to_keep` cannot do this where rows need different positions.
    """

    def __init__(self, base: Linear) -> None:
        super().__init__()
        self.base = base
        self.positions: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, hidden: Tensor) -> Tensor:
        assert self.positions is not None, "CausalModel.logits sets the positions"
        return self.base(hidden.reshape(-1, hidden.shape[-1]).index_select(0, self.positions))
