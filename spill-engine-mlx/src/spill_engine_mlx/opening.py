"""Opens the engine: what must be true and done before mlx is imported for the first time in a process."""

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from spill.engine import AdapterSpec, Numerics, Tick
from spill.errors import PluginError
from spill_engine_mlx.detect import Device, installed_build

if TYPE_CHECKING:
    from spill_engine_mlx.engine import MlxEngine

_OPENBLAS = "libopenblas.so.0"


@frozen(kw_only=True)
class Host:
    """The processor as far as it decides how MLX computes on it.

    Attributes:
        device: what MLX was built for.
        blas: the library of matrix products on a CPU and its version; empty on a GPU.
        kernels: the instruction set that the library chose here; empty where it has but one.
        threads: how many the library uses.
        notes: one-line remarks for the user.
    """

    device: Device
    blas: str = ""
    kernels: str = ""
    threads: int = 1
    notes: tuple[str, ...] = ()


def open_engine(*, model_dir: Path, adapter: AdapterSpec, numerics: Numerics, tick: Tick) -> "MlxEngine":
    """Open `mlx`: see `spill.engine.OpenEngine`.

    On a Linux CPU the system's OpenBLAS is put in front of the BLAS that MLX brings, which computes some 2 GFLOP/s. It
    stands in front for the whole process: other libraries that are imported later may compute with it too.

    Raises:
        PluginError: MLX cannot run here; the message says what to install.
        ModelError: the model cannot be read, or is of a kind that this engine does not compute as transformers does.
        ValueError: the adapter names layers that the model lacks, or numerics that are unknown.
    """
    build = installed_build()
    if build.missing:
        raise PluginError(f"mlx was chosen but {build.missing}")
    tick()
    if build.device != "cpu":
        # MLX reads it once: whether float32 products may be computed in TF32.
        os.environ.setdefault("MLX_ENABLE_TF32", "0")
    host = _cpu_host() if build.device == "cpu" else Host(device=build.device)
    # Only now: the import binds MLX to its BLAS.
    from spill_engine_mlx.engine import MlxEngine

    return MlxEngine(host, model_dir, adapter, numerics, tick)


@functools.cache
def _cpu_host() -> Host:
    """Bind MLX to OpenBLAS if it is here and mlx not yet imported; say which BLAS it has. Decided once a process."""
    late = "mlx.core" in sys.modules
    library = _openblas(ctypes.CDLL(None)) if late else _openblas(_load_openblas())
    if library is None:
        found = "mlx was imported before this engine was opened" if late else f"{_OPENBLAS} is not on this machine"
        remedy = "open the engine first" if late else "apt-get install libopenblas0-pthread"
        return Host(device="cpu", blas="bundled", notes=(f"slow matrix products, {found}: {remedy}",))
    config = library.openblas_get_config().decode(errors="replace").split()
    return Host(
        device="cpu",
        blas=" ".join(config[:2]) or "OpenBLAS",
        kernels=library.openblas_get_corename().decode(errors="replace"),
        threads=library.openblas_get_num_threads(),
    )


def _load_openblas() -> ctypes.CDLL | None:
    """Load OpenBLAS where every library loaded later looks first."""
    try:
        return ctypes.CDLL(_OPENBLAS, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None


def _openblas(library: ctypes.CDLL | None) -> ctypes.CDLL | None:
    """The same library with the questions declared that OpenBLAS answers; None if it is another one."""
    try:
        if library is None:
            return None
        library.openblas_get_config.restype = ctypes.c_char_p
        library.openblas_get_corename.restype = ctypes.c_char_p
        library.openblas_get_num_threads.restype = ctypes.c_int
    except AttributeError:
        return None
    return library
