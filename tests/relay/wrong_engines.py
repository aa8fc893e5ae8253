"""The engine mlx with one fault each, as plugins: what a handover on the real model must find."""

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from attrs import evolve

from spill.engine import TrainingState
from spill.plugins import Detection, EngineSpec, hookimpl
from spill_engine_mlx.opening import open_engine

NAMES = ("rope", "louder", "transposed", "swapped", "weights")


@hookimpl
def spill_engines() -> Iterable[EngineSpec]:
    for name in NAMES:
        yield EngineSpec(
            name=f"wrong-{name}",
            target=f"tests.relay.wrong_engines:open_{name}",
            contract=1,
            summary="for tests",
            detect=lambda: Detection(available=True, rank=-20, reason="for tests"),
        )


def open_rope(*, model_dir: Path, **how: Any) -> Any:
    """Reads a rotary base of 10000 where the model's is 100000, as a library that misses the key does."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(model_dir, copy, dirs_exist_ok=True)
        path = Path(copy) / "config.json"
        config = json.loads(path.read_text())
        assert (config.get("rope_theta") or config["rope_parameters"]["rope_theta"]) == 100000.0
        config.pop("rope_parameters", None)
        path.write_text(json.dumps({**config, "rope_theta": 10000.0}))
        return open_engine(model_dir=Path(copy), **how)


def open_louder(**how: Any) -> Any:
    """Applies the adapter 1.02 times."""
    engine = open_engine(**how)
    engine._model._adapters.scale *= 1.02
    return engine


def open_transposed(**how: Any) -> Any:
    """Reads one factor in the other orientation: the same numbers, laid down as (in, rank)."""
    engine = open_engine(**how)
    right = engine._state.parameters

    def parameters() -> dict[str, Any]:
        arrays = right()
        name = "model.layers.3.mlp.down_proj.lora_A"
        rank, features = arrays[name].shape
        return {**arrays, name: arrays[name].reshape(features, rank).T}

    engine._state.parameters = parameters
    return engine


def open_swapped(**how: Any) -> Any:
    """Takes the first moment for the second and the other way round, which no loss shows."""
    engine = open_engine(**how)
    right = engine.import_state

    def import_state(state: TrainingState) -> None:
        right(evolve(state, first_moment=state.second_moment, second_moment=state.first_moment))

    engine.import_state = import_state
    return engine


def open_weights(**how: Any) -> Any:
    """Computes with another model's weights of the same shapes: each of the second layer's is off by some 2 %."""
    engine = open_engine(**how)
    chance = np.random.default_rng(0)
    for name, linear in engine._model._linears.items():
        if name.startswith("model.layers.1."):
            noise = chance.normal(1, 0.02, linear.weight.shape).astype(np.float32)
            linear.weight = linear.weight * mx.array(noise)
    return engine
