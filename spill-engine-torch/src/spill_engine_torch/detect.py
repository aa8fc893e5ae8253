"""What is here, seen without importing torch: the installed wheel and its build, the platform, the NVIDIA driver."""

import ctypes
import os
import platform
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from spill.plugins import Detection

# The kernel driver's own file. A container sees its host's, so it alone says nothing about a usable device.
KERNEL_DRIVER = Path("/proc/driver/nvidia/version")


def cpu() -> Detection:
    """Available wherever torch and transformers are installed."""
    missing = _missing_library()
    reason = missing or f"torch {metadata.version('torch')} on {platform.machine()}"
    return Detection(available=not missing, rank=10, reason=reason)


def cuda() -> Detection:
    """Available with a torch built for CUDA, a loadable NVIDIA driver, and no setting that hides its devices."""
    missing = _missing_library() or _missing_cuda_build() or _missing_nvidia_device()
    reason = missing or f"torch {metadata.version('torch')}, built for CUDA {_cuda_build()}; NVIDIA driver loads"
    return Detection(available=not missing, rank=50, reason=reason, dtype="bfloat16")


def mps() -> Detection:
    """Available on macOS with Apple silicon."""
    missing = _missing_library()
    if not missing and (platform.system(), platform.machine()) != ("Darwin", "arm64"):
        missing = f"Metal needs macOS on arm64; this is {platform.system()} {platform.machine()}"
    reason = missing or f"torch {metadata.version('torch')} on Apple silicon"
    return Detection(available=not missing, rank=20, reason=reason)


def _missing_library() -> str:
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            return f"{name} is not installed: pip install {name}"
    return ""


def _missing_cuda_build() -> str:
    if _cuda_build():
        return ""
    return f"torch {metadata.version('torch')} is installed without CUDA: install a CUDA build of torch"


def _cuda_build() -> str:
    """The CUDA release that the installed torch was built for, from its generated version.py; empty if none."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, flags=re.MULTILINE)
    return found.group(1) if found else ""


def _missing_nvidia_device() -> str:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides every device: unset it"
    library = "nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1"
    if _loads(library):
        return ""
    if KERNEL_DRIVER.exists():
        return f"the NVIDIA kernel driver is loaded but {library} is not here: start the container with its GPUs"
    return f"no NVIDIA driver: {library} cannot be loaded"


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
