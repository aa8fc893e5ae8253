"""torch-cpu against the engine suite, in float32 and bfloat16, and what the suite cannot know of it."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers.utils.logging
from attrs import evolve
from safetensors.torch import load_file, save_file

from spill.engine import AdapterSpec, Numerics, OpenEngine, Row, Target
from spill.errors import ModelError, PluginError
from spill.plugins import discover, load_target
from spill.testing import EngineContract
from spill.testing.engine_cases import mixed_rows, trained
from spill.testing.models import block_targets, tiny_model
from spill_engine_torch import engine as engine_module
from spill_engine_torch.engine import TorchEngine, open_cpu, open_cuda, open_mps
from spill_engine_torch.layout import PACKED, Laid


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

    def stir_generators(self) -> None:
        super().stir_generators()
        torch.rand(1)


class TestTorchCpuInBfloat16(TestTorchCpu):
    """Rounding shows in steps, never in `nll`, whose tolerance stays."""

    dtype = "bfloat16"
    step_tolerance = 2e-2
    gradient_tolerance = 0.1
    generation_margin = 0.4


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny")


def spec_of(model_dir: Path) -> AdapterSpec:
    return AdapterSpec(rank=4, alpha=12.0, targets=block_targets(model_dir))


def opened(model_dir: Path, spec: AdapterSpec | None = None, **numerics: Any) -> TorchEngine:
    asked = Numerics(**{"dtype": "float32"} | numerics)
    return open_cpu(model_dir=model_dir, adapter=spec or spec_of(model_dir), numerics=asked, tick=lambda: None)


def test_the_targets_of_the_plugin_are_these() -> None:
    registry = discover()
    opens = [load_target(registry.engine(name)) for name in ("torch-cpu", "torch-cuda", "torch-mps")]
    assert opens == [open_cpu, open_cuda, open_mps]


@pytest.mark.parametrize(("asked", "used"), [("packed", "packed"), ("padded", "padded")])
def test_a_known_layout_is_followed(tiny: Path, asked: str, used: str) -> None:
    facts = opened(tiny, layout=asked).facts()
    assert (facts.numerics.layout, facts.notes) == (used, ())


def test_an_unknown_layout_and_bound_are_replaced_with_notes(tiny: Path) -> None:
    facts = opened(tiny, layout="rows", micro_batch_tokens=-3).facts()
    assert (facts.numerics.layout, facts.numerics.micro_batch_tokens) == ("packed", 2048)
    assert "'rows'" in facts.notes[0]
    assert "-3" in facts.notes[1]


def test_a_model_that_packs_wrongly_is_padded_and_says_so(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sees_everything(rows: Sequence[Row], device: torch.device) -> Laid:
        laid = PACKED.lay(rows, device)
        return laid if laid.mask is None else evolve(laid, mask=torch.ones_like(laid.mask))

    monkeypatch.setattr(engine_module, "PACKED", evolve(PACKED, lay=sees_everything))
    facts = opened(tiny).facts()
    assert facts.numerics.layout == "padded"
    assert "packed rows have other losses" in facts.notes[0]


def test_hardware_names_the_instruction_set(tiny: Path) -> None:
    facts = opened(tiny).facts()
    assert torch.backends.cpu.get_cpu_capability() in facts.hardware
    assert facts.device == "cpu"
    assert facts.versions.keys() == {"torch", "transformers", "numpy"}


def test_sizes_that_differ_from_the_layers_are_refused(tiny: Path) -> None:
    wrong = Target(name="model.layers.0.mlp.up_proj", in_features=48, out_features=32)
    with pytest.raises(ValueError, match=r"up_proj.*32 to 48.*48 to 32"):
        opened(tiny, AdapterSpec(rank=2, alpha=2.0, targets=(wrong,)))


def test_files_of_a_bare_base_model_are_read_under_their_own_names(tiny: Path) -> None:
    spec = spec_of(tiny)
    expected = opened(tiny, spec).nll(mixed_rows())
    path = tiny / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    bare = AdapterSpec(
        rank=spec.rank,
        alpha=spec.alpha,
        targets=tuple(
            Target(name=t.name.removeprefix("model."), in_features=t.in_features, out_features=t.out_features)
            for t in spec.targets
        ),
    )
    found = opened(tiny, bare).nll(mixed_rows())
    assert [a.tobytes() for a in found] == [b.tobytes() for b in expected]


def test_files_that_lack_a_weight_are_refused(tiny: Path) -> None:
    spec, path = spec_of(tiny), tiny / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        opened(tiny, spec)
    assert caught.value.details == ("model.layers.1.mlp.up_proj.weight",)


def test_weights_of_another_shape_are_refused(tiny: Path) -> None:
    spec, path = spec_of(tiny), tiny / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError):
        opened(tiny, spec)


def test_a_file_that_was_cut_short_is_refused(tiny: Path) -> None:
    spec, path = spec_of(tiny), tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot load"):
        opened(tiny, spec)


def test_what_happens_to_the_file_later_changes_nothing(tiny: Path) -> None:
    engine = opened(tiny)
    before = engine.nll(mixed_rows())
    with (tiny / "model.safetensors").open("r+b") as file:
        file.write(bytes((tiny / "model.safetensors").stat().st_size))
    assert [a.tobytes() for a in engine.nll(mixed_rows())] == [b.tobytes() for b in before]


def test_pickled_weights_are_refused(tiny: Path) -> None:
    spec, path = spec_of(tiny), tiny / "model.safetensors"
    torch.save(load_file(path), tiny / "pytorch_model.bin")
    path.unlink()
    with pytest.raises(ModelError):
        opened(tiny, spec)


def test_code_that_comes_with_a_model_is_not_run(tiny: Path) -> None:
    spec, witness = spec_of(tiny), tiny / "ran"
    (tiny / "modeling_own.py").write_text(f"open({str(witness)!r}, 'w')\n", encoding="utf-8")
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = "own"
    config["auto_map"] = {"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"}
    (tiny / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError):
        opened(tiny, spec)
    assert not witness.exists()


def test_tokens_outside_the_vocabulary_are_refused(tiny: Path) -> None:
    engine = opened(tiny)
    prompt = np.array([1, 2, 259], dtype=np.int32)
    with pytest.raises(ValueError, match=r"row 1 .* 0 to 258"):
        engine.generate([prompt[:2], prompt], 3, [])
    with pytest.raises(ValueError, match="row 0 is empty"):
        engine.generate([prompt[:0]], 3, [])


def test_no_new_tokens_are_no_tokens(tiny: Path) -> None:
    (completion,) = opened(tiny).generate([np.array([1, 2], dtype=np.int32)], 0, [])
    assert (completion.tokens.tolist(), completion.reason) == ([], "length")


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_torch_cuda_without_a_device_says_so(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # so that what opening sets is undone
    with pytest.raises(PluginError, match="sees no CUDA device"):
        open_cuda(model_dir=tiny, adapter=spec_of(tiny), numerics=Numerics(dtype="bfloat16"), tick=lambda: None)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="Metal is here")
def test_torch_mps_without_a_device_says_so(tiny: Path) -> None:
    with pytest.raises(PluginError, match="sees no Metal device"):
        open_mps(model_dir=tiny, adapter=spec_of(tiny), numerics=Numerics(dtype="float32"), tick=lambda: None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nll_is_float32_from_the_weights_as_they_are(tiny: Path, dtype: str) -> None:
    """Weights that bfloat16 holds exactly: the base in bfloat16 answers what the base in float32 does, to the bit."""
    state = trained(spec_of(tiny), 3)
    engines = [opened(tiny, dtype="float32"), opened(tiny, dtype=dtype)]
    for engine in engines:
        engine.import_state(state)
    first, second = (engine.nll(mixed_rows()) for engine in engines)
    assert [a.tobytes() for a in first] == [b.tobytes() for b in second]


STEPS = """
import hashlib, sys
from pathlib import Path
from spill.engine import AdapterSpec, Numerics, Update
from spill.testing.engine_cases import mixed_rows, trained
from spill.testing.models import block_targets
from spill_engine_torch.engine import open_cpu
model = Path(sys.argv[1])
spec = AdapterSpec(rank=4, alpha=12.0, targets=block_targets(model))
engine = open_cpu(model_dir=model, adapter=spec, numerics=Numerics(dtype=sys.argv[2]), tick=lambda: None)
engine.import_state(trained(spec, 1))
results = [engine.step(mixed_rows(), Update(step=step, learning_rate=1e-3)) for step in range(1, 6)]
digest = hashlib.sha256(repr(results).encode())
for arrays in engine.export_state().groups().values():
    for array in arrays.values():
        digest.update(array.tobytes())
print(digest.hexdigest())
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_process_makes_the_same_bits(tiny: Path, dtype: str) -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", STEPS, str(tiny), dtype],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ).stdout
        for _ in range(2)
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64
