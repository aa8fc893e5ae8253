"""torch-cpu against the engine suite, in float32 and bfloat16, and what the suite cannot know of it."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers.utils.logging
from attrs import evolve
from safetensors.torch import load_file, save_file

from spill.engine import AdapterSpec, Numerics, OpenEngine, Row, Target, Update
from spill.errors import ModelError
from spill.testing.engine_cases import mixed_rows, relative_difference, trained, training_rows, untrained
from spill.testing.engine_contract import EngineContract
from spill.testing.models import block_targets, tiny_model
from spill_engine_torch.engine import TorchEngine, open_cpu


class TestTorchCpu(EngineContract):
    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return open_cpu

    def global_probe(self) -> object:
        return (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.get_num_threads(),
            hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
            transformers.utils.logging.get_verbosity(),
            transformers.utils.logging.is_progress_bar_enabled(),
        )


class TestTorchCpuInBfloat16(TestTorchCpu):
    """The same suite with a bfloat16 base: rounding shows in steps, never in `nll`, whose tolerance stays."""

    dtype = "bfloat16"
    step_tolerance = 1e-2
    gradient_tolerance = 5e-2
    generation_margin = 0.3

    @pytest.fixture(autouse=True)
    def _weights_that_bfloat16_can_hold(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Else the suite's reference computes with other weights than the engine can have.
        def rounded_model(directory: Path, **sizes: Any) -> Path:
            path = tiny_model(directory, **sizes) / "model.safetensors"
            tensors = {name: tensor.bfloat16().float() for name, tensor in load_file(path).items()}
            save_file(tensors, path, metadata={"format": "pt"})
            return directory

        for module in ("engine_base", "engine_training"):
            monkeypatch.setattr(f"spill.testing.{module}.tiny_model", rounded_model)


def open_here(model_dir: Path, spec: AdapterSpec, **numerics: object) -> TorchEngine:
    return open_cpu(model_dir=model_dir, adapter=spec, numerics=Numerics(**{"dtype": "float32"} | numerics), tick=int)
