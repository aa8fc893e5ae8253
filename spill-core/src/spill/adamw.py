"""AdamW in numpy: the definition that every engine is held to.

The formulas are those of torch.optim.AdamW (decoupled decay, bias correction, epsilon outside the corrected
root; Loshchilov and Hutter, arXiv 1711.05101) after torch.nn.utils.clip_grad_norm_. Arrays stay float32,
scalars are Python floats.
"""

import math

import numpy as np

from spill.engine import Arrays, Float32, TrainingState, Update


def global_norm(arrays: Arrays) -> float:
    """The L2 norm over all arrays together, summed in float64."""
    return math.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in arrays.values()))


def reference_step(state: TrainingState, gradient: Arrays, update: Update) -> TrainingState:
    """The state after one update. Nothing that is given changes; the new arrays share no memory with it.

    Args:
        state: float32 adapter and moments.
        gradient: of the objective, before clipping, float32, with the state's keys and shapes.
        update: `step` counts from 1.
    """
    norm = global_norm(gradient)
    factor = update.clip_norm / (norm + 1e-6) if norm > update.clip_norm else 1.0
    step_size = update.learning_rate / (1.0 - update.beta1**update.step)
    second_correction = math.sqrt(1.0 - update.beta2**update.step)
    adapter: dict[str, Float32] = {}
    first_moment: dict[str, Float32] = {}
    second_moment: dict[str, Float32] = {}
    for name, raw in gradient.items():
        clipped: Float32 = raw * factor
        first = state.first_moment[name] * update.beta1 + clipped * (1.0 - update.beta1)
        second = state.second_moment[name] * update.beta2 + clipped * clipped * (1.0 - update.beta2)
        decayed: Float32 = state.adapter[name] * (1.0 - update.learning_rate * update.weight_decay)
        denominator: Float32 = np.sqrt(second)
        denominator /= second_correction
        denominator += update.epsilon
        direction: Float32 = np.divide(first, denominator)
        adapter[name] = decayed - direction * step_size
        first_moment[name], second_moment[name] = first, second
    return TrainingState(adapter=adapter, first_moment=first_moment, second_moment=second_moment)
