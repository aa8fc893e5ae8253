"""What the torch plugin detects, why not where it does not, and that it imports no torch for it."""

import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

from spill.plugins import Detection, discover
from spill_engine_torch import detect

CPU_BUILD = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
CUDA_BUILD = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
OLD_CUDA_BUILD = "__version__ = '2.6.0'\ncuda = '12.4'\n"


def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str | None) -> None:
    """Make torch look installed with this version.py, or not at all."""
    (tmp_path / "version.py").write_text(version or "", encoding="utf-8")
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))

    def find(name: str) -> ModuleSpec | None:
        return find_spec(name) if name != "torch" else spec if version else None

    monkeypatch.setattr(detect, "find_spec", find)


def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, library: bool, kernel: bool) -> None:
    monkeypatch.setattr(detect, "_loads", lambda name: library)
    monkeypatch.setattr(detect, "KERNEL_DRIVER", tmp_path if kernel else tmp_path / "absent")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_detecting_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from spill.plugins import detect, discover\n"
        "registry = discover()\n"
        "for name in ('torch-cpu', 'torch-cuda', 'torch-mps'):\n"
        "    assert detect(registry.engine(name)).reason\n"
        "heavy = sorted({'torch', 'transformers', 'numpy', 'mlx'} & sys.modules.keys())\n"
        "assert not heavy, heavy\n"
        "print('light')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "light\n"


def test_the_cpu_engine_is_available_here() -> None:
    seen = detect.cpu()
    assert (seen.available, seen.rank, seen.dtype) == (True, 10, "float32")
    assert seen.reason.startswith("torch ")


def test_the_plugin_registers_three_engines() -> None:
    names = {name for name, found in discover().named("engine").items() if found[0].plugin.name == "torch"}
    assert names == {"torch-cpu", "torch-cuda", "torch-mps"}


@pytest.mark.parametrize("engine", [detect.cpu, detect.cuda, detect.mps])
def test_without_torch_none_is_available(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: Callable[[], Detection]
) -> None:
    build(monkeypatch, tmp_path, None)
    seen = engine()
    assert not seen.available
    assert seen.reason == "torch is not installed: pip install torch"


@pytest.mark.parametrize("version", [CUDA_BUILD, OLD_CUDA_BUILD])
def test_cuda_needs_a_cuda_build_and_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
    build(monkeypatch, tmp_path, version)
    driver(monkeypatch, tmp_path, library=True, kernel=True)
    seen = detect.cuda()
    assert (seen.available, seen.rank, seen.dtype) == (True, 50, "bfloat16")


def test_cuda_with_a_cpu_build_names_the_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build(monkeypatch, tmp_path, CPU_BUILD)
    driver(monkeypatch, tmp_path, library=True, kernel=True)
    seen = detect.cuda()
    assert not seen.available
    assert "without CUDA" in seen.reason


@pytest.mark.parametrize(("kernel", "reason"), [(False, "no NVIDIA driver"), (True, "container")])
def test_cuda_without_a_driver_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: bool, reason: str
) -> None:
    build(monkeypatch, tmp_path, CUDA_BUILD)
    driver(monkeypatch, tmp_path, library=False, kernel=kernel)
    seen = detect.cuda()
    assert not seen.available
    assert reason in seen.reason


@pytest.mark.parametrize("hidden", ["", "-1", " "])
def test_hidden_cuda_devices_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hidden: str) -> None:
    build(monkeypatch, tmp_path, CUDA_BUILD)
    driver(monkeypatch, tmp_path, library=True, kernel=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    seen = detect.cuda()
    assert not seen.available
    assert "CUDA_VISIBLE_DEVICES" in seen.reason


@pytest.mark.parametrize(
    ("system", "machine", "available"),
    [("Darwin", "arm64", True), ("Darwin", "x86_64", False), ("Linux", "arm64", False)],
)
def test_metal_needs_apple_silicon(monkeypatch: pytest.MonkeyPatch, system: str, machine: str, available: bool) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    seen = detect.mps()
    assert (seen.available, seen.rank) == (available, 20)
    assert available or f"{system} {machine}" in seen.reason
