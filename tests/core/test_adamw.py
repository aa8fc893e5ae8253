"""The numpy AdamW against its formula in plain Python numbers."""

import math

import numpy as np
import pytest

from spill.adamw import global_norm, reference_step
from spill.engine import TrainingState, Update


def state_of(value: float) -> TrainingState:
    def array(number: float) -> dict[str, np.ndarray]:
        return {"x": np.full((1, 1), number, np.float32)}

    return TrainingState(adapter=array(value), first_moment=array(0.0), second_moment=array(0.0))


def test_twelve_updates_of_one_number_follow_the_formula() -> None:
    p, m, v = 0.7, 0.0, 0.0
    state = state_of(p)
    for step in range(1, 13):
        g = math.sin(3 * step) * 2
        update = Update(step=step, learning_rate=0.1 / step, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.2)
        state = reference_step(state, {"x": np.full((1, 1), g, np.float32)}, update)
        g *= min(1.0, 1.0 / (abs(g) + 1e-6)) if abs(g) > 1 else 1.0
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        p -= update.learning_rate * 0.2 * p
        p -= update.learning_rate * (m / (1 - 0.8**step)) / (math.sqrt(v / (1 - 0.9**step)) + 1e-3)
        found = [float(arrays["x"][0, 0]) for arrays in state.groups().values()]
        assert found == pytest.approx([p, m, v], rel=1e-5)


def test_the_first_step_has_the_learning_rates_length() -> None:
    after = reference_step(state_of(1.0), {"x": np.full((1, 1), -0.03, np.float32)}, Update(step=1, learning_rate=0.25))
    assert after.adapter["x"][0, 0] == pytest.approx(1.25, rel=1e-5)


def test_nothing_given_changes_and_everything_stays_float32() -> None:
    before, gradient = state_of(0.5), {"x": np.full((1, 1), 9.0, np.float32)}
    after = reference_step(before, gradient, Update(step=1, learning_rate=0.1))
    assert [float(a["x"][0, 0]) for a in before.groups().values()] == [0.5, 0.0, 0.0]
    assert gradient["x"][0, 0] == 9.0
    assert all(array.dtype == np.float32 for arrays in after.groups().values() for array in arrays.values())
    assert not any(np.shares_memory(a["x"], b["x"]) for a in after.groups().values() for b in before.groups().values())


def test_the_norm_spans_all_arrays_and_does_not_overflow() -> None:
    assert global_norm({"a": np.full((2, 2), 3, np.float32), "b": np.full((1,), 8, np.float32)}) == 10.0
    assert global_norm({"a": np.full((4,), 1e30, np.float32)}) == pytest.approx(2e30)
    assert global_norm({}) == 0.0
