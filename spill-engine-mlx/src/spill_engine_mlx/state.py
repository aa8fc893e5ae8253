"""The training state on the device: adapter and moments, each one flat float32 array; clip and AdamW."""

import math
from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from spill.engine import AdapterSpec, Arrays, Float32, TrainingState, Update

# The norm's sum is taken on the device over squares of this side, then exactly. On a CPU MLX adds one term after the
# other, so a sum must be short to be good.
_NORM_SIDE = 32


class DeviceState:
    """Adapter and moments of one engine, zeros at first. MLX's arrays never change: an update makes new ones, and takes
    them over once all are computed."""

    def __init__(self, spec: AdapterSpec) -> None:
        self._shapes = spec.shapes()
        self._offsets: dict[str, int] = {}
        size = 0
        for name, shape in self._shapes.items():
            self._offsets[name] = size
            size += math.prod(shape)
        # Zeros at the end fill the last square of the norm's sum, and stay zeros.
        self._padding = -size % _NORM_SIDE**2
        zeros = mx.zeros(size + self._padding, dtype=mx.float32)
        mx.eval(zeros)
        self._adapter = self._first = self._second = zeros

    def parameters(self) -> dict[str, mx.array]:
        """The adapter by name, in the spec's shapes."""
        return {
            name: self._adapter[offset : offset + math.prod(self._shapes[name])].reshape(self._shapes[name])
            for name, offset in self._offsets.items()
        }

    def flat_zeros(self) -> mx.array:
        return mx.zeros_like(self._adapter)

    def flat(self, arrays: Mapping[str, mx.array]) -> mx.array:
        """Arrays of the spec's names as one flat array like the state's."""
        parts = [arrays[name].reshape(-1) for name in self._shapes]
        return mx.concatenate([*parts, mx.zeros(self._padding, dtype=mx.float32)])

    def apply(self, gradient: mx.array, update: Update, norm: float) -> None:
        """Clip a flat gradient of this global norm, and make one AdamW step: `spill.adamw.reference_step`."""
        if norm > update.clip_norm:
            gradient = gradient * (update.clip_norm / (norm + 1e-6))
        step_size = update.learning_rate / (1.0 - update.beta1**update.step)
        correction = math.sqrt(1.0 - update.beta2**update.step)
        first = self._first * update.beta1 + gradient * (1.0 - update.beta1)
        second = self._second * update.beta2 + gradient * gradient * (1.0 - update.beta2)
        direction = first / (mx.sqrt(second) / correction + update.epsilon)
        adapter = self._adapter * (1.0 - update.learning_rate * update.weight_decay) - direction * step_size
        mx.eval(adapter, first, second)
        self._adapter, self._first, self._second = adapter, first, second

    def export(self) -> TrainingState:
        """Copies of everything."""
        groups = [self._to_numpy(flat) for flat in (self._adapter, self._first, self._second)]
        return TrainingState(adapter=groups[0], first_moment=groups[1], second_moment=groups[2])

    def load(self, state: TrainingState) -> None:
        """Replace everything, once all of it is known to fit.

        Raises:
            ValueError: a key, shape or dtype is not the spec's. Nothing was changed.
        """
        for group, arrays in state.groups().items():
            self._check(group, arrays)
        flats = [
            self.flat({name: mx.array(array) for name, array in arrays.items()}) for arrays in state.groups().values()
        ]
        mx.eval(flats)
        self._adapter, self._first, self._second = flats

    def _check(self, group: str, arrays: Arrays) -> None:
        missing = sorted(self._shapes.keys() - arrays.keys())
        unknown = sorted(arrays.keys() - self._shapes.keys())
        if missing or unknown:
            raise ValueError(f"{group} does not hold the adapter's arrays: missing {missing}, unknown {unknown}")
        for name, shape in self._shapes.items():
            array = arrays[name]
            if array.shape != shape or array.dtype != np.float32:
                raise ValueError(f"{group} {name!r} must be float32 {shape}, but is {array.dtype} {array.shape}")

    def _to_numpy(self, flat: mx.array) -> dict[str, Float32]:
        whole = np.array(flat)
        return {
            name: whole[offset : offset + math.prod(self._shapes[name])].reshape(self._shapes[name]).copy()
            for name, offset in self._offsets.items()
        }


def global_norm(gradient: mx.array) -> float:
    """The L2 norm of a flat gradient."""
    squares = mx.square(gradient.reshape(-1, _NORM_SIDE, _NORM_SIDE)).sum(axis=2).sum(axis=1)
    return math.sqrt(math.fsum(squares.tolist()))
