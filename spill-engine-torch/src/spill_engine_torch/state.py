"""The training state on a device: adapter, gradient and moments, each one flat float32 buffer; clip and AdamW."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from spill.engine import AdapterSpec, Arrays, Float32, TrainingState, Update

# Every array starts on a cache line, and the buffers end on a whole row of the norm's sum. The gaps hold zeros,
# whose gradients are zero, so they stay zero.
_ALIGNMENT = 16
_NORM_ROW = 1024


class DeviceState:
    """Adapter and moments of one engine, zeros at first. `parameters` holds, by name, views of the flat adapter
    that require gradients; their `.grad` are views of the flat gradient, so that backward accumulates there."""

    def __init__(self, spec: AdapterSpec, device: torch.device) -> None:
        self._shapes = spec.shapes()
        self._offsets: dict[str, int] = {}
        size = 0
        for name, (rows, columns) in self._shapes.items():
            self._offsets[name] = size
            size += -(-rows * columns // _ALIGNMENT) * _ALIGNMENT
        size = -(-size // _NORM_ROW) * _NORM_ROW
        self._device = device
        self._adapter, self._gradient, self._first, self._second = (
            torch.zeros(size, dtype=torch.float32, device=device) for _ in range(4)
        )
        self.parameters = self._views(self._adapter)
        for name, gradient in self._views(self._gradient).items():
            self.parameters[name].requires_grad_(True).grad = gradient

    def zero_gradient(self) -> None:
        self._gradient.zero_()

    def gradient_norm(self) -> float:
        """The global L2 norm. Rows of fixed length are summed on the device and `math.fsum` adds them exactly, so
        the number of threads does not show."""
        rows = torch.linalg.vector_norm(self._gradient.view(-1, _NORM_ROW), dim=1)
        return math.sqrt(math.fsum(norm * norm for norm in rows.tolist()))

    def apply(self, update: Update, norm: float) -> None:
        """Clip the gradient, whose global norm is `norm`, and make one AdamW step (Loshchilov and Hutter 2019,
        bias-corrected, as torch.optim.AdamW)."""
        with torch.no_grad():
            if norm > update.clip_norm:
                self._gradient.mul_(update.clip_norm / (norm + 1e-6))
            adamw(
                [self._adapter],
                [self._gradient],
                [self._first],
                [self._second],
                [],
                # adamw counts the step itself before it uses it
                [torch.tensor(float(update.step - 1), dtype=torch.float32, device=self._device)],
                fused=True,
                amsgrad=False,
                beta1=update.beta1,
                beta2=update.beta2,
                lr=update.learning_rate,
                weight_decay=update.weight_decay,
                eps=update.epsilon,
                maximize=False,
            )

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
        flats = (self._adapter, self._first, self._second)
        with torch.no_grad():
            for flat, arrays in zip(flats, state.groups().values(), strict=True):
                for name, view in self._views(flat).items():
                    # A copy, because torch warns of arrays that may not be written.
                    view.copy_(torch.from_numpy(np.array(arrays[name], order="C")))

    def _check(self, group: str, arrays: Arrays) -> None:
        missing = sorted(self._shapes.keys() - arrays.keys())
        unknown = sorted(arrays.keys() - self._shapes.keys())
        if missing or unknown:
            raise ValueError(f"{group} does not hold the adapter's arrays: missing {missing}, unknown {unknown}")
        for name, shape in self._shapes.items():
            array = arrays[name]
            if array.shape != shape or array.dtype != np.float32:
                found = f"{array.dtype} {array.shape}"
                raise ValueError(f"{group} {name!r} must be float32 {shape}, but is {found}")

    def _to_numpy(self, flat: Tensor) -> Mapping[str, Float32]:
        # On a CPU .numpy() shares memory, and every array is to own its own: hence the second copy.
        return {name: view.cpu().numpy().copy() for name, view in self._views(flat).items()}

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        return {
            name: flat[offset : offset + math.prod(self._shapes[name])].view(self._shapes[name])
            for name, offset in self._offsets.items()
        }
