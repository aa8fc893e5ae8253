"""The engine mlx against spill's engine suite in float32 and bfloat16, and what the suite cannot know of it."""

import ctypes
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spill.arrays import load_float32, read_header, write_parts
from spill.engine import AdapterSpec, Engine, Float32, Numerics, OpenEngine, Target, Update
from spill.errors import ModelError, SpillError
from spill.testing import EngineContract
from spill.testing.engine_cases import mixed_rows, row, trained
from spill.testing.models import block_targets, tiny_model
from spill_engine_mlx import opening
from spill_engine_mlx.opening import open_engine as open_mlx


class TestMlx(EngineContract):
    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return open_mlx

    def global_probe(self) -> object:
        import mlx.core as mx
        import transformers.utils.logging

        device = mx.default_device()
        return (
            str(device),
            str(mx.default_stream(device)),
            mx.random.state[0].tolist(),
            transformers.utils.logging.get_verbosity(),
        )

    def stir_generators(self) -> None:
        import mlx.core as mx

        super().stir_generators()
        mx.random.uniform()


class TestMlxInBfloat16(TestMlx):
    """Rounding shows in steps, never in `nll`, whose tolerance stays."""

    dtype = "bfloat16"
    step_tolerance = 2e-2
    gradient_tolerance = 0.1
    generation_margin = 0.4


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def opened(model_dir: Path, targets: tuple[Target, ...] = (), **numerics: Any) -> Engine:
    spec = AdapterSpec(rank=4, alpha=12.0, targets=targets)
    asked = Numerics(**{"dtype": "float32"} | numerics)
    return open_mlx(model_dir=model_dir, adapter=spec, numerics=asked, tick=lambda: None)


