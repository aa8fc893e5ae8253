"""A causal language model of mlx-lm, opened from safetensors, with layers, masks and caches of our own."""

import importlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from spill.arrays import TensorInfo, read_header
from spill.engine import Target, Tick
from spill.errors import ModelError
from spill_engine_mlx.architecture import Architecture, read_architecture
from spill_engine_mlx.layers import ACTIVATIONS, Adapters, GatedMLP, Linear, Norm, Rotary

_READABLE = ("F32", "F16", "BF16")
_EMBEDDING, _HEAD, _FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
# A position that no query reaches, for keys that nobody may see.
HIDDEN = 2**30


class Cache(Protocol):
    """What mlx-lm's attention asks of a cache: `offset`, the position of the first token given to it (an int, or int32
    (rows,)), and to append keys and values (rows, heads, tokens, size) and answer with all of them."""

    offset: int | mx.array

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]: ...


class Past:
    """The keys and values of one layer for the tokens computed so far, in `held`. A prefix that was computed once, with
    one row, is seen by any number of rows after it."""

    def __init__(self, offset: int = 0, held: Sequence[mx.array] = ()) -> None:
        self.offset: int | mx.array = offset
        self.held = held

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.held:
            keys, values = _appended(self.held[0], keys), _appended(self.held[1], values)
        self.held = (keys, values)
        return keys, values


class CausalModel:
    """Frozen weights, in their own dtype or answering in float32, with or without adapters.

    On a CPU the numbers of a bfloat16 model are kept as float32: MLX multiplies bfloat16 there far more slowly.
    """

    def __init__(self, model_dir: Path, dtype: mx.Dtype, scale: float, tick: Tick) -> None:
        """Load the base; adapters will be scaled by `scale`.

        Raises:
            ModelError: the files cannot be read, are not whole, or are of a model that this engine does not compute.
        """
        self.dtype = dtype
        self._stored = mx.float32 if mx.default_device() == mx.cpu else dtype
        self._architecture = read_architecture(model_dir)
        self._adapters = Adapters(scale)
        weights = _Weights(model_dir, dtype, self._stored)
        body, epsilon = _build(self._architecture, weights)
        self._linears: dict[str, Linear] = {}
        self._layers: list[Any] = []
        for index, layer in enumerate(body.layers):
            tick()
            self._replace(layer, f"model.layers.{index}", weights)
            self._layers.append(layer)
        tick()
        self._norm = self._new_norm(weights.load(_FINAL_NORM), epsilon)
        self._embedding = weights.load(_EMBEDDING)
        tick()
        self._head = Linear(weights.load(_HEAD) if _HEAD in weights.names else self._embedding, None)
        self.vocabulary = int(self._embedding.shape[0])

    def adapt(self, target: Target) -> None:
        """Give a layer the adapter of its name.

        Raises:
            ValueError: there is no linear layer of this name, or its sizes differ.
        """
        linear = self._linears.get(target.name)
        if linear is None:
            raise ValueError(f"no linear layer {target.name!r} in this model: it cannot be adapted")
        rows, columns = linear.weight.shape
        if (columns, rows) != (target.in_features, target.out_features):
            raise ValueError(
                f"linear layer {target.name!r} maps {columns} to {rows} features, "
                f"but the adapter {target.in_features} to {target.out_features}"
            )
        linear.adapt(target.name, self._adapters)

    def new_past(self) -> list[Past]:
        """Of every layer, before the first token."""
        return [Past() for _ in self._layers]

    def states(
        self,
        ids: mx.array,
        past: Sequence[Cache],
        mask: "Mask",
        adapters: Mapping[str, mx.array] | None,
        dtype: mx.Dtype,
    ) -> mx.array:
        """The last layer's output (rows, tokens, features) for `ids` int32 (rows, tokens), computed in `dtype`.

        Args:
            past: one per layer; each takes in the tokens of `ids`.
            mask: which keys, past and new, the tokens of `ids` see.
            adapters: by name, float32; None is the base.
        """
        with self._adapted(adapters):
            h = self._embedding[ids].astype(dtype)
            if self._architecture.embedding_scale != 1:
                h = h * mx.array(self._architecture.embedding_scale, dtype=dtype)
            masks = {window: mask.array(window, self._architecture.grouped_scores) for window in set(self._windows)}
            for layer, window, before in zip(self._layers, self._windows, past, strict=True):
                h = layer(h, masks[window], before)
        return h

    def logits(self, states: mx.array, positions: mx.array) -> mx.array:
        """Logits (positions, vocabulary) at int32 positions of the flattened (rows, tokens) of `states`."""
        chosen = states.reshape(-1, states.shape[-1])[positions]
        logits = self._head(self._norm(chosen))
        cap = self._architecture.logit_cap
        return cap * mx.tanh(logits / cap) if cap else logits

    @property
    def _windows(self) -> tuple[int, ...]:
        return self._architecture.windows

    @contextmanager
    def _adapted(self, adapters: Mapping[str, mx.array] | None) -> Iterator[None]:
        self._adapters.arrays = adapters
        try:
            yield
        finally:
            self._adapters.arrays = None

    def _replace(self, layer: nn.Module, place: str, weights: "_Weights") -> None:
        """Put our own layers, with weights, into a block of mlx-lm's."""
        for name, module in layer.named_modules():
            parent, _, attribute = name.rpartition(".")
            if isinstance(module, nn.Linear):
                bias = weights.load(f"{place}.{name}.bias") if "bias" in module else None
                linear = Linear(weights.load(f"{place}.{name}.weight"), bias)
                self._linears[f"{place}.{name}"] = linear
                new: Linear | Norm | Rotary = linear
            elif _is_norm(module):
                new = self._new_norm(weights.load(f"{place}.{name}.weight"), module.eps)
            elif isinstance(module, nn.RoPE):
                new = Rotary(module.dims, module.base, module.scale)
            else:
                continue
            setattr(_submodule(layer, parent), attribute, new)
        mlp, activation = layer.mlp, ACTIVATIONS[self._architecture.activation]
        fused = hasattr(mlp, "gate_up_proj")
        gate, up = (mlp.gate_up_proj, None) if fused else (mlp.gate_proj, mlp.up_proj)
        layer.mlp = GatedMLP(gate, up, mlp.down_proj, activation)

    def _new_norm(self, weight: mx.array, epsilon: float) -> Norm:
        offset = self._architecture.norm_offset
        # Next to 1 bfloat16 has too few digits.
        return Norm(weight.astype(mx.float32) + offset if offset else weight, epsilon)


