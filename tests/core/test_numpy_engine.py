"""The numpy engine: it keeps the engine contract, refuses what it does not compute, and is found as a plugin."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spill.engine import AdapterSpec, Numerics, OpenEngine, Row, Target, Update
from spill.errors import ModelError, NumericsError
from spill.testing import EngineContract
from spill.testing.engine_cases import Bench, adapter, mixed_rows, row
from spill.testing.models import tiny_model
from spill.testing.numpy_engine import open_engine as open_numpy
from spill.testing.plugins import install_plugin


class TestNumpyEngine(EngineContract):
    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return open_numpy

    def test_bfloat16_is_refused(self, bench: Bench) -> None:
        with pytest.raises(NumericsError, match="float32 only"):
            bench.open(numerics=Numerics(dtype="bfloat16"))

    def test_an_unknown_layout_is_noted(self, bench: Bench) -> None:
        facts = bench.open(numerics=Numerics(dtype="float32", layout="packed", micro_batch_tokens=99)).facts()
        assert facts.numerics == Numerics(dtype="float32", layout="rows", micro_batch_tokens=99)
        assert "packed" in facts.notes[0]

    def test_a_layer_of_other_sizes_is_refused_with_both(self, bench: Bench) -> None:
        target = Target(name="model.layers.1.mlp.down_proj", in_features=32, out_features=48)
        with pytest.raises(ModelError, match=r"down_proj' .*\(48, 32\), which is \(32, 48\)"):
            bench.open(spec=AdapterSpec(rank=2, alpha=2.0, targets=(target,)))

    def test_a_batch_without_answer_tokens_is_refused(self, bench: Bench) -> None:
        with pytest.raises(ValueError, match="no answer token"):
            bench.open().step([row(1, 5, 0)], Update(step=1, learning_rate=0.1))

    def test_an_adapter_on_a_head_of_its_own_has_the_models_gradient(self, tmp_path: Path) -> None:
        bench = Bench.at(open_numpy, tiny_model(tmp_path, tied=False), "float32")
        head = Target(name="lm_head", in_features=32, out_features=259)
        bench.spec = AdapterSpec(rank=2, alpha=3.0, targets=(head, bench.spec.targets[0]))
        arrays, rows = adapter(bench.spec, 1), mixed_rows()[:2]
        gradient = bench.gradient(bench.open(), arrays, rows)
        count = sum(int(one.mask.sum()) for one in rows)
        for name, by in gradient.items():
            direction = by.astype(np.float64) / np.linalg.norm(by)
            ahead, behind = (
                sum(
                    bench.reference.losses(one, bench.spec, {**arrays, name: arrays[name] + s * direction}).sum()
                    for one in rows
                )
                for s in (1e-4, -1e-4)
            )
            assert (ahead - behind) / 2e-4 / count == pytest.approx(np.linalg.norm(by), rel=1e-4)

    def test_a_row_of_one_token_has_no_losses(self, bench: Bench) -> None:
        one = Row(tokens=np.array([7], np.int32), mask=np.zeros(1, np.int32))
        assert bench.open().nll([one])[0].shape == (0,)

    def test_ten_steps_are_the_same_bits_in_another_process(self, bench: Bench) -> None:
        program = (
            "import sys, hashlib; from pathlib import Path; from spill.engine import Update\n"
            "from spill.testing.engine_cases import *; from spill.testing.numpy_engine import open_engine\n"
            "bench = Bench.at(open_engine, Path(sys.argv[1]), 'float32')\n"
            "engine = bench.open(untrained(bench.spec, adapter(bench.spec, 1)))\n"
            "for s in range(10): engine.step(training_rows(s), Update(step=s + 1, learning_rate=0.01))\n"
            "state = engine.export_state().groups().values()\n"
            "print(hashlib.sha256(b''.join(a.tobytes() for arrays in state for a in arrays.values())).hexdigest())\n"
        )
        command = [sys.executable, "-c", program, str(bench.model_dir)]
        hashes = {subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2)}
        assert len(hashes) == 1
        assert len(hashes.pop()) == 65


@pytest.mark.parametrize(
    ("key", "value"), [("model_type", "qwen2"), ("rope_scaling", {"factor": 2.0}), ("attention_bias", True)]
)
def test_a_model_of_another_kind_is_refused_naming_the_setting(tmp_path: Path, key: str, value: object) -> None:
    config = tiny_model(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))
    with pytest.raises(ModelError, match=key):
        Bench.at(open_numpy, tmp_path, "float32").open()


def test_a_config_without_a_rotary_base_is_refused(tmp_path: Path) -> None:
    config = tiny_model(tmp_path) / "config.json"
    values = json.loads(config.read_text())
    values["rope_parameters"] = {"rope_theta": values.pop("rope_theta")}
    config.write_text(json.dumps(values))
    with pytest.raises(ModelError, match="rope_theta"):
        Bench.at(open_numpy, tmp_path, "float32").open()


def test_a_tiny_model_depends_on_its_arguments_alone(tmp_path: Path) -> None:
    files = [
        {path.name: path.read_bytes() for path in tiny_model(tmp_path / name, seed=seed).iterdir()}
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    assert files[0] == files[1]
    assert {name for name in files[0] if files[0][name] != files[2][name]} == {"model.safetensors"}


def test_sizes_of_no_llama_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary 258"):
        tiny_model(tmp_path, vocabulary=258)


def test_the_tokenizer_of_a_tiny_model_is_bytes_and_special_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_model(tmp_path) / "tokenizer.json"))
    text = "".join(map(chr, range(32, 127))) + "\n\t é  ü 你好 \x00\x7f"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("a<|im_end|>b").ids == [97, 258, 98]
    assert tokenizer.get_vocab_size() == 259


def test_an_installed_plugin_is_found_by_another_process(tmp_path: Path) -> None:
    install_plugin(tmp_path, distribution="numpy-for-tests", module="spill.testing.numpy_plugin", version="2.5")
    program = (
        "import sys, spill.plugins as p\n"
        "registry = p.discover(); found = registry.get('engine', 'numpy'); seen = p.detect(found.spec)\n"
        "print(found.plugin.label, seen.available, seen.rank, 'numpy' in sys.modules, registry.warnings())\n"
        "print(p.load_target(found.spec).__name__)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment)
    assert run.stdout.splitlines() == ["numpy-for-tests 2.5 True -10 False []", "open_engine"]
