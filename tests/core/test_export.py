"""What `spill export` hands to other tools: adapters in two layouts, and a whole merged model."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from spill import arrays
from spill.engine import AdapterSpec, Numerics, Row, TrainingState
from spill.errors import Stopped
from spill.export import LAYOUTS, write_merged
from spill.models import resolve
from spill.recipe import initial_state
from spill.signals import StopRequest
from spill.testing.models import block_targets, tiny_model
from spill.testing.numpy_engine import open_engine
from tests.conftest import Spill


def trained(spec: AdapterSpec) -> TrainingState:
    """A state whose factors are all non-zero."""
    state = initial_state(spec, 3)
    generator = np.random.Generator(np.random.Philox(5))
    adapter = {
        name: array if name.endswith("lora_A") else generator.random(array.shape, dtype=np.float32) - np.float32(0.5)
        for name, array in state.adapter.items()
    }
    return TrainingState(adapter=adapter, first_moment=state.first_moment, second_moment=state.second_moment)


def losses(model_dir: Path, spec: AdapterSpec, state: TrainingState | None) -> np.ndarray:
    engine = open_engine(model_dir=model_dir, adapter=spec, numerics=Numerics(dtype="float32"), tick=lambda: None)
    if state:
        engine.import_state(state)
    tokens = (np.arange(40, dtype=np.int32) * 7) % 250
    row = Row(tokens=tokens, mask=np.array([0] + [1] * 39, dtype=np.int32))
    return engine.nll([row], adapter=state is not None)[0]


def to_bfloat16(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    infos = arrays.read_header(path)
    header, data, place = {}, b"", 0
    for name, info in infos.items():
        half = (arrays.load_float32(path, info).view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(info.shape), "data_offsets": [place, place + len(half)]}
        data, place = data + half, place + len(half)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(("dtype", "tolerance"), [("F32", 1e-5), ("BF16", 0.2)])
def test_a_merged_model_computes_what_base_and_adapter_compute(tmp_path: Path, dtype: str, tolerance: float) -> None:
    source = tiny_model(tmp_path / "base")
    if dtype == "BF16":
        to_bfloat16(source)
    spec = AdapterSpec(rank=4, alpha=6.0, targets=block_targets(source))
    state = trained(spec)
    model = resolve(str(source), tick=lambda: None, say=print)
    assert model is not None
    done = write_merged(tmp_path / "merged", model, state, spec, lambda: None)
    assert done.dtype == dtype
    assert done.rounding == 0.0 if dtype == "F32" else 0.0 < done.rounding < 0.01
    wanted, got = losses(source, spec, state), losses(tmp_path / "merged", spec, None)
    assert np.abs(wanted - got).max() < tolerance
    assert np.abs(wanted - losses(source, spec, None)).max() > 0.1
    assert {p.name for p in done.files} == {p.name for p in model.files()}


def test_a_stop_while_merging_leaves_nothing_behind(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "base")
    spec = AdapterSpec(rank=4, alpha=6.0, targets=block_targets(source))
    model = resolve(str(source), tick=lambda: None, say=print)
    assert model is not None
    stop = StopRequest()

    def tick() -> None:
        if any(tmp_path.glob(".merged.*/model.safetensors")):
            stop.asked = signal.SIGTERM
        stop.tick()

    with pytest.raises(Stopped):
        write_merged(tmp_path / "merged", model, trained(spec), spec, tick)
    assert not list(tmp_path.glob("*merged*"))


def test_the_layouts_hold_the_same_numbers_in_their_own_orientation(
    spill: Spill, folder: Path, model: Path, tmp_path: Path
) -> None:
    assert spill("build", folder).code == 0
    for layout in LAYOUTS:
        assert spill("export", folder, "--layout", layout, "--out", tmp_path / layout).code == 0
    peft, mlx = tmp_path / "peft" / "adapter_model.safetensors", tmp_path / "mlx" / "adapters.safetensors"
    theirs, ours = arrays.read_header(peft), arrays.read_header(mlx)
    name = "model.layers.0.mlp.down_proj"
    for side in "AB":
        one = arrays.load_float32(peft, theirs[f"base_model.model.{name}.lora_{side}.weight"])
        other = arrays.load_float32(mlx, ours[f"{name}.lora_{side.lower()}"])
        assert np.array_equal(one, other.T)
    config = json.loads((tmp_path / "mlx" / "adapter_config.json").read_text())
    assert config["lora_parameters"]["scale"] == 2.0
    assert config["num_layers"] == 2
    assert len(ours) == len(theirs) == 2 * len(block_targets(model))


def test_export_refuses_an_unfinished_tune_and_a_folder_in_use(spill: Spill, folder: Path, tmp_path: Path) -> None:
    assert spill("build", folder, "--stop-after", "tune:2").code == 0
    early = spill("export", folder, "--out", tmp_path / "out")
    assert early.code == 1
    assert "spill resume" in early.error
    assert spill("resume", folder).code == 0
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    for option in ((), ("--merged",), ("--layout", "mlx")):
        assert spill("export", folder, "--out", tmp_path / "out", *option).code == 1
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_an_adapter_exported_twice_has_the_same_bytes(spill: Spill, folder: Path, tmp_path: Path, layout: str) -> None:
    assert spill("build", folder).code == 0
    written = []
    for number in (1, 2):
        assert spill("export", folder, "--layout", layout, "--out", tmp_path / str(number)).code == 0
        written.append({p.name: p.read_bytes() for p in (tmp_path / str(number)).iterdir()})
    assert written[0] == written[1]
    assert "adapter_config.json" in written[0]