class Mask:
    """Which keys queries see, by position: those at or before their own, and within a layer's window."""

    def __init__(self, queries: mx.array, keys: mx.array) -> None:
        """Positions, int32 (rows or 1, queries) and (rows or 1, keys); HIDDEN for keys that nobody sees."""
        self._distance = queries[:, :, None] - keys[:, None, :]

    def array(self, window: int, grouped: bool) -> mx.array:
        """bool (rows or 1, 1, queries, keys), with one more axis of 1 where scores are grouped by key head."""
        seen = self._distance >= 0
        if window:
            seen = seen & (self._distance < window)
        return seen[:, None, None] if grouped else seen[:, None]


class _Weights:
    """The tensors of a model directory, by name; each is read when it is asked for."""

    def __init__(self, model_dir: Path, dtype: mx.Dtype, stored: mx.Dtype) -> None:
        """Read the headers. Tensors will be cast to `dtype`, and their numbers kept as `stored`.

        Raises:
            ModelError: a file is not safetensors, or not whole.
        """
        self.directory, self._dtype, self._stored = model_dir, dtype, stored
        self._infos: dict[str, TensorInfo] = {}
        self._paths: dict[str, Path] = {}
        self._files: dict[Path, dict[str, mx.array]] = {}
        for path in sorted(model_dir.glob("model*.safetensors")):
            for name, info in read_header(path).items():
                self._infos[name], self._paths[name] = info, path

    def check(self, needed: Mapping[str, tuple[int, ...]]) -> None:
        """Compare with the shapes that a model needs.

        Raises:
            ModelError: a tensor is missing, unknown, of another shape, or of a dtype that cannot be read.
        """
        faults = [f"{name} is missing" for name in sorted(needed.keys() - self._infos.keys())]
        for name, info in self._infos.items():
            if name.endswith("rotary_emb.inv_freq"):  # computed anew, as transformers does
                continue
            if name not in needed:
                faults.append(f"{name} is not part of such a model")
            elif info.shape != needed[name] or info.dtype not in _READABLE:
                kinds = ", ".join(_READABLE)
                faults.append(f"{name} is {info.dtype} {info.shape}, it must be {needed[name]} and one of {kinds}")
        if faults:
            more = f" (and {len(faults) - 1} more)" if faults[1:] else ""
            raise ModelError(f"the weights in {self.directory} do not fit its config.json: {faults[0]}{more}", faults)

    @property
    def names(self) -> Collection[str]:
        return self._infos.keys()

    def load(self, name: str) -> mx.array:
        """One tensor, cast, and on the device when this returns."""
        path = self._paths[name]
        if path not in self._files:
            self._files[path] = mx.load(str(path))
        array = self._files[path].pop(name).astype(self._dtype).astype(self._stored)
        mx.eval(array)
        return array


def _build(architecture: Architecture, weights: _Weights) -> tuple[nn.Module, float]:
    """mlx-lm's model without its head, for which `weights` are whole, and its norms' epsilon. Its random weights are
    never computed, and the generator that they would be drawn from is left as it was.

    Raises:
        ModelError: mlx-lm cannot build it, or the weights do not fit.
    """
    last = f"model.layers.{len(architecture.windows) - 1}.input_layernorm.weight"
    if last not in weights.names:  # before anything of that many layers is built
        raise ModelError(f"the weights in {weights.directory} do not fit its config.json: {last} is missing")
    module = importlib.import_module(f"mlx_lm.models.{architecture.module}")
    high, low = mx.random.state[0].tolist()
    try:
        arguments = module.ModelArgs.from_dict(architecture.arguments)
        body = module.Model(arguments).model
    except Exception as error:  # sizes that do not go together, each found in its own way
        cause = " ".join(str(error).split())
        raise ModelError(f"mlx-lm cannot build this {architecture.module}: {type(error).__name__}: {cause}") from error
    finally:
        mx.random.seed((high << 32) | low)
    needed = {f"model.{name}": tuple(array.shape) for name, array in tree_flatten(body.parameters())}
    if _HEAD in weights.names or not architecture.tied:
        needed[_HEAD] = needed[_EMBEDDING]
    weights.check(needed)
    return body, arguments.rms_norm_eps


def _appended(before: mx.array, new: mx.array) -> mx.array:
    rows = new.shape[0]
    if before.shape[0] != rows:
        before = mx.broadcast_to(before, (rows, *before.shape[1:]))
    return mx.concatenate([before, new], axis=2)


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__ == "RMSNorm"


def _submodule(module: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        module = getattr(module, name)
    return module
