"""What the mlx plugin detects, why not where it does not, what opening it by name says then, and that it is light."""

import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

from spill.engine import AdapterSpec, Numerics
from spill.errors import PluginError
from spill.plugins import Detection, discover, load_target
from spill_engine_mlx import detect, opening


def machine(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    system: str = "Linux",
    processor: str = "x86_64",
    distributions: Sequence[str] = ("mlx", "mlx-cpu"),
    library: str = "libmlx.so",
    mlx_lm: bool = True,
) -> None:
    """Make this look like a machine where these wheels are installed; `library` is what lies in mlx/lib."""
    (tmp_path / "lib").mkdir(exist_ok=True)
    if library:
        (tmp_path / "lib" / library).touch()

    def find(name: str) -> ModuleSpec | None:
        if name == "mlx":
            spec = ModuleSpec("mlx", None, is_package=True)
            spec.submodule_search_locations = [str(tmp_path)]
            return spec if "mlx" in distributions else None
        return find_spec(name) if name != "mlx_lm" or mlx_lm else None

    monkeypatch.setattr(detect, "find_spec", find)
    monkeypatch.setattr(detect, "_distribution", lambda name: name in distributions)
    monkeypatch.setattr(detect.platform, "system", lambda: system)
    monkeypatch.setattr(detect.platform, "machine", lambda: processor)


def test_detecting_imports_neither_mlx_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from spill.plugins import detect, discover\n"
        "assert detect(discover().engine('mlx')).reason\n"
        "heavy = sorted({'mlx', 'mlx.core', 'mlx_lm', 'transformers', 'torch', 'numpy'} & sys.modules.keys())\n"
        "assert not heavy, heavy\n"
        "print('light')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "light\n"


def test_the_plugin_registers_one_engine() -> None:
    spec = discover().engine("mlx")
    assert spec.detect is detect.detect
    assert load_target(spec) is opening.open_engine


@pytest.mark.skipif(sys.platform != "linux", reason="what is said on Linux")
def test_it_is_available_here_and_ranks_last() -> None:
    seen = detect.detect()
    assert (seen.available, seen.dtype) == (True, "float32")
    assert seen.reason.startswith("mlx ")
    assert seen.rank == 1


def test_apple_silicon_ranks_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, tmp_path, system="Darwin", processor="arm64", library="libmlx.dylib")
    seen = detect.detect()
    assert (seen.available, seen.rank, seen.dtype) == (True, 40, "bfloat16")


@pytest.mark.parametrize("build", ["mlx-cuda-12", "mlx-cuda-13"])
def test_a_cuda_build_ranks_behind_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: str) -> None:
    machine(monkeypatch, tmp_path, distributions=("mlx", build))
    monkeypatch.setattr(detect.ctypes, "CDLL", lambda name: object())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = detect.detect()
    assert (seen.available, seen.rank, seen.dtype) == (True, 30, "bfloat16")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert_refused(detect.detect(), tmp_path, "CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("looks", "reason"),
    [
        ({"distributions": ("mlx",), "library": ""}, r'without its library libmlx\.so: pip install "mlx\[cpu\]"$'),
        ({"distributions": ()}, r'mlx is not installed: pip install "mlx\[cpu\]"$'),
        ({"mlx_lm": False}, "mlx-lm is not installed: pip install mlx-lm$"),
        ({"system": "Darwin", "library": ""}, "needs Apple silicon; this is macOS on x86_64$"),
        ({"system": "Darwin", "processor": "arm64", "library": ""}, r'libmlx\.dylib: pip install "mlx"$'),
        ({"system": "Windows"}, "MLX runs on macOS and Linux; this is Windows$"),
        ({"distributions": ("mlx", "mlx-cuda-13"), "library": ""}, r'pip install "mlx\[cuda13\]"$'),
        ({"distributions": ("mlx", "mlx-cuda-13")}, r"no NVIDIA driver: libcuda\.so\.1"),
    ],
)
def test_what_is_missing_is_said_and_opening_by_name_says_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, looks: dict[str, object], reason: str
) -> None:
    def cannot_load(name: str) -> object:
        raise OSError(name)

    machine(monkeypatch, tmp_path, **looks)  # type: ignore[arg-type]
    monkeypatch.setattr(detect.ctypes, "CDLL", cannot_load)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert_refused(detect.detect(), tmp_path, reason)


def assert_refused(seen: Detection, tmp_path: Path, reason: str) -> None:
    assert (seen.available, seen.rank) == (False, 0)
    adapter = AdapterSpec(rank=1, alpha=1.0, targets=())
    with pytest.raises(PluginError, match=reason) as caught:
        opening.open_engine(model_dir=tmp_path, adapter=adapter, numerics=Numerics(dtype="float32"), tick=lambda: None)
    assert str(caught.value) == f"mlx was chosen but {seen.reason}"
    assert "\n" not in str(caught.value)
