"""What is here, seen without importing mlx: the platform, the installed wheels, MLX's library, the NVIDIA driver."""

import ctypes
import os
import platform
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from attrs import frozen

from spill.plugins import Detection

Device = Literal["metal", "cuda", "cpu"]

# What each device's library comes with. The wheel `mlx` alone holds none on Linux, and says so only when imported.
_INSTALL: dict[Device, str] = {"metal": "mlx", "cuda": "mlx[cuda13]", "cpu": "mlx[cpu]"}
_CUDA_BUILDS = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")


@frozen(kw_only=True)
class Build:
    """The MLX that is installed: the device it was built for, and what keeps it from running (empty: nothing)."""

    device: Device
    missing: str


def detect() -> Detection:
    """Available where MLX has its library and a device: Metal ranks high, CUDA below torch-cuda, a CPU last."""
    build = installed_build()
    if build.missing:
        return Detection(available=False, rank=0, reason=build.missing)
    version = metadata.version("mlx")
    if build.device == "metal":
        return Detection(available=True, rank=40, reason=f"mlx {version} on Apple silicon", dtype="bfloat16")
    if build.device == "cuda":
        reason = f"mlx {version}, built for CUDA; NVIDIA driver loads"
        return Detection(available=True, rank=30, reason=reason, dtype="bfloat16")
    return Detection(available=True, rank=1, reason=f"mlx {version} on {platform.machine()}")


def installed_build() -> Build:
    """Look at the platform and the wheels."""
    system, machine = platform.system(), platform.machine()
    if system == "Darwin":
        wrong = "" if machine == "arm64" else f"MLX needs Apple silicon; this is macOS on {machine}"
        return Build(device="metal", missing=wrong or _missing_library("metal"))
    if system != "Linux":
        return Build(device="cpu", missing=f"MLX runs on macOS and Linux; this is {system}")
    if any(_distribution(name) for name in _CUDA_BUILDS):
        return Build(device="cuda", missing=_missing_library("cuda") or _missing_driver())
    return Build(device="cpu", missing=_missing_library("cpu"))


def _missing_library(device: Device) -> str:
    install = f'pip install "{_INSTALL[device]}"'
    spec = find_spec("mlx")
    if spec is None or not _distribution("mlx"):
        return f"mlx is not installed: {install}"
    name = "libmlx.dylib" if device == "metal" else "libmlx.so"
    if not any((Path(place) / "lib" / name).is_file() for place in spec.submodule_search_locations or ()):
        return f"mlx {metadata.version('mlx')} is installed without its library {name}: {install}"
    if find_spec("mlx_lm") is None:
        return "mlx-lm is not installed: pip install mlx-lm"
    return ""


def _missing_driver() -> str:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides every device: unset it"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "mlx is built for CUDA, but there is no NVIDIA driver: libcuda.so.1 cannot be loaded"
    return ""


def _distribution(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