def changed(tiny: Path, directory: Path, **config: Any) -> Path:
    """A copy of a model with these values in its config.json; None takes one out."""
    shutil.copytree(tiny, directory, dirs_exist_ok=True)
    values = json.loads((directory / "config.json").read_text(encoding="utf-8")) | config
    values = {name: value for name, value in values.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return directory


def reweighted(tiny: Path, directory: Path, change: Callable[[dict[str, Float32]], object]) -> Path:
    """A copy of a model whose tensors were changed."""
    shutil.copytree(tiny, directory, dirs_exist_ok=True)
    path = directory / "model.safetensors"
    tensors = {name: load_float32(path, info) for name, info in read_header(path).items()}
    change(tensors)
    path.write_bytes(b"".join(write_parts(tensors, {"format": "pt"})))
    return directory


# What is refused


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gemma3_text", "gpt2", "phi", None, ["llama"]])
def test_other_model_types_are_refused_by_name(tiny: Path, tmp_path: Path, kind: object) -> None:
    with pytest.raises(ModelError, match="gemma2, llama, mistral, phi3, qwen2, qwen3") as caught:
        opened(changed(tiny, tmp_path / "model", model_type=kind))
    assert repr(kind) in str(caught.value)
    assert "\n" not in str(caught.value)


SCALED = {"factor": 4.0, "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"rope_theta": None, "rope_parameters": {**SCALED, "rope_type": "yarn"}}, "yarn"),
        ({"rope_theta": None, "rope_parameters": {**SCALED, "rope_type": "dynamic"}}, "dynamic"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        ({"model_type": "gemma2", "hidden_activation": "silu"}, "hidden_activation"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma2", "final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ({"model_type": "gemma2", "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "sliding window"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "quantization"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_what_mlx_lm_computes_otherwise_is_refused(
    tiny: Path, tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        opened(changed(tiny, tmp_path / "model", **config))
    assert "\n" not in str(caught.value)


def test_a_config_that_cannot_be_read_is_refused(tiny: Path, tmp_path: Path) -> None:
    directory = changed(tiny, tmp_path / "model")
    for content in (b"{", b"[]", b"\xff"):
        (directory / "config.json").write_bytes(content)
        with pytest.raises(ModelError):
            opened(directory)
    (directory / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        opened(directory)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (lambda t: t.update({"model.norm.weight": np.ones(7, np.float32)}), r"model\.norm\.weight is F32 \(7,\)"),
        (lambda t: t.update({"model.extra.weight": np.ones(7, np.float32)}), r"model\.extra\.weight is not part"),
    ],
    ids=["a layer's", "the norm's", "another shape", "an unknown one"],
)
def test_weights_that_do_not_fit_are_refused(
    tiny: Path, tmp_path: Path, change: Callable[[dict[str, Float32]], object], fault: str
) -> None:
    with pytest.raises(ModelError, match=fault):
        opened(reweighted(tiny, tmp_path / "model", change))


def test_no_weights_are_refused(tiny: Path, tmp_path: Path) -> None:
    directory = changed(tiny, tmp_path / "model")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match="missing"):
        opened(directory)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens", "lm_head", "model.layers.0.mlp", "model.layers.0.input_layernorm"]
)
def test_what_is_no_linear_layer_of_a_block_cannot_be_adapted(tiny: Path, name: str) -> None:
    with pytest.raises((ValueError, SpillError), match=name):
        opened(tiny, (Target(name=name, in_features=32, out_features=32),))


def test_sizes_that_differ_from_the_layers_are_refused(tiny: Path) -> None:
    wrong = Target(name="model.layers.0.mlp.up_proj", in_features=48, out_features=32)
    with pytest.raises(ValueError, match=r"up_proj.*32 to 48.*48 to 32"):
        opened(tiny, (wrong,))


def test_tokens_outside_the_vocabulary_are_refused(tiny: Path) -> None:
    prompt = np.array([1, 2, 259], dtype=np.int32)
    with pytest.raises(ValueError, match=r"row 1 .* 0 to 258"):
        opened(tiny).generate([prompt[:2], prompt], 3, [])
    with pytest.raises(ValueError, match="row 0 is empty"):
        opened(tiny).generate([prompt[:0]], 3, [])


# What is read


def test_a_head_in_the_file_counts_even_where_the_config_ties_it(tiny: Path, tmp_path: Path) -> None:
    """As transformers does: equal ones are tied, and with another one the config is wrong."""

    def with_head(factor: float) -> Path:
        def add(tensors: dict[str, Float32]) -> None:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * np.float32(factor)

        return reweighted(tiny, tmp_path / str(factor), add)

    plain, same, other = (opened(model).nll([row(1, 20, 9)])[0] for model in (tiny, with_head(1.0), with_head(2.0)))
    assert plain.tobytes() == same.tobytes()
    assert np.abs(plain - other).max() > 0.01


def test_weights_in_several_files_are_one_model(tiny: Path, tmp_path: Path) -> None:
    expected = opened(tiny).nll(mixed_rows())
    directory = changed(tiny, tmp_path / "model")
    path = directory / "model.safetensors"
    tensors = {name: load_float32(path, info) for name, info in read_header(path).items()}
    path.unlink()
    for part in range(3):
        shard = {name: tensor for index, (name, tensor) in enumerate(tensors.items()) if index % 3 == part}
        (directory / f"model-{part + 1:05}-of-00003.safetensors").write_bytes(b"".join(write_parts(shard)))
    found = opened(directory).nll(mixed_rows())
    assert [a.tobytes() for a in found] == [b.tobytes() for b in expected]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nll_of_weights_that_bfloat16_holds_is_the_same_in_either_dtype(tiny: Path, tmp_path: Path, dtype: str) -> None:
    def truncate(tensors: dict[str, Float32]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = (tensor.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    model = reweighted(tiny, tmp_path / "model", truncate)
    spec = AdapterSpec(rank=4, alpha=12.0, targets=block_targets(model))
    engines = [opened(model, spec.targets), opened(model, spec.targets, dtype=dtype)]
    for engine in engines:
        engine.import_state(trained(spec, 3))
    first, second = (engine.nll(mixed_rows()) for engine in engines)
    assert [a.tobytes() for a in first] == [b.tobytes() for b in second]


def test_no_new_tokens_are_no_tokens(tiny: Path) -> None:
    (completion,) = opened(tiny).generate([np.array([1, 2], dtype=np.int32)], 0, [])
    assert (completion.tokens.tolist(), completion.reason) == ([], "length")


# Facts


def test_a_layout_of_another_engine_is_replaced_with_a_note(tiny: Path) -> None:
    facts = opened(tiny, layout="packed", micro_batch_tokens=-3).facts()
    assert (facts.numerics.layout, facts.numerics.micro_batch_tokens) == ("shared-prefix", 2048)
    assert "'packed'" in facts.notes[-2]
    assert "-3" in facts.notes[-1]


def has_openblas() -> bool:
    try:
        return hasattr(ctypes.CDLL("libopenblas.so.0"), "openblas_get_config")
    except OSError:
        return False


@pytest.mark.skipif(not has_openblas(), reason="OpenBLAS is not installed")
def test_openblas_is_named_with_its_threads(tiny: Path) -> None:
    facts = opened(tiny).facts()
    assert facts.versions["blas"].startswith("OpenBLAS 0.")
    assert facts.hardware.endswith(f" x{facts.threads}")
    assert facts.notes == ()


def test_what_the_host_lacks_is_noted(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_cpu_host", lambda: opening.Host(device="cpu", blas="bundled", notes=("slow",)))
    facts = opened(tiny).facts()
    assert facts.notes == ("slow",)
    assert facts.versions["blas"] == "bundled"


# In a process of its own, where mlx was not imported yet.


def host_of(first: str) -> dict[str, Any]:
    code = f"import json, sys\nfrom attrs import asdict\nfrom spill_engine_mlx import opening\n{first}\n"
    code += "print(json.dumps(asdict(opening._cpu_host())))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    host: dict[str, Any] = json.loads(done.stdout)
    return host


def test_without_openblas_a_note_says_what_to_install() -> None:
    host = host_of("opening._OPENBLAS = 'libnowhere.so.0'")
    assert (host["blas"], host["threads"]) == ("bundled", 1)
    assert host["notes"] == [
        "slow matrix products, libnowhere.so.0 is not on this machine: apt-get install libopenblas0-pthread"
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="on macOS mlx brings all it needs")
def test_mlx_imported_too_early_is_noted() -> None:
    host = host_of("import mlx.core")
    assert host["blas"] == "bundled"
    assert "imported before" in host["notes"][0]


def steps(model: Path) -> str:
    """What some steps answer and leave behind, as a sha256."""
    spec = AdapterSpec(rank=4, alpha=12.0, targets=block_targets(model))
    engine = opened(model, spec.targets)
    engine.import_state(trained(spec, 1))
    results = [engine.step(mixed_rows(), Update(step=step, learning_rate=1e-3)) for step in range(1, 6)]
    digest = hashlib.sha256(repr(results).encode())
    for arrays in engine.export_state().groups().values():
        for array in arrays.values():
            digest.update(array.tobytes())
    return digest.hexdigest()


def test_another_process_makes_the_same_bits(tmp_path: Path) -> None:
    # Large enough that matrix products are shared out to threads.
    model = tiny_model(tmp_path / "model", hidden=128, intermediate=256)
    code = "import sys; from pathlib import Path; import test_engine; print(test_engine.steps(Path(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)], check=True, capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert done.stdout.strip() == steps(model)
