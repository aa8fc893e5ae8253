"""Exports in the libraries they are made for: peft, mlx-lm, and transformers for a merged model."""

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers

from spill.engine import AdapterSpec, Numerics, Row, TrainingState
from spill.export import write_adapter, write_merged
from spill.models import Model, resolve
from spill.recipe import initial_state
from spill.records import Plan
from spill.testing.models import block_targets, tiny_model
from spill_engine_torch.engine import open_cpu

TOKENS = (np.arange(48, dtype=np.int64) * 7) % 250


def make_plan(spec: AdapterSpec) -> Plan:
    return Plan(
        student="local", model="sha256:0", files={}, dtype="float32", seed=0, epochs=1, batch=1, learning_rate=1e-3,
        warmup_steps=1, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0, clip_norm=1.0, rank=spec.rank,
        alpha=spec.alpha, max_length=64, max_new_tokens=8, stages=("tune",), plugins={}, flags={},
    )  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Model:
    found = resolve(str(tiny_model(tmp_path_factory.mktemp("base") / "m")), tick=lambda: None, say=print)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def spec(base: Model) -> AdapterSpec:
    return AdapterSpec(rank=4, alpha=6.0, targets=block_targets(base.directory))


@pytest.fixture(scope="module")
def state(spec: AdapterSpec) -> TrainingState:
    made = initial_state(spec, 3)
    generator = np.random.Generator(np.random.Philox(5))
    adapter = {
        name: array if name.endswith("lora_A") else generator.random(array.shape, dtype=np.float32) - np.float32(0.5)
        for name, array in made.adapter.items()
    }
    return TrainingState(adapter=adapter, first_moment=made.first_moment, second_moment=made.second_moment)


@pytest.fixture(scope="module")
def wanted(base: Model, spec: AdapterSpec, state: TrainingState) -> np.ndarray:
    """The engine's losses of every token but the first."""
    engine = open_cpu(model_dir=base.directory, adapter=spec, numerics=Numerics(dtype="float32"), tick=lambda: None)
    engine.import_state(state)
    row = Row(tokens=TOKENS.astype(np.int32), mask=np.array([0] + [1] * (len(TOKENS) - 1), dtype=np.int32))
    return engine.nll([row])[0]


def torch_losses(model: torch.nn.Module) -> np.ndarray:
    ids = torch.from_numpy(TOKENS)[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").numpy()


def test_peft_computes_what_the_engine_computes(
    base: Model, spec: AdapterSpec, state: TrainingState, wanted: np.ndarray, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "out", "peft", state, spec, make_plan(spec))
    plain = transformers.AutoModelForCausalLM.from_pretrained(base.directory, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(plain, tmp_path / "out")
    assert np.abs(torch_losses(model) - wanted).max() < 1e-4


def test_mlx_lm_computes_what_the_engine_computes(
    base: Model, spec: AdapterSpec, state: TrainingState, wanted: np.ndarray, tmp_path: Path
) -> None:
    import mlx.core as mx  # not before the engine, which puts a quick BLAS in front of MLX's own
    import mlx_lm

    write_adapter(tmp_path / "out", "mlx", state, spec, make_plan(spec))
    model, _ = mlx_lm.load(str(base.directory), adapter_path=str(tmp_path / "out"))
    logits = np.array(model(mx.array(TOKENS)[None])[0, :-1])
    shifted = logits - logits.max(axis=-1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(axis=-1)) - shifted[np.arange(len(TOKENS) - 1), TOKENS[1:]]
    assert np.abs(losses - wanted).max() < 1e-4


def test_transformers_loads_a_merged_model(
    base: Model, spec: AdapterSpec, state: TrainingState, wanted: np.ndarray, tmp_path: Path
) -> None:
    write_merged(tmp_path / "out", base, state, spec, lambda: None)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert np.abs(torch_losses(model) - wanted).max() < 1e-4
