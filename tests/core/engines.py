"""A plugin with engines for tests of handovers: the numpy engine under other names, right ones and wrong ones.

`other` computes the same function with other rounding on other hardware, in micro-batches of one row; it accepts every
compute dtype. Each of the rest has one fault that a handover must find.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from spill.engine import AdapterSpec, Facts, Float32, Numerics, Row, StepResult, Tick, TrainingState, Update
from spill.plugins import Detection, EngineSpec, hookimpl
from spill.testing.numpy_engine import NumpyEngine
from spill.testing.numpy_engine import open_engine as open_numpy

NAMES = ("other", "louder", "forgetful", "transposed", "otherbase", "stuck")


@hookimpl
def spill_engines() -> Iterable[EngineSpec]:
    for name in NAMES:
        yield EngineSpec(
            name=name,
            target=f"tests.core.engines:open_{name}",
            contract=1,
            summary="for tests",
            detect=lambda: Detection(available=True, rank=-20, reason="for tests"),
        )


class Other(NumpyEngine):
    """One row per micro-batch, losses with noise of float32's size, hardware of its own."""

    hardware = "abacus"
    dtype: Any = "float32"

    def facts(self) -> Facts:
        facts = super().facts()
        return evolve(facts, hardware=self.hardware, numerics=evolve(facts.numerics, dtype=self.dtype))

    def nll(self, rows: Sequence[Row], adapter: bool = True) -> list[Float32]:
        return [losses * losses.dtype.type(1 + 2e-7) for losses in super().nll(rows, adapter)]


class Louder(Other):
    """Applies the adapter with a scale that is 2 % too large."""

    def _adapter(self, wanted: bool) -> Any:
        adapter = super()._adapter(wanted)
        return evolve(adapter, scale=adapter.scale * 1.02) if adapter else None


class Forgetful(Other):
    """Drops the second moment on import, which no loss shows."""

    def import_state(self, state: TrainingState) -> None:
        super().import_state(evolve(state, second_moment={n: a * 0 for n, a in state.second_moment.items()}))


class Transposed(Other):
    """Gives square factors back transposed, as a library of the other orientation would."""

    def import_state(self, state: TrainingState) -> None:
        turned = {n: a.T.copy() if a.shape[0] == a.shape[1] else a for n, a in state.adapter.items()}
        super().import_state(evolve(state, adapter=turned))


class OtherBase(Other):
    """Reads another rotary base out of the same config."""


class Stuck(Other):
    """Hangs in its first step and never calls tick."""

    def step(self, batch: Sequence[Row], update: Update) -> StepResult:
        time.sleep(600)
        raise AssertionError("nobody waits that long")


def _open(kind: type[Other], model_dir: Path, adapter: AdapterSpec, numerics: Numerics, tick: Tick) -> Other:
    engine = open_numpy(model_dir=model_dir, adapter=adapter, numerics=evolve(numerics, dtype="float32"), tick=tick)
    engine.__class__ = kind
    assert isinstance(engine, Other)
    engine.dtype = numerics.dtype
    engine._numerics = evolve(engine._numerics, micro_batch_tokens=1)
    return engine


def open_other(**how: Any) -> Other:
    return _open(Other, **how)


def open_louder(**how: Any) -> Other:
    return _open(Louder, **how)


def open_forgetful(**how: Any) -> Other:
    return _open(Forgetful, **how)


def open_transposed(**how: Any) -> Other:
    return _open(Transposed, **how)


def open_stuck(**how: Any) -> Other:
    return _open(Stuck, **how)


def open_otherbase(*, model_dir: Path, **how: Any) -> Other:
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(model_dir, copy, dirs_exist_ok=True)
        path = Path(copy) / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 10000.0}))
        return _open(OtherBase, model_dir=Path(copy), **how)
