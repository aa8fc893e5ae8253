"""torch-cpu against the engine suite, in float32 and bfloat16, and what the suite cannot know of it."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers.utils.logging
from attrs import evolve

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
    """The same suite with a bfloat16 base. `nll` keeps its tolerance: it is float32 from bfloat16 weights."""

    dtype = "bfloat16"


def open_here(model_dir: Path, spec: AdapterSpec, **numerics: object) -> TorchEngine:
    return open_cpu(model_dir=model_dir, adapter=spec, numerics=Numerics(**{"dtype": "float32"} | numerics), tick=int)
